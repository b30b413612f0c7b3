"""What a record of `all_reduce` has, as tables, and what it is to reach."""

from __future__ import annotations

from collections.abc import Iterator

from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.tables import Table
from graphfuse.benchmarks.target import Target

OURS, NORM = "graphfuse", "norm alone"
PARTS = f"{OURS}, two steps"
"""The sum of a rank's part, gathered behind the norm."""
LIMITS = {
    (6, 6144): 6.5,
    (138, 6144): 11.5,
    (32, 8192): 8.5,
    (64, 8192): 10.0,
    (128, 8192): 14.0,
    (4096, 8192): None,
}
"""Rows and columns that are timed, with the most microseconds that they may take; None where peers are the measure."""
REPLAYS = 10_000

Figures = Iterator[tuple[float, str]]


def _name(rows: int, hidden: int) -> str:
    return f"{rows} x {hidden}"


def _within(size: tuple[int, int], limit: float) -> Target:
    def figures(record: dict) -> Figures:
        return ((one["us"][OURS], _name(*size)) for one in record["times"] if (one["rows"], one["hidden"]) == size)

    return Target(f"{_name(*size)}: microseconds", limit, False, figures)


def _against_best(record: dict, ours: str = OURS) -> Figures:
    """Against peers whatever type they make."""
    for one in record["times"]:
        if ours in one["us"]:
            best = min(us for peer, us in one["us"].items() if not peer.startswith((OURS, NORM)))
            yield best / one["us"][ours], _name(one["rows"], one["hidden"])


def _gathered_as_fp8(record: dict) -> Figures:
    largest = [one for one in record["times"] if LIMITS[one["rows"], one["hidden"]] is None]
    return _against_best({"times": largest}, f"{PARTS}, FP8")


def _wrong(record: dict) -> Figures:
    return ((one["wrong"] + (not one["same bits on all ranks"]), one["type"]) for one in record["replays"])


TARGETS = (
    *(_within(size, limit) for size, limit in LIMITS.items() if limit),
    Target("times as fast as the best peer, at worst", 1.0, True, _against_best),
    Target("gathered as FP8, times as fast as the best peer", 1.4, True, _gathered_as_fp8),
    Target("results that differ between ranks or replays", 0, False, _wrong),
)


def table(record: dict) -> Table:
    names = tuple(dict.fromkeys(name for one in record["times"] for name in one["us"]))
    rows = [
        (_name(one["rows"], one["hidden"]), *(f"{one['us'][n]:.2f}" if n in one["us"] else "-" for n in names))
        for one in record["times"]
    ]
    return Table(f"microseconds of {record['ranks']} GPUs, the slowest of them", ("", *names), rows)


STUDY = Study("all-reduce", tables=lambda record: (table(record),), targets=TARGETS)
