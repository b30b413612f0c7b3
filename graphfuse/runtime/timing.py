"""Times kernels by replaying a CUDA graph over rotating buffers, so that the L2 is cold.

Each call works on the next of k buffer sets that together exceed 256 MB (at most 64 sets). At least 8 calls are
captured into one CUDA graph. It is replayed for some milliseconds between two events. Callers allocate outputs before
and use random inputs. Candidates are timed in turns, so that a drift of the machine affects all of them.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLD_BYTES = 256 << 20
REPEATS = 7
LEAST_CALLS = 8
_ONCE = 3  # number of single calls, as the host may pause in one
_EDGES = (13, 3)  # cuda-bindings before this version return freed memory as edge data (NVIDIA/cuda-python#1804)


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median, smallest and largest of the repeats."""

    median: float
    low: float
    high: float


def buffer_sets(bytes_per_call: int, most: int = 64) -> int:
    """Number of buffer sets that keep the L2 cold."""
    return max(1, min(most, -(-COLD_BYTES // max(bytes_per_call, 1))))


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of `calls` calls. replays: the number for one sample. held: the functions of the calls, which keep
    their buffers alive, as the graph has only addresses."""

    graph: object
    calls: int
    replays: int
    held: Sequence[Callable[[], object]]

    def sample(self) -> float:
        """Microseconds of one call, as the mean over the replays."""
        return _replay(self.graph, self.replays) / (self.replays * self.calls)


def capture(
    calls: Sequence[Callable[[], object]], least_us: float = 4000.0, least_calls: int = LEAST_CALLS
) -> Captured:
    """CUDA graph of `calls`, which do the same work on one buffer set each.

    least_us: microseconds that a sample is to take. least_calls: calls that the graph has at least. Raises the errors
    of the calls, which are made once before they are captured.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    count = max(len(calls), least_calls)
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # for its edges
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            calls[i % len(calls)]()
    graph.instantiate()
    return Captured(graph, count, max(1, min(200, int(least_us / max(_replay(graph, 1), 1e-3)))), calls)


def dependent_launch(captured: Captured) -> bool | None:
    """True if the graph has edges of programmatic dependent launch; None if that cannot be read."""
    from cuda.bindings import __version__, driver

    if tuple(map(int, __version__.split(".")[:2])) < _EDGES:
        return None
    graph, success = driver.CUgraph(int(captured.graph.raw_cuda_graph())), driver.CUresult.CUDA_SUCCESS
    error, *_, count = driver.cuGraphGetEdges(graph, 0)
    if error != success:
        return None
    if not count:
        return False
    error, _, _, edges, _ = driver.cuGraphGetEdges(graph, count)
    if error != success:
        return None
    programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return any(edge.type == programmatic for edge in edges[:count])


def compare(captured: Sequence[Captured], repeats: int = REPEATS) -> list[Time]:
    """The time of each graph, from `repeats` rounds of one sample each, after a round that is not counted."""
    rounds = [[one.sample() for one in captured] for _ in range(repeats + 1)][1:]
    return [Time(statistics.median(times), min(times), max(times)) for times in zip(*rounds, strict=True)]


def measure(
    calls: Sequence[Callable[[], object]],
    repeats: int = REPEATS,
    least_us: float = 4000.0,
    limit: float = math.inf,
) -> Time:
    """Time of one call. calls: the same work on different buffer sets. limit: microseconds.

    If each of the first few single calls takes more than the limit, including host time, the result is of these."""
    if limit < math.inf:
        once = list(itertools.takewhile(lambda us: us > limit, (_between(calls[0]) for _ in range(_ONCE))))
        if len(once) == _ONCE:
            return Time(statistics.median(once), min(once), max(once))
    return compare([capture(calls, least_us)], repeats)[0]


def measure_uncaptured(call: Callable[[], object]) -> Time:
    """Time of one call that follows others, on the current stream and warm buffers. Nothing is captured: a capture
    collects garbage, frees cached memory and waits for the device, which a running program would notice."""

    def calls() -> None:
        for _ in range(_ONCE):
            call()

    call()  # what is loaded at the first call
    times = [_between(calls) / _ONCE for _ in range(_ONCE)]
    return Time(statistics.median(times), min(times), max(times))


def _replay(graph, replays: int) -> float:
    def all_of_them() -> None:
        for _ in range(replays):
            graph.replay()

    return _between(all_of_them)


def _between(work: Callable[[], object]) -> float:
    """Microseconds on the current stream between events before and after `work`."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
