"""Norms, softmax and losses with what stands around them: torch.compile, and torch.compile with our backend.

    python -m graphfuse.benchmarks.programs.followers [--record FOLDER] [--resume] [--only NAME ...] [--ways NAME ...]
                                          [--rounds 15] [--quick] [--list] [--json]

Functions of rows as models write them (`follower_cases`), at three sizes, forward and with their backward: eager,
compiled by inductor, and by inductor behind our backend, which replaces what it finds. A call is in a CUDA graph, on
rotating buffers, so that the L2 is cold; all ways in turns. Each is compared with float32 before it is timed: one that
is farther from it than eager is reported and not timed. `graphfuse bench followers` is this program.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from graphfuse.benchmarks import session
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.programs import follower_cases, model_check, turns
from graphfuse.benchmarks.programs.follower_cases import (
    BOTH,
    FORWARD,
    FUNCTIONS,
    RATE,
    FollowerCase,
    RowFunction,
    Tensors,
)
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_counts import OutOfTime, limited
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED, WAYS, Way
from graphfuse.benchmarks.programs.program import Program
from graphfuse.benchmarks.results import Results, mean
from graphfuse.benchmarks.tables import Table
from graphfuse.benchmarks.target import Target
from graphfuse.runtime import timing
from graphfuse.torch import compile_report

TIMING_SECONDS = 60.0
"""At most, of all ways of a case."""

Run = Callable[..., object]
Values = model_check.Values


class WrongFunction(Exception):
    """A way computes something else than the function."""


# What is computed.


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
        if function.kept is None:
            self._all = self._all or values(function.run, self._wide)
            return self._all
        kept = function.kept([t for name, t in found.items() if name.startswith("output")], self._given)
        if not abs(1 - float(kept.float().mean()) - RATE) < RATE / 4:
            raise WrongFunction(f"{1 - float(kept.float().mean()):.3g} of all elements are dropped, not {RATE}")
        return values(functools.partial(function.run, dropout=lambda t: t * kept / (1 - RATE)), self._wide)


# What a case leaves.


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
    sets = [follower_cases.tensors(function, case, 0, device)]
    count = timing.buffer_sets(2 * sum(t.nbytes for t in sets[0].values()))  # results are as large as what is given
    sets += [follower_cases.tensors(function, case, seed, device) for seed in range(1, count)]
    reference, plain = Reference(function, sets[0]), values(function.run, sets[0])
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
    run = way.make(case, FUNCTIONS[case.function].run).call
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


# What a record says.


def name(entry: dict) -> str:
    return str(FollowerCase(**{field: value for field, value in entry.items() if field != "peers"}))


def ratios(r: Results, work: str) -> Iterator[tuple[float, str]]:
    """Inductor's time over ours, as the median of the rounds' ratios, and the case."""
    for entry in r.record["cases"]:
        found = entry["peers"].get(COMPILED, {}).get("ours_over", {}).get(OURS_COMPILED)
        if found and entry["work"] == work:
            yield 1 / found["median"], name(entry)


def slowest(work: str, limit: float) -> Target:
    def figure(r: Results) -> tuple[float, str] | None:
        return max(((1 / ratio, where) for ratio, where in ratios(r, work)), default=None)

    return Target(f"{work}: time over torch.compile's, at worst", limit, False, figure)


def average(work: str, limit: float) -> Target:
    def figure(r: Results) -> tuple[float, str] | None:
        found = mean(ratio for ratio, _ in ratios(r, work))
        return None if found is None else (found, "")

    return Target(f"{work}: times as fast as torch.compile, geometric mean", limit, True, figure)


def times(work: str) -> Callable[[Results], Table]:
    """A table of every case with this work."""

    def us(entry: dict, way: str) -> str:
        found = entry["peers"].get(way, {}).get("us")
        return f"{found['median']:.1f} ({found['low']:.1f} to {found['high']:.1f})" if found else "-"

    def over(entry: dict) -> str:
        found = entry["peers"].get(COMPILED, {}).get("ours_over", {}).get(OURS_COMPILED)
        return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})" if found else "-"

    def became(entry: dict) -> str:
        ours = entry["peers"].get(OURS_COMPILED, {})
        return ", ".join(ours.get("became", ())) or "; ".join(ours.get("left", ())) or "-"

    def table(r: Results) -> Table:
        titles = r.record["peers"]
        return Table(
            f"{work}, microseconds: median (quartiles), and the time of our backend over torch.compile's",
            (
                "function",
                "rows",
                *(r.title(way) for way in titles),
                "over torch.compile",
                "replaced by, or left because",
            ),
            [
                (
                    FUNCTIONS[entry["function"]].title,
                    str(entry["rows"]),
                    *(us(entry, way) for way in titles),
                    over(entry),
                    became(entry),
                )
                for entry in r.record["cases"]
                if entry["work"] == work
            ],
        )

    return table


def line(entry: dict) -> str:
    """One case in one line."""
    said = [
        f"{way} {one['us']['median']:.2f} us" if "us" in one else f"{way} failed: {one.get('error', one.get('absent'))}"
        for way, one in entry["peers"].items()
    ]
    if over := entry["peers"].get(COMPILED, {}).get("ours_over", {}).get(OURS_COMPILED):
        said.append(f"ours over torch.compile {over['median']:.3f}")
    return f"{name(entry)}: {', '.join(said)}"


TARGETS = (slowest(FORWARD, 1.02), slowest(BOTH, 1.02), average(FORWARD, 1.35), average(BOTH, 1.25))

BENCH = Bench(
    name="followers",
    title="What stands around norms, compiled",
    cases=follower_cases.CASES,
    quick=follower_cases.QUICK,
    peers=tuple(way for way in WAYS if way.name != OURS),
    targets=TARGETS,
    ours=OURS_COMPILED,
    stream=EAGER,
)
"""What is compared with is torch.compile alone."""

PROGRAM = Program(
    bench=BENCH,
    about=__doc__,
    measure=measure,
    group=lambda case: case.function,
    name=name,
    titled=lambda case: f"{FUNCTIONS[case.function].title}, {case.work}, {case.rows} x {case.columns}",
    line=line,
    tables=(times(FORWARD), times(BOTH)),
    longest=lambda ways: TIMING_SECONDS + sum(way.seconds for way in ways),
    rounds=15,
    quick_rounds=8,
    quick_cases=f"{follower_cases.ROWS[1]} rows, forward",
    distributions=("torch", "triton"),
)
main = PROGRAM.main

if __name__ == "__main__":
    main()
