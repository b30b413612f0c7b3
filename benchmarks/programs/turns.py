"""Samples taken in turns, so that a drift of the machine meets all alike, and what is said of them."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def take(samplers: Mapping[str, Callable[[], float]], least: int, seconds: float = 0.0) -> dict[str, list[float]]:
    """Rounds of one sample of each, after a round that is not counted: `least` of them, more until `seconds` are over.

    Each round has an order of its own, drawn from a fixed seed: what a sample leaves behind meets all others alike.
    """
    names = list(samplers)
    for name in names:
        samplers[name]()
    found: dict[str, list[float]] = {name: [] for name in names}
    chance, deadline, count = random.Random(7), time.monotonic() + seconds, 0
    while count < least or time.monotonic() < deadline:
        chance.shuffle(names)
        for name in names:
            found[name].append(samplers[name]())
        count += 1
    return found


def on_host(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Sampler of the microseconds that a call takes on the host: `calls` of them, before which the GPU has nothing to
    do."""
    import torch

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took / calls * 1e6

    return sample


def between_events(call: Callable[[], object]) -> float:
    """Milliseconds that a call takes on the GPU, from an event before it to one behind it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def extremes(samples: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest: for few samples."""
    return _figures(statistics.median(samples), min(samples), max(samples))


def quartiles(samples: Sequence[float]) -> dict[str, float]:
    """Median, first and third quartile: for many samples."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return _figures(middle, low, high)


def ratio(samples: Sequence[float], to: Sequence[float]) -> float:
    """The median of the rounds' ratios: what drifts from round to round is in both."""
    return round(statistics.median(a / b for a, b in zip(samples, to, strict=True)), 5)


def ratios(samples: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the rounds' ratios."""
    return quartiles([a / b for a, b in zip(samples, to, strict=True)])


def _figures(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
