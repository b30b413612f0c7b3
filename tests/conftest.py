"""Lanes, the hypothesis profile, and the record that a run on a GPU leaves."""

import gc
import os
import random
import sys
import time
import zlib
from pathlib import Path

import hypothesis
import pytest

from graphfuse.benchmarks import record
from graphfuse.tuned_tables import store
from support import covering

ROOT = Path(__file__).resolve().parent.parent

# There are as many workers as cores: threads of torch would wait for each other's, which takes half of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Else each process that first compiles with inductor compiles and loads programs with the processor's instructions, for
# ten seconds: whether g++ knows these is no question of ours.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Garbage is looked for when there may be some (pytest_collection), not after each of thousands of compilations too.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# Derandomized: a run says something about the code, not about the day. Shared machines have no deadlines.
hypothesis.settings.register_profile("graphfuse", deadline=None, derandomize=True, max_examples=30, database=None)
hypothesis.settings.load_profile("graphfuse")


def pytest_addoption(parser):
    parser.addoption(
        "--record",
        metavar="FOLDER",
        help="write gpu-tests-DEVICE.json (of several GPUs: gpu-tests-of-N-DEVICE.json) about this run into FOLDER",
    )
    parser.addoption(
        "--turn",
        metavar="K/N",
        type=lambda text: tuple(map(int, text.split("/"))),
        help="run of each test the first case, and of the others every Nth from the Kth on, as N runs share them",
    )


@pytest.hookimpl(tryfirst=True)  # before groups are read
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "room" in item.fixturenames:  # tests that take much of a GPU's memory do not run side by side
            item.add_marker(pytest.mark.xdist_group("memory"))
    stand_ins(items)
    if turn := config.getoption("--turn"):
        chosen = shared(items, *turn)
        config.hook.pytest_deselected(items=list({*items} - {*chosen}))
        items[:] = chosen
    marked = [item for item in items if item.get_closest_marker("gpu")]
    # Asking for devices costs an import of CUDA: only where a GPU test was asked for.
    if marked and "not gpu" not in config.option.markexpr:
        reason = record.no_gpu()
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


def stand_ins(items):
    """Mark the cases that make test leaves to others.

    Of lists that are crossed, the first cases have every value of each; further ones have every pair of values; what is
    left is thorough. A test marked `some(n)`, `some(n, m)` or `each_value` says itself which are first, or further.
    """
    marked = {"gpu", "thorough", "further"}
    cases = [item for item in items if not {mark.name for mark in item.iter_markers()} & marked]
    for group in by_test(cases):
        if len(group) > 1:
            first, further = chosen(group)
            for number, case in enumerate(group):
                if number not in first:
                    case.add_marker(pytest.mark.further if number in further else pytest.mark.thorough)


def chosen(group):
    """Numbers of the first cases of a test, and of those that are first or further ones."""
    crossed, everything = [lists(case) for case in group], range(len(group))
    if mark := group[0].get_closest_marker("some"):
        first = covering.spread(len(group), mark.args[0])
        if len(mark.args) > 1:
            return first, covering.spread(len(group), sum(mark.args))
    elif group[0].get_closest_marker("each_value"):
        first = covering.covering([covering.values(case.callspec.params) for case in group])
    elif len(crossed[0]) > 1:
        first = covering.covering(crossed)
    else:
        return everything, everything
    if len(crossed[0]) > 2:
        return first, covering.covering([covering.pairs(one) for one in crossed], first)
    return first, everything


def lists(case):
    """What a case has of each list that its test is parametrized with."""
    values = dict(case.callspec.params)
    crossed = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        crossed.append((names, tuple(id(values.pop(name)) for name in names if name)))
    return frozenset([*crossed, *((name, id(value)) for name, value in values.items())])


def shared(items, turn, runs):
    """Items of the run number `turn` of several, which share the cases of each test but the first."""
    tests = by_test(item for item in items if not item.get_closest_marker("further"))
    return [case for first, *others in tests for case in (first, *others[turn - 1 :: runs])]


