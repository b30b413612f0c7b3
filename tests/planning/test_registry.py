"""The registry: first-party, then installed packages, then the caller's objects first."""

import dataclasses
import sys
import warnings

import pytest
import torch

from graphfuse import GraphNotSupportedError, GraphTypeError, GraphValidationError, PluginError, SettingError, heur_mode
from graphfuse.engines import ALL as ENGINES
from graphfuse.patterns import ALL as PATTERNS
from graphfuse.patterns import OF_ENGINES
from graphfuse.planning import registry as plugins
from support import graphs, toys


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """A distribution on the path whose entry points are lines of `text`, with a module of its name."""
    made = []

    def make(text: str, code: str = "", module: str = "extra_plugin"):
        info, name = tmp_path / f"{module}-1.0.dist-info", module.replace("_", "-")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(text)
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        made.append(module)
        plugins.forget()

    yield make
    for module in made:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    plugins.forget()


GOOD = "from support import toys\nENGINE = toys.HostSolo('extra')\nPATTERNS = toys.solo('relu', 'tanh')\n"
POINTS = "[graphfuse.engines]\nextra = extra_plugin:ENGINE\n[graphfuse.patterns]\nextra = extra_plugin:PATTERNS\n"


def test_first_party_comes_first():
    known = plugins.installed()
    assert known.engines[: len(ENGINES)] == ENGINES and known.patterns[: len(PATTERNS)] == PATTERNS
    used = plugins.registry()
    assert used.engines == known.engines and used.patterns == (*known.patterns, *OF_ENGINES["cudnn"])


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


NO_MODES = "class Odd(toys.HostSolo):\n    modes = 'A'\n"
NO_DATA = "class Odd(toys.HostSolo):\n    facts = property(lambda self: 1 / 0)\n"

# entry points, code, kind and name that is left out, why, how many of the others are loaded
BROKEN = {
    "missing module": (POINTS.replace("extra_plugin:E", "nowhere:E"), GOOD, "engine", "extra", "nowhere", 2),
    "missing name": (POINTS.replace(":PATTERNS", ":OTHER"), GOOD, "pattern", "extra", "has no attribute 'OTHER'", 1),
    "raises": (POINTS, "raise RuntimeError('a bad day')", "engine", "extra", "RuntimeError: a bad day", 0),
    "exits": (POINTS, "import sys\nsys.exit('a bad day')", "engine", "extra", "SystemExit: a bad day", 0),
    "does not parse": (POINTS, "def (", "engine", "extra", "SyntaxError", 0),
    "wrong object": (POINTS, GOOD + "ENGINE = 7\n", "engine", "extra", "must give Engine objects, got 7", 2),
    "class, not object": (POINTS, GOOD + "ENGINE = toys.HostSolo\n", "engine", "extra", "must give Engine objects", 2),
    "wrong in a tuple": (POINTS, GOOD + "PATTERNS += ('x',)\n", "pattern", "extra", "Pattern objects, got 'x'", 3),
    "no modes": (POINTS, GOOD + NO_MODES + "ENGINE = Odd('odd')\n", "engine", "extra", "its modes is 'A'; acc", 2),
    "no data": (
        POINTS,
        GOOD + NO_DATA + "ENGINE = Odd('odd')\n",
        "engine",
        "extra",
        "its facts cannot be read: Zero",
        2,
    ),
    "no name": (POINTS, GOOD + "ENGINE.name = None\n", "engine", "extra", "its name is None; accepted: str", 2),
    "taken name": (
        POINTS,
        GOOD.replace("'extra'", "'reference'"),
        "engine",
        "reference",
        "graphfuse has one of that name, and names must differ; extra-plugin 1.0 comes later",
        2,
    ),
}


