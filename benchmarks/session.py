"""A run of a bench: peers are built and checked, then timed in turns, case by case."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from graphfuse.base import settings
from graphfuse.benchmarks.bench import Bench, Case
from graphfuse.benchmarks.peer import Peer, Work

if TYPE_CHECKING:
    from graphfuse.runtime.timing import Time


class Clock(Protocol):
    """What times: the module `runtime.timing`."""

    def buffer_sets(self, bytes_per_call: int) -> int: ...

    def capture(self, calls: Sequence) -> object: ...

    def dependent_launch(self, captured: object) -> bool | None: ...

    def compare(self, captured: Sequence[object]) -> list[Time]: ...


def measure(bench: Bench, case: Case, peers: Sequence[Peer], arch: int, device: str, clock: Clock) -> dict:
    """The record's entry of one case: for each peer its times, or why there are none."""
    sets = case.sets(clock.buffer_sets(case.moved), device)
    ready, entries = prepare(case, sets, peers, arch, device, clock.capture)
    times = clock.compare([captured for captured, _ in ready.values()])
    for (name, (captured, work)), time in zip(ready.items(), times, strict=True):
        entries[name] = {"us": {field: round(value, 4) for field, value in vars(time).items()}}
        entries[name]["GB/s"] = round(case.moved / time.median / 1e3, 1)
        entries[name] |= {field: said for field in ("note", "knobs_from") if (said := getattr(work, field))}
        entries[name]["dependent_launch"] = clock.dependent_launch(captured)
    if bench.stream in ready:
        limit = entries[bench.stream]["us"]["median"]
        for name in ready:
            entries[name]["of_stream"] = round(limit / entries[name]["us"]["median"], 4)
    return {**vars(case), "bytes": case.moved, "peers": {peer.name: entries[peer.name] for peer in peers}}


def prepare(
    case: Case, sets: Sequence[object], peers: Sequence[Peer], arch: int, device: str, capture: Callable
) -> tuple[dict[str, tuple[object, Work]], dict[str, dict]]:
    """Peers whose first result is right, with what they captured, and the record's entries of the others."""
    ready: dict[str, tuple[object, Work]] = {}
    entries: dict[str, dict] = {}
    for peer in peers:
        if reason := peer.why_absent(case, arch):
            entries[peer.name] = {"absent": reason}
            continue
        try:
            work = peer.make(case, sets)
            if wrong := checked(case, sets[0], work, peer.tight):
                entries[peer.name] = {"error": wrong}
                continue
            ready[peer.name] = capture(work.calls), work
        except Exception as error:  # a peer's failure is its result
            entries[peer.name] = {"error": first_line(error)}
            still_alive(device)
    return ready, entries


def checked(case: Case, operands: object, work: Work, tight: bool) -> str | None:
    """Why the first call's result is wrong; None if it is not."""
    case.spoil(operands)
    work.calls[0]()
    return work.check() if work.check else case.wrong(operands, tight)


def release(device: str) -> None:
    """Give back what the case before held: its buffers fit no other case."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def still_alive(device: str) -> None:
    """A fault on the device ends the run: nothing that follows would be true."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


def build_ahead(bench: str, cases: Sequence[Case], peers: Sequence[Peer], arch: int) -> Iterator[tuple[int, int]]:
    """Compile in parallel processes what peers keep on disk; yields (done, of how many).

    Nothing is timed here. What fails, fails again where it is reported.
    """
    jobs = [(p.name, c) for p in peers if p.keeps_builds for c in cases if not p.why_absent(c, arch)]
    workers = min(len(os.sched_getaffinity(0)), 16, len(jobs))
    if workers < 2:
        return
    with processes(workers) as pool:
        waiting = [pool.submit(_build, bench, peer, case) for peer, case in jobs]
        for done, _ in enumerate(concurrent.futures.as_completed(waiting), 1):
            yield done, len(jobs)


def processes(count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Such as plan with the tuned knobs that this one plans with."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(count, context, settings.use_tuning_dir, (settings.tuning_dir(),))


def _build(bench: str, peer: str, case: Case) -> None:
    """One call, by which time everything is compiled."""
    from graphfuse.benchmarks import benches

    (made,) = (p for p in benches.BENCHES[bench].peers if p.name == peer)
    sets = case.sets(1, "cuda")
    made.make(case, sets).calls[0]()
    release("cuda")
