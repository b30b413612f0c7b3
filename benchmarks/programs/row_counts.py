"""What changing row counts cost the host, and what a hundred thousand calls leave behind."""

from __future__ import annotations

import functools
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from graphfuse.benchmarks.programs import host_record, turns

if TYPE_CHECKING:
    import torch

EPS = 1e-6
MOST = 4096
"""Rows."""
IN_TURN, UNSEEN = 256, {host_record.FUNCTIONAL: 512, host_record.MODULE: 640}
"""Columns, others for each measurement, so that none has seen the row counts of another; few, so that the GPU waits
for the host."""
WIDTHS = (256, 512, 1024, 2048)
"""Columns of the random shapes."""
BETWEEN = 200
WARM_CALLS = 20_000

Norm = Callable[["torch.Tensor"], object]
Wait = Callable[[], None]


def norms(columns: int, device: str) -> dict[str, Norm]:
    """Ours, and torch's to compare with: what the allocator makes of changing sizes is in all of them."""
    import torch

    from graphfuse.functional import rmsnorm
    from graphfuse.torch import RMSNorm

    like = {"device": device, "dtype": torch.bfloat16}
    weight = torch.rand(columns, **like)
    return {
        host_record.FUNCTIONAL: lambda x: rmsnorm(x, weight, EPS),
        host_record.MODULE: RMSNorm(columns, EPS, **like),
        host_record.TORCH: torch.nn.RMSNorm(columns, EPS, **like),
    }


def in_turn(device: str, wait: Wait, repeats: int, most: int = MOST) -> list[dict]:
    """Calls on one row count again and again, and on 1 to `most` rows in random order, again and again.

    All are views of one buffer, at the same places for both. Nothing of the first pass is counted.
    """
    import torch

    chance = random.Random(7)
    buffer = torch.randn(2 * most, IN_TURN, dtype=torch.bfloat16, device=device)
    starts, counts = ([*range(most)] for _ in range(2))
    chance.shuffle(starts)
    chance.shuffle(counts)
    kinds = {
        "one": [buffer[at : at + most // 2] for at in starts],
        "many": [buffer[at : at + count + 1] for at, count in zip(starts, counts, strict=True)],
    }
    calls = norms(IN_TURN, device)
    samplers = {
        (name, kind): functools.partial(_mean, norm, views, wait)
        for name, norm in calls.items()
        for kind, views in kinds.items()
    }
    taken = turns.take(samplers, repeats)
    return [
        {
            "name": name,
            **{kind: turns.extremes(taken[name, kind]) for kind in kinds},
            "ratio": turns.ratio(taken[name, "many"], taken[name, "one"]),
        }
        for name in calls
    ]


def _mean(norm: Norm, views: list, wait: Wait) -> float:
    """Microseconds of one call."""
    wait()
    start = time.perf_counter()
    for i, view in enumerate(views, 1):
        norm(view)
        if i % BETWEEN == 0:
            wait()
    wait()
    return (time.perf_counter() - start) / len(views) * 1e6


def unseen(device: str, wait: Wait, count: int, most: int = MOST) -> list[dict]:
    """Single calls on row counts that nothing was called with before, among as many that were.

    All even row counts are called with first, then odd ones once each, so that each lies between two that were seen.
    """
    return [
        {"name": name, **_unseen(norms(columns, device)[name], _rows(columns, most, device), wait, count, most)}
        for name, columns in UNSEEN.items()
    ]


def _rows(columns: int, most: int, device: str) -> Callable[[int], torch.Tensor]:
    """So many rows."""
    import torch

    buffer = torch.randn(most, columns, dtype=torch.bfloat16, device=device)
    return lambda count: buffer[:count]


def _unseen(norm: Norm, rows: Callable[[int], torch.Tensor], wait: Wait, count: int, most: int) -> dict:
    chance = random.Random(7)
    even = [*range(2, most + 1, 2)]
    for _ in range(2):
        for i, number in enumerate(even):
            norm(rows(number))
            if i % BETWEEN == 0:
                wait()
    new, seen = chance.sample(range(3, most, 2), count), chance.sample(even, count)
    times: dict[str, list[float]] = {"seen": [], "new": []}
    wait()
    for i, pair in enumerate(zip(seen, new, strict=True)):
        kinds = list(zip(times, map(rows, pair), strict=True))
        for kind, x in kinds if i % 2 else reversed(kinds):
            start = time.perf_counter()
            norm(x)
            times[kind].append((time.perf_counter() - start) * 1e6)
        if i % 50 == 49:
            wait()
    found = {kind: _percentiles(of) for kind, of in times.items()}
    return {**found, "ratio": round(found["new"]["median"] / found["seen"]["median"], 5)}


def _percentiles(times: list[float]) -> dict[str, float]:
    p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
    return {"median": round(statistics.median(times), 4), "p95": round(p95, 4)}


def growth(device: str, wait: Wait, calls: int, most: int = MOST, warm: int = WARM_CALLS) -> list[dict]:
    """Bytes that calls with random shapes at random addresses leave, after some that are not counted."""
    import torch

    buffer = torch.randn(2 * most * max(WIDTHS), dtype=torch.bfloat16, device=device)
    by_width = {columns: norms(columns, device)[host_record.FUNCTIONAL] for columns in WIDTHS}
    shapes = _shapes(random.Random(7), buffer, most)
    _run(by_width, shapes, warm, wait)
    host, own = [_resident()], _allocated(device)
    for _ in range(4):
        _run(by_width, shapes, calls // 4, wait)
        host.append(_resident())
    return [
        {
            "name": host_record.MEMORY,
            "calls": calls // 4 * 4,
            "host_bytes": host[-1] - host[0],
            "by_quarter": [b - a for a, b in zip(host, host[1:], strict=False)],
            "device_bytes": _allocated(device) - own,
        }
    ]


def _shapes(chance: random.Random, buffer: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Rows of a width, any number of them, anywhere in the buffer where 16 bytes begin."""
    while True:
        rows, columns = chance.randint(1, most), chance.choice(WIDTHS)
        at = 8 * chance.randint(0, (buffer.numel() - rows * columns) // 8)
        yield buffer[at : at + rows * columns].view(rows, columns)


def _run(by_width: Mapping[int, Norm], shapes: Iterator[torch.Tensor], calls: int, wait: Wait) -> None:
    for i in range(calls):
        x = next(shapes)
        by_width[x.shape[1]](x)
        if i % BETWEEN == 0:
            wait()
    wait()
    gc.collect()


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _allocated(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0