@pytest.mark.parametrize(("points", "code", "kind", "name", "why", "loaded"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_named_and_left_out(distribution, points, code, kind, name, why, loaded):
    distribution(points, code)
    with pytest.warns(RuntimeWarning, match=f"{kind} '{name}' of extra-plugin 1.0 is left out: .*{why}"):
        known = plugins.installed()
    assert known.engines[: len(ENGINES)] == ENGINES and known.patterns[: len(PATTERNS)] == PATTERNS
    assert len(known.engines) + len(known.patterns) == len(ENGINES) + len(PATTERNS) + loaded
    rows = [one for one in plugins.listed() if one.state == plugins.LEFT_OUT]
    assert (kind, name, "extra-plugin", "1.0") in [(r.kind, r.name, r.distribution, r.version) for r in rows]
    assert any(why in row.error for row in rows) and len(plugins.listed()) == loaded + len(rows)
    # The rest goes on, once warned of, and says who was left out.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = graphs.new()
        g.relu(g.tensor([3], name="x")).set_output().set_name("out")
        x, out = torch.tensor([-1.0, 0.0, 2.0]), torch.empty(3)
        graphs.run(g, {"x": x, "out": out}, [heur_mode.A])
        assert torch.equal(out, x.relu())
    assert rows[0].error in g.explain()
    with pytest.raises(GraphValidationError, match=f"no {kind} is named 'nobody'"):
        plugins.registry(**{f"{kind}s": ["nobody"]})


def test_no_plan_says_who_was_left_out(distribution):
    distribution(POINTS, "raise RuntimeError('a bad day')")
    g = graphs.new()
    g.relu(g.tensor([3])).set_output()
    with (
        pytest.warns(RuntimeWarning, match="left out"),
        pytest.raises(GraphNotSupportedError, match="engine 'extra' of extra-plugin 1.0 is left out: .*a bad day"),
    ):
        g.build([heur_mode.OPENSOURCE])
    with pytest.raises(
        GraphValidationError, match="no engine is named 'extra'; there are: .*; engine 'extra' of .*bad d"
    ):
        plugins.registry(engines=["extra"])


def test_of_two_packages_with_one_name_the_later_is_left_out(distribution):
    distribution(POINTS, GOOD)
    other = POINTS.replace("extra_plugin", "other_plugin").replace("extra =", "zother =")
    distribution(other, GOOD.replace("'tanh'", "'sigmoid'"), "other_plugin")
    with pytest.warns(RuntimeWarning) as warned:
        known = plugins.installed()
    assert [e.name for e in known.engines[len(ENGINES) :]] == ["extra"]
    assert [p.name for p in known.patterns[len(PATTERNS) :]] == ["solo_relu", "solo_tanh", "solo_sigmoid"]
    said = sorted(str(w.message) for w in warned)
    assert said == [
        f"{kind} {name!r} of other-plugin 1.0 is left out: extra-plugin 1.0 has one of that name, and names must "
        "differ; other-plugin 1.0 comes later"
        for kind, name in (("engine", "extra"), ("pattern", "solo_relu"))
    ]


def test_a_package_whose_entry_points_cannot_be_read(distribution):
    distribution(POINTS, GOOD)
    distribution("[graphfuse.engines]\nno equals sign\n", "", "other_plugin")
    with pytest.warns(RuntimeWarning, match="'entry_points.txt' of other-plugin 1.0 is left out: .* cannot be read"):
        known = plugins.installed()
    assert "extra" in [e.name for e in known.engines]


def test_off_loads_none(distribution, monkeypatch):
    distribution(POINTS, "raise RuntimeError('a bad day')")
    monkeypatch.setenv("GRAPHFUSE_PLUGINS", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = plugins.installed()
    assert known.engines == ENGINES and known.patterns == PATTERNS
    assert plugins.listed() == tuple(
        plugins.Listed(kind, "extra", "extra-plugin", "1.0", plugins.OFF) for kind in ("pattern", "engine")
    )
    monkeypatch.setenv("GRAPHFUSE_PLUGINS", "none")
    with pytest.raises(SettingError, match="GRAPHFUSE_PLUGINS='none' is not known; accepted: on, off"):
        plugins.installed()


def test_what_is_installed_is_listed(distribution):
    assert plugins.listed() == ()
    distribution(POINTS, GOOD)
    assert plugins.listed() == tuple(
        plugins.Listed(kind, name, "extra-plugin", "1.0", plugins.LOADED)
        for kind, name in (("pattern", "solo_relu"), ("pattern", "solo_tanh"), ("engine", "extra"))
    )
    assert str(plugins.origin(plugins.installed().engines[-1])) == "extra-plugin 1.0"


@pytest.mark.parametrize("again", ["the object", "one made again"])
def test_installed_and_passed_is_one_plugin(distribution, again):
    distribution(POINTS, GOOD)
    known = plugins.installed()
    engine, patterns = known.engines[-1], known.patterns[-2:]
    if again == "one made again":
        engine, patterns = toys.HostSolo("extra"), tuple(map(dataclasses.replace, patterns))
    both = plugins.registry(patterns, [engine, engine])
    assert both.engines == (engine, *ENGINES) and both.patterns == (*patterns, *PATTERNS, *OF_ENGINES["cudnn"])
    only = plugins.registry([patterns[0], "rows", "rows"], [engine, "reference"])
    assert [e.name for e in only.engines] == ["extra", "reference"]
    assert [p.name for p in only.patterns] == ["solo_relu", "rows"]
    g = graphs.new()
    g.relu(g.tensor([3], name="x")).set_output().set_name("out")
    g.build([heur_mode.OPENSOURCE], patterns=list(patterns), engines=[engine])
    assert g.get_plan_name_at_index(0) == "extra[size=1]"


def test_another_engine_of_an_installed_ones_name_is_refused(distribution):
    distribution(POINTS, GOOD)
    with pytest.raises(
        PluginError, match="two engines are named 'extra': one that .*, and one of extra-plugin 1.0; nam"
    ):
        plugins.registry(engines=[toys.HostSolo("extra", (1, 2))])
    with pytest.raises(PluginError, match="two engines are named 'mine': one that .*, and one of the graph's caller"):
        plugins.registry(engines=[toys.HostSolo("mine"), toys.HostSolo("mine", (1, 2))])


def test_the_callers_objects_come_first_and_names_restrict():
    mine, pattern = toys.HostSolo("mine"), toys.solo("relu")[0]
    both = plugins.registry([pattern], [mine])
    assert both.engines == (mine, *plugins.installed().engines)
    assert both.patterns == (pattern, *plugins.registry().patterns)
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
