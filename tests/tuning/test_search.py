"""Searching among real kernels, on the emulator: wrong and broken candidates are named, the rest is timed."""

import dataclasses
import io
import time

import pytest
import torch

from graphfuse import heur_mode
from graphfuse.base.device import EMULATOR
from graphfuse.engines.rows import RowEngine
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning.planner import Planner
from graphfuse.runtime.timing import Time
from graphfuse.tuning.report import BEST, BROKEN, NOT_TRIED, TIMED, WRONG, PartReport, TuningReport
from graphfuse.tuning.search import HALVING, Round, search
from graphfuse.tuning.workbench import Workbench, reference, tunable
from support import planted
from support.graphs import FP4, Norm
from support.rotary import Rotary

pytestmark = pytest.mark.emulate


class Planted(RowEngine):
    """Of its kernels, those with 64 threads are wrong, those with 256 do not compile."""

    name = "planted"

    def source(self, facts, knobs):
        text = super().source(facts, knobs)
        return {64: planted.wrong(text), 256: "not C++"}.get(knobs.threads, text)


def bench(problem: Norm, engine=None) -> tuple[Workbench, dict]:
    planner = Planner(freeze(problem.graph("emulator")), None, (), ["emulator", engine or "rows"])
    planner.create([heur_mode.OPENSOURCE])
    plan, pack = planner.plans[0], problem.inputs() | problem.outputs()
    memory = torch.zeros(plan.workspace_bytes + 16, dtype=torch.uint8)
    bound = planner.binder(plan).bind(pack, memory)
    (part,) = plan.parts
    assert tunable(part)
    return Workbench(part, EMULATOR, reference(plan, EMULATOR, bound), bound.scalars), pack


def knobs_of(part, *threads: int):
    first = part.engine.propose(part.facts, EMULATOR, heur_mode.A)[0]
    return [dataclasses.replace(first, threads=t) for t in threads]


