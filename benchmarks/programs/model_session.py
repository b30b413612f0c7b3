"""One case: the model is made each way and checked, counted, then timed in turns."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphfuse.benchmarks import session
from graphfuse.benchmarks.programs import model_check, model_counts, turns
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_cases import WORKS, Model, ModelCase, ModelWork
from graphfuse.benchmarks.programs.model_counts import OutOfTime, limited
from graphfuse.benchmarks.programs.model_ways import Way

if TYPE_CHECKING:
    import torch

BUILD_SECONDS, TIMING_SECONDS = 45.0, 60.0
"""At most: to make a model and what is exact, and to time all ways."""
WARM = 3
"""Calls before anything is counted: kernels are compiled, the allocator finds its sizes."""


class WrongModel(Exception):
    """A way computes something else than the model: the case is over."""


def longest(ways: Sequence[Way]) -> float:
    """Seconds that a case takes at most."""
    return BUILD_SECONDS + sum(way.seconds for way in ways) + TIMING_SECONDS


def measure(case: ModelCase, model: Model, ways: Sequence[Way], device: str, rounds: int) -> dict:
    """The record's entry of one case: for each way what was measured, or why nothing was."""
    absent = model.why_not()
    if absent is not None:
        return _entry(case, {way.name: {"absent": absent} for way in ways})
    try:
        entries = _measured(case, model, ways, device, rounds)
    except (WrongModel, OutOfTime) as error:  # of the case as a whole
        entries = {way.name: {"error": str(error)} for way in ways}
    except Exception as error:  # that the model cannot be built or run as it is, is the case's result
        session.still_alive(device)
        entries = {way.name: {"error": session.first_line(error)} for way in ways}
    return _entry(case, entries)


def _entry(case: ModelCase, entries: dict[str, dict]) -> dict:
    return {**vars(case), "peers": entries}


def _measured(case: ModelCase, model: Model, ways: Sequence[Way], device: str, rounds: int) -> dict[str, dict]:
    import torch

    work = WORKS[case.work]
    torch._dynamo.reset()  # of what other cases compiled: their modules have the same code
    with limited(BUILD_SECONDS, "making the model"):
        module, inputs = model.make(work, device)
        module.train(work.gradients)
        exact = model_check.exact(module, inputs, work.gradients)
        own = model_check.distances(model_check.values(module, module, inputs, work.gradients), exact)
    entries: dict[str, dict] = {}
    samplers: dict[str, Callable[[], float]] = {}
    for way in ways:
        if reason := way.why_absent(case, 0):
            entries[way.name] = {"absent": reason}
            continue
        try:
            with limited(way.seconds, way.title):
                made = copy.deepcopy(module)
                entries[way.name], samplers[way.name] = _ready(way, case, made, inputs, exact, own, device)
        except WrongModel:
            raise
        except (Exception, OutOfTime) as error:  # a way's failure is its result
            entries[way.name] = {"error": str(error) if isinstance(error, OutOfTime) else session.first_line(error)}
            session.still_alive(device)
    del exact
    session.release(device)
    with limited(TIMING_SECONDS, "timing"):
        taken = turns.take(samplers, rounds)
    ours = [way.name for way in ways if way.own and way.name in taken]
    for name, times in taken.items():
        over = {each: turns.ratio(taken[each], times) for each in ours}
        entries[name] = {"ms": turns.quartiles(times), "ours_over": over, "rounds": rounds} | entries[name]
    return entries


def _ready(
    way: Way,
    case: ModelCase,
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    exact: model_check.Values,
    own: dict[str, float],
    device: str,
) -> tuple[dict, Callable[[], float]]:
    """What is counted of a way that is right, and what takes a sample of it, in milliseconds. WrongModel if it is not
    right."""
    work, cuda = WORKS[case.work], device.startswith("cuda")
    start = time.perf_counter()
    made = way.make(case, module)
    found = model_check.values(made.call, module, inputs, work.gradients)
    session.still_alive(device)
    first = time.perf_counter() - start
    if reason := model_check.wrong(found, exact, own):
        raise WrongModel(f"the case ended, {way.title} is wrong: {reason}")
    output = model_check.distances(found, exact)["output"]
    entry: dict = {"distance": float(f"{output:.3g}"), "first_s": round(first, 1)}
    call = _call(work, made.call, module, inputs, model_check.upstream(found.pop("output")))
    del found
    for _ in range(WARM):
        call()
    if cuda:
        entry |= {**model_counts.launched(call), "peak_mb": model_counts.peak_mb(call)}
    if made.sites is not None:
        entry["sites"] = list(made.sites)
    return entry, _sampler(work, call, cuda)


def _call(
    work: ModelWork,
    run: Callable[..., torch.Tensor],
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> Callable[[], object]:
    """What is timed. gradient: what a step begins its backward with."""
    import torch

    if not work.gradients:
        return torch.no_grad()(functools.partial(run, *inputs))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        """Forward, backward, AdamW."""
        run(*inputs).backward(gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _sampler(work: ModelWork, call: Callable[[], object], cuda: bool) -> Callable[[], float]:
    """Wall time until the GPU is done, or where the work is in a CUDA graph, GPU time of its replay."""
    import torch

    from graphfuse.runtime import timing

    if work.graph and cuda:
        captured = timing.capture([call], least_calls=1)
        return lambda: captured.sample() / 1e3
    return functools.partial(milliseconds, call, torch.cuda.synchronize if cuda else lambda: None)