def by_test(items):
    """The cases of each test."""
    tests = {}
    for item in items:
        tests.setdefault((item.path, item.cls, getattr(item, "originalname", item.name)), []).append(item)
    return tests.values()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    # Thousands of tests and all modules stay until the end: no search for garbage goes through them, now or later. What
    # little garbage there is stays, too.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.callbacks.append(keep_survivors)
        gc.set_threshold(20_000, 20, 20)  # of garbage there is little: a tenth of all time went into looking for it
        gc.enable()


def keep_survivors(phase, info):
    """What a search through everything leaves is in use for long: the next one need not go through it."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config, log):
    """That of --dist loadgroup, which forgets finished tests: after each test it counts those that are left."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduler(LoadGroupScheduling):
        def _pending_of(self, workload):
            for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
                del workload[scope]
            return super()._pending_of(workload)

    return Scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_sessionstart(session):
    session.config._graphfuse_start = time.time()


@pytest.fixture(autouse=True)
def numbers(request):
    """A test draws the same numbers alone, in any order, and on any day."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if torch := sys.modules.get("torch"):  # else its generators start from a seed that is the same in each process
        # manual_seed keeps the stack for every kind of device that is not used yet: most of what a small test takes.
        devices = request.node.get_closest_marker("gpu") or torch.cuda.is_initialized()
        (torch if devices else torch.default_generator).manual_seed(seed)


@pytest.fixture
def plan_on(monkeypatch):
    """plan_on(device): CPU tensors are planned for that device until the test ends. Fast paths go by no device but that
    of tensors: those of before do not serve the test, nor its own those of after."""

    def plan_on(device):
        monkeypatch.setenv("GRAPHFUSE_DEVICE", device)
        store._changed()

    yield plan_on
    store._changed()


@pytest.fixture
def note(record_property):
    """note(text): a line for the end of the run, wherever the test ran; equal ones are printed once."""
    return lambda text: record_property("note", text)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    reports = (r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()))
    notes = (value for r in reports for key, value in getattr(r, "user_properties", ()) if key == "note")
    for text in dict.fromkeys(notes):
        terminalreporter.write_line(f"note: {text}", yellow=True)
    if not config.getoption("--record"):
        return
    of = {k: terminalreporter.stats.get(k, ()) for k in ("passed", "failed", "error", "skipped")}
    content = {
        "counts": {k: len(reports) for k, reports in of.items()},
        "failed": sorted({r.nodeid for r in (*of["failed"], *of["error"])}),
        "seconds": round(time.time() - config._graphfuse_start, 1),
        "exit_status": int(exitstatus),
    }
    about = record.environment(ROOT)
    path = record.write(Path(config.getoption("--record")), record.of_tests(about), about, content)
    terminalreporter.write_line(f"record: {path}")


@pytest.fixture(autouse=True, scope="session")
def untuned(tmp_path_factory):
    """What the user of this machine has tuned decides no test. Every row program and phase plan is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFUSE_VERIFY", "on")
        patch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path_factory.mktemp("tuning")))
        yield


@pytest.fixture(autouse=True)
def unmeasured_compilations():
    """torch measures how long the guards of each graph take, for which it empties the processor's caches, and writes
    its settings as JSON after each compilation."""
    guards, utils = (sys.modules.get(f"torch._dynamo.{name}") for name in ("guards", "utils"))
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
    if hasattr(utils, "get_metrics_context"):
        utils.get_metrics_context()._on_exit = lambda *_: None


@pytest.fixture(autouse=True, scope="session")
def imported_once():
    """No test may end up with a second copy of an engine or pattern under its folder's own name."""
    yield
    twice = {"engines", "patterns"} & {name.split(".")[0] for name in sys.modules}
    assert not twice, f"imported beside their installed names graphfuse.*: {twice}"
