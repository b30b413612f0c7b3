"""The registry: first-party, then installed packages, then the caller's objects first."""

import pytest
import torch

from graphfuse import GraphTypeError, GraphValidationError, PluginError, heur_mode, plugins
from graphfuse.engines import ALL as ENGINES
from graphfuse.patterns import ALL as PATTERNS
from support import graphs, toys


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """A distribution on the path whose entry points are lines of `text`, with a module `extra_plugin`."""

    def make(text: str, code: str = ""):
        info = tmp_path / "extra_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(text)
        (tmp_path / "extra_plugin.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        plugins.forget()

    yield make
    import sys

    sys.modules.pop("extra_plugin", None)
    monkeypatch.undo()
    plugins.forget()


GOOD = "from support import toys\nENGINE = toys.HostSolo('extra')\nPATTERNS = toys.solo('relu', 'tanh')\n"
POINTS = "[graphfuse.engines]\nextra = extra_plugin:ENGINE\n[graphfuse.patterns]\nextra = extra_plugin:PATTERNS\n"


def test_first_party_comes_first():
    known = plugins.installed()
    assert known.engines[: len(ENGINES)] == ENGINES and known.patterns[: len(PATTERNS)] == PATTERNS
    assert plugins.registry() == known


def test_entry_points_are_found(distribution):
    distribution(POINTS, GOOD)
    known = plugins.installed()
    assert [e.name for e in known.engines] == [*(e.name for e in ENGINES), "extra"]
    assert [p.name for p in known.patterns][-2:] == ["solo_relu", "solo_tanh"]
    g = graphs.new()
    g.relu(g.tensor([3], name="x")).set_output().set_name("out")
    x, out = torch.tensor([-1.0, 0.0, 2.0]), torch.empty(3)
    graphs.run(g, {"x": x, "out": out}, [heur_mode.OPENSOURCE])
    assert g.get_plan_name_at_index(0) == "extra[size=1]" and torch.equal(out, x.relu())


BROKEN = {
    "missing module": (POINTS.replace("extra_plugin:E", "nowhere:E"), GOOD, "'extra'.*graphfuse.engines.*nowhere"),
    "missing name": (POINTS.replace(":PATTERNS", ":OTHER"), GOOD, "'extra'.*graphfuse.patterns.*OTHER"),
    "raises": (POINTS, "raise RuntimeError('a bad day')", "'extra'.*a bad day"),
    "wrong object": (POINTS, GOOD + "ENGINE = 7\n", "'extra'.*must give Engine objects, got 7"),
    "class, not object": (POINTS, GOOD + "ENGINE = toys.HostSolo\n", "must give Engine objects"),
    "wrong in a tuple": (POINTS, GOOD + "PATTERNS += ('x',)\n", "must give Pattern objects, got 'x'"),
    "taken name": (POINTS, GOOD.replace("'extra'", "'reference'"), "two engines are named 'reference'"),
}


@pytest.mark.parametrize(("points", "code", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_named(distribution, points, code, message):
    distribution(points, code)
    with pytest.raises(PluginError, match=message):
        plugins.installed()


def test_the_callers_objects_come_first_and_names_restrict():
    mine, pattern = toys.HostSolo("mine"), toys.solo("relu")[0]
    both = plugins.registry([pattern], [mine])
    assert both.engines == (mine, *plugins.installed().engines)
    assert both.patterns == (pattern, *plugins.installed().patterns)
    only = plugins.registry(["rows"], ["reference", mine])
    assert [p.name for p in only.patterns] == ["rows"]
    assert [e.name for e in only.engines] == ["mine", "reference"]


@pytest.mark.parametrize(
    ("patterns", "engines", "error", "message"),
    [
        (["nobody"], [], GraphValidationError, "no pattern is named 'nobody'.*rows"),
        ([], [7], GraphTypeError, "engines: give Engine objects or names, got 7"),
        ([], [toys.HostSolo("reference")], PluginError, "two engines are named 'reference'"),
        ([toys.HostSolo()], [], GraphTypeError, "patterns: give Pattern objects"),
    ],
)
def test_what_the_caller_gives_is_checked(patterns, engines, error, message):
    with pytest.raises(error, match=message):
        plugins.registry(patterns, engines)