def seconds(calls, repeats, least_us, limit) -> Time:
    """Wall time: there is no event to record on the CPU."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        calls[0]()
        times.append((time.perf_counter() - start) * 1e6)
    return Time(sorted(times)[repeats // 2], min(times), max(times))


SHORT = (Round(1, 0, within=100, most=2), Round(3, 0))


def test_what_needs_more_workspace_than_there_is_is_not_tried():
    made, _ = bench(Norm(4, 64))
    (trial,) = search(made, knobs_of(made.part, 32), time.monotonic() + 60, SHORT, seconds, most=-1)
    assert trial.status == NOT_TRIED and trial.why == "needs 0 bytes of workspace, more than -1"
    assert search(made, knobs_of(made.part, 32), time.monotonic() + 60, SHORT, seconds, most=0)[0].status == BEST


@pytest.mark.parametrize(
    "problem", [Norm(5, 64), Norm(3, 64, output=FP4, blocks=True), Norm(3, 64, output=FP4), Norm(4, 64, training=True)]
)
def test_what_is_right_is_timed_and_the_tensors_are_left_alone(problem):
    made, pack = bench(problem)
    before = {name: t.clone() for name, t in pack.items()}
    trials = search(made, knobs_of(made.part, 32, 128, 512), time.monotonic() + 60, SHORT, seconds)
    assert [t.status for t in trials] == [BEST, TIMED, TIMED] and [t.rounds for t in trials] == [2, 2, 1]
    assert trials[0].time.median <= trials[1].time.median
    assert {t.scratch for t in trials} == {made.part.outline.workspace_bytes}
    assert all(torch.equal(before[n].view(torch.uint8), pack[n].view(torch.uint8)) for n in pack)


def test_wrong_and_broken_candidates_are_dropped_and_named():
    made, _ = bench(Norm(5, 64), Planted())
    with pytest.warns(RuntimeWarning) as seen:
        trials = search(made, knobs_of(made.part, 64, 128, 256, 32), time.monotonic() + 60, SHORT, seconds)
    assert [t.status for t in trials] == [BEST, TIMED, WRONG, BROKEN]
    assert "tensor 'out'" in trials[2].why and "elements are off" in trials[2].why
    said = [str(w.message) for w in seen]
    assert any("'threads': 64" in text and "'out'" in text for text in said)
    assert any("'threads': 256" in text for text in said) and len(said) == 2


def test_if_all_are_wrong_there_is_no_best():
    made, _ = bench(Norm(5, 64), Planted())
    with pytest.warns(RuntimeWarning):
        (trial,) = search(made, knobs_of(made.part, 64), time.monotonic() + 60, SHORT, seconds)
    assert trial.status == WRONG and trial.time is None


def test_there_may_be_no_deadline():
    made, _ = bench(Norm(5, 64))
    assert search(made, knobs_of(made.part, 32), float("inf"), SHORT, seconds)[0].status == BEST


def test_rows_that_are_not_written_are_as_the_reference_leaves_them():
    made, _ = bench(Rotary(columns=32, rotary=32, slots=8))
    (trial,) = search(made, knobs_of(made.part, 64), time.monotonic() + 60, SHORT, seconds)
    assert trial.status == BEST


def test_after_the_deadline_nothing_is_tried_or_called_best():
    made, _ = bench(Norm(5, 64))
    trials = search(made, knobs_of(made.part, 32, 128), time.monotonic(), SHORT, seconds)
    assert {t.status for t in trials} == {NOT_TRIED}

    def slow(calls, repeats, least_us, limit):
        time.sleep(0.3)
        return seconds(calls, repeats, least_us, limit)

    search(made, knobs_of(made.part, 32, 128), time.monotonic() + 60, SHORT, seconds)  # compiled by now
    trials = search(made, knobs_of(made.part, 32, 128), time.monotonic() + 0.25, SHORT, slow)
    assert [t.status for t in trials] == [TIMED, NOT_TRIED]


def test_what_is_far_slower_than_the_fastest_is_timed_by_one_call():
    made, _ = bench(Norm(5, 64))
    limits, times = [], iter([5000.0, 400.0, 100.0])

    def measured(calls, repeats, least_us, limit):
        limits.append(limit)
        return Time(next(times), 0, 0)

    search(made, knobs_of(made.part, 32, 128, 512), time.monotonic() + 60, (Round(1, 0),), measured)
    assert limits[0] > 1e9 and limits[1:] == [20000.0, 1600.0]


def test_rounds_let_only_the_fast_go_on():
    made, _ = bench(Norm(5, 64))
    asked = []
    us = dict(zip((32, 128, 512), (10.0, 11.0, 30.0), strict=True))

    def measured(calls, repeats, least_us, limit):
        asked.append((repeats, made.part))
        return Time(next(times), 0, 0)

    times = iter([us[32], us[128], us[512], us[32], us[128], us[128]])
    rounds = (Round(1, 0, within=1.5, most=16), Round(3, 0, within=1.2, most=1), Round(7, 0))
    trials = search(made, knobs_of(made.part, 32, 128, 512), time.monotonic() + 60, rounds, measured)
    assert [repeats for repeats, _ in asked] == [1, 1, 1, 3, 3, 7]
    assert [(t.knobs["threads"], t.rounds) for t in trials] == [(32, 3), (128, 2), (512, 1)]


def test_the_last_of_the_usual_rounds_is_the_whole_protocol():
    assert (HALVING[-1].repeats, HALVING[-1].least_us) == (7, 4000)


def test_a_report_prints_all_there_is():
    from rich.console import Console

    made, _ = bench(Norm(5, 64), Planted())
    with pytest.warns(RuntimeWarning):
        trials = search(made, knobs_of(made.part, 64, 128), time.monotonic() + 60, SHORT, seconds)
    report = TuningReport("H200", (PartReport(("norm",), "planted", 5, trials, trials[0].knobs),), 1.25, None)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    for text in (str(report), console.export_text()):
        assert "tuned on H200 in 1.2 s, nothing kept" in text and "planted: norm, 5 rows" in text
        assert "threads=128" in text and "best" in text and "wrong: tensor 'out'" in text
