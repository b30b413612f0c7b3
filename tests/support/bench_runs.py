"""Benches without a GPU: a peer made on the CPU, and a clock."""

import time
import types

from graphfuse.benchmarks.bench import Case
from graphfuse.benchmarks.peer import Peer
from graphfuse.runtime.timing import Time


def made(peer: Peer, case: Case, count: int = 2):
    sets = case.sets(count, "cpu")
    return sets, peer.make(case, sets)


def wall_clock(repeats: int = 3):
    """Times by the wall clock what runtime.timing times by CUDA graphs."""

    def sample(calls) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - start) / len(calls)

    def compare(captured) -> list[Time]:
        samples = [sorted(sample(calls) for _ in range(repeats)) for calls in captured]
        return [Time(s[len(s) // 2], s[0], s[-1]) for s in samples]

    return types.SimpleNamespace(
        buffer_sets=lambda moved: 2,
        capture=lambda calls: calls,
        dependent_launch=lambda captured: None,
        compare=compare,
    )
