"""The search for the fastest knobs of one part: compile in parallel, check, time in rounds of growing length."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from graphfuse.base.device import Device
from graphfuse.base.errors import DeviceError
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.planning.kernels import compilers, prepare
from graphfuse.planning.plan import Part
from graphfuse.planning.planner import UNPREPARED
from graphfuse.runtime import timing
from graphfuse.tuning.report import BEST, BROKEN, TIMED, WRONG, Trial
from graphfuse.tuning.workbench import Workbench


@dataclass(frozen=True)
class Round:
    """One round of timing. repeats, least_us: of ``timing.measure``. within, most: which candidates continue in the
    next round: those at most `within` times as slow as the fastest, and at most `most` of them."""

    repeats: int
    least_us: float
    within: float = 1.0
    most: int = 1


HALVING = (Round(1, 300, within=1.5, most=16), Round(3, 1000, within=1.1, most=3), Round(7, 4000))
"""Bad candidates are timed briefly; the last three are timed by the whole protocol."""

# Candidates that take _FAR times as long as the fastest so far, and _FAR_US microseconds, are timed by one call: a
# library may propose plans that take a second.
_FAR, _FAR_US = 4.0, 1000.0
_WARM_SECONDS = 0.1  # of work before the first measurement, to raise the clocks


def search(
    bench: Workbench,
    candidates: Sequence[object],
    deadline: float,
    rounds: Sequence[Round] = HALVING,
    measure: Callable[[Sequence[Callable[[], None]], int, float, float], timing.Time] = timing.measure,
    most: int | None = None,
) -> tuple[Trial, ...]:
    """A trial for each of `candidates` (knobs of the part's engine), fastest first, then those not timed.

    The first is "best" if it came through all rounds. deadline: when to stop, in time.monotonic's seconds. measure: how
    calls are timed. most: bytes of workspace, None for no limit; a candidate that needs more of its own is not tried. A
    candidate that is wrong or does not run is skipped with a warning that names it.
    """
    trials = {knobs: Trial(knobs_to_dict(knobs)) for knobs in candidates}
    calls = {}
    for knobs, made in compile_all(bench.part, bench.device, candidates, deadline).items():
        trial = trials[knobs]
        if time.monotonic() >= deadline:
            break
        try:
            prepared = made.result()
            trial = trials[knobs] = replace(trial, scratch=prepared.workspace_bytes)
            if most is not None and trial.scratch > most:
                trials[knobs] = replace(trial, why=f"needs {trial.scratch} bytes of workspace, more than {most}")
                continue
            loaded = bench.calls(prepared)
            wrong = bench.check(loaded)
        except (*UNPREPARED, DeviceError) as error:
            trials[knobs] = _dropped(bench, trial, BROKEN, str(error).splitlines()[0])
            continue
        if wrong:
            trials[knobs] = _dropped(bench, trial, WRONG, wrong)
        else:
            calls[knobs] = loaded
    if calls and bench.device.kind == "cuda":
        _warm(next(iter(calls.values())))
    running, finished = list(calls), False
    for number, round in enumerate(rounds, 1):
        fastest = math.inf
        for knobs in running:
            if time.monotonic() >= deadline:
                break
            took = measure(calls[knobs], round.repeats, round.least_us, max(_FAR * fastest, _FAR_US))
            fastest = min(fastest, took.median)
            trials[knobs] = replace(trials[knobs], status=TIMED, time=took, rounds=number)
        done = [k for k in running if trials[k].rounds == number]
        finished = number == len(rounds) and bool(done) and len(done) == len(running)
        if len(done) < len(running):
            break
        running = sorted(running, key=lambda k: trials[k].time.median)
        limit = trials[running[0]].time.median * round.within if running else 0
        running = [k for k in running if trials[k].time.median <= limit][: round.most]
    return _ranked(trials.values(), finished)


def compile_all(part: Part, device: Device, candidates: Sequence[object], deadline: float) -> dict[object, Future]:
    """Prepares the part with each of these knobs in parallel. Returns those done by the deadline, including errors."""
    with compilers(device) as pool:
        futures = {k: pool.submit(prepare, Part(part.region, part.engine, k), device) for k in candidates}
        wait(futures.values(), min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        pool.shutdown(wait=False, cancel_futures=True)
    return {knobs: future for knobs, future in futures.items() if not future.cancelled()}


def _warm(calls: Sequence) -> None:
    import torch

    end = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < end:
        for call in calls:
            call()
        torch.cuda.synchronize()


def _dropped(bench: Workbench, trial: Trial, status: str, why: str) -> Trial:
    engine = bench.part.engine.name
    warnings.warn(f"engine {engine!r} with knobs {trial.knobs} {status}: {why}", RuntimeWarning, stacklevel=3)
    return replace(trial, status=status, why=why)


def _ranked(trials, finished: bool) -> tuple[Trial, ...]:
    """Trials ordered by rounds, then by time; those without a time are last."""
    timed = sorted((t for t in trials if t.time), key=lambda t: (-t.rounds, t.time.median))
    rest = [t for t in trials if not t.time]
    if timed and finished:
        timed[0] = replace(timed[0], status=BEST)
    return (*timed, *rest)
