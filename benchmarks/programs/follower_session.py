"""One case of what stands around norms: each way is compiled and checked, then all are timed in turns."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphfuse.benchmarks import session
from graphfuse.benchmarks.programs import model_check, turns
from graphfuse.benchmarks.programs.follower_cases import FUNCTIONS, RATE, TIMING_SECONDS, FollowerCase, RowFunction
from graphfuse.benchmarks.programs.follower_functions import KEPT, RUNS, Tensors, tensors
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_counts import OutOfTime, limited
from graphfuse.benchmarks.programs.model_ways import OURS_COMPILED, Way
from graphfuse.runtime import timing
from graphfuse.torch import compile_report

Run = Callable[..., object]
Values = model_check.Values


class WrongFunction(Exception):
    """A way computes something else than the function."""


def forward(run: Run, given: Tensors) -> list[Tensor]:
    """Results, with gradients where something given has."""
    with torch.set_grad_enabled(any(t.requires_grad for t in given.values())):
        made = run(**given)
    return [*made] if isinstance(made, tuple) else [made]


def both(run: Run, given: Tensors, upstream: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients of what is given, where it has any. upstream: what the backward begins with."""
    made, leaves = forward(run, given), [t for t in given.values() if t.requires_grad]
    return made + [*torch.autograd.grad(made, leaves, upstream)] if leaves else made


def values(run: Run, given: Tensors) -> Values:
    """Results and gradients by name, in float32."""
    made, leaves = forward(run, given), {name: t for name, t in given.items() if t.requires_grad}
    found = {f"output {i}": t for i, t in enumerate(made)}
    if leaves:
        grads = torch.autograd.grad(made, [*leaves.values()], [model_check.upstream(t) for t in made])
        found |= {f"gradient of {name}": t for name, t in zip(leaves, grads, strict=True)}
    return {name: t.detach().float() for name, t in found.items()}


class Reference:
    """What a function makes in float32. Of one that drops elements: with the same ones dropped."""

    def __init__(self, function: RowFunction, given: Tensors) -> None:
        self._function, self._given, self._all = function, given, None
        self._wide = {n: t.detach().float() if t.is_floating_point() else t for n, t in given.items()}
        for name, t in self._wide.items():
            t.requires_grad_(given[name].requires_grad)

    def of(self, found: Values) -> Values:
        """Values to hold others against, which a way has found."""
        function = self._function
        if not function.drops:
            self._all = self._all or values(RUNS[function.name], self._wide)
            return self._all
        kept = KEPT[function.name]([t for name, t in found.items() if name.startswith("output")], self._given)
        if not abs(1 - float(kept.float().mean()) - RATE) < RATE / 4:
            raise WrongFunction(f"{1 - float(kept.float().mean()):.3g} of all elements are dropped, not {RATE}")
        return values(functools.partial(RUNS[function.name], dropout=lambda t: t * kept / (1 - RATE)), self._wide)


def measure(case: FollowerCase, ways: Sequence[Way], device: str, rounds: int) -> dict:
    """The record's entry of one case: for each way what was measured, or why nothing was."""
    try:
        entries = _measured(case, ways, device, rounds)
    except (Exception, OutOfTime) as error:  # of the case as a whole
        session.still_alive(device)
        entries = {way.name: {"error": _said(error)} for way in ways}
    return {**vars(case), "peers": entries}


def _measured(case: FollowerCase, ways: Sequence[Way], device: str, rounds: int) -> dict[str, dict]:
    function = FUNCTIONS[case.function]
    sets = [tensors(function, case, 0, device)]
    count = timing.buffer_sets(2 * sum(t.nbytes for t in sets[0].values()))  # results are as large as what is given
    sets += [tensors(function, case, seed, device) for seed in range(1, count)]
    reference, plain = Reference(function, sets[0]), values(RUNS[function.name], sets[0])
    own = model_check.distances(plain, reference.of(plain))
    entries, samplers = dict[str, dict](), dict[str, Callable[[], float]]()
    for way in ways:
        if reason := way.why_absent(case, 0):
            entries[way.name] = {"absent": reason}
            continue
        try:
            with limited(way.seconds, way.title):
                entries[way.name], run = _checked(way, case, sets[0], reference, own)
                samplers[way.name] = _sampler(run, sets, device)
        except (Exception, OutOfTime) as error:  # a way's failure is its result
            entries[way.name] = {"error": _said(error)}
            session.still_alive(device)
    with limited(TIMING_SECONDS, "timing"):
        taken = turns.take(samplers, rounds)
    for name, times in taken.items():
        over = {OURS_COMPILED: turns.ratios(taken[OURS_COMPILED], times)} if OURS_COMPILED in taken else {}
        entries[name] = {"us": turns.quartiles(times), "ours_over": over, "rounds": rounds} | entries[name]
    return entries


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, OutOfTime | WrongFunction) else session.first_line(error)


def _checked(
    way: Way, case: FollowerCase, given: Tensors, reference: Reference, own: dict[str, float]
) -> tuple[dict, Run]:
    """What is said of a way, and what runs it; WrongFunction if its values are wrong."""
    torch.compiler.reset()  # of what others compiled: the functions have the same code
    start = time.perf_counter()
    run = way.make(case, RUNS[case.function]).call
    found = values(run, given)
    entry: dict = {"first_s": round(time.perf_counter() - start, 1)}
    wanted = reference.of(found)
    if reason := model_check.wrong(found, wanted, own):
        raise WrongFunction(reason)
    entry["distance"] = float(f"{max(model_check.distances(found, wanted).values()):.3g}")
    if way.own:
        report = compile_report()
        entry |= {"became": [e.became for e in report.replaced], "left": [e.why for e in report.left]}
    return entry, run


def _sampler(run: Run, sets: Sequence[Tensors], device: str) -> Callable[[], float]:
    """Function that takes a sample of a call, in microseconds. On a GPU it replays a graph, in which each call has the
    next of the sets, and results of its own."""
    upstream = [[model_check.upstream(t) for t in forward(run, sets[0])]] * len(sets)
    if device.startswith("cuda"):
        upstream = [[t.clone() for t in upstream[0]] for _ in sets]
    held: list[object] = [None] * len(sets)

    def call(i: int) -> None:
        held[i] = both(run, sets[i], upstream[i])

    calls = [functools.partial(call, i) for i in range(len(sets))]
    if device.startswith("cuda"):
        return timing.capture(calls).sample
    return lambda: 1e3 * milliseconds(calls[0], lambda: None)
