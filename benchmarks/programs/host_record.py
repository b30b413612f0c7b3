"""What the record of the host's cost says: figures, targets and tables. Loads nothing but the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from graphfuse.base.wording import counted
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.tables import Table
from graphfuse.benchmarks.target import Target

BARE = "bare cuLaunchKernel"
EXECUTE, FUNCTIONAL, MODULE = "graph.execute", "functional.rmsnorm", "graphfuse.torch.RMSNorm"
TORCH, LLAMA = "torch.nn.RMSNorm", "Llama's norm in torch"
KEPT, BACKWARD = "outputs kept", "forward + backward"
"""Manners of calling a norm, beside forward alone."""
SETS = (1, 16, 256, 2000)
FEW_SETS, FEW = 16, "16 address sets"
ONE, MANY = "one row count", "every row count in turn"
NEW, SEEN = "never seen", "seen"

Found = Iterable[tuple[float, str]]


def manner(name: str, how: str) -> str:
    return f"{name}, {how}"


COMPARED = {
    manner(MODULE, KEPT): (manner(TORCH, KEPT),),
    manner(MODULE, BACKWARD): (manner(TORCH, BACKWARD), manner(LLAMA, BACKWARD)),
}
"""The calls that a call is compared with, beside a bare launch."""


def _sets(count: int) -> str:
    return counted(count, "address set")


@dataclass(frozen=True)
class HostCost:
    """A record of host_cost.

    calls: rows of named calls by number of address sets. us: of a call. ratio: to a bare launch. over: ratios to others
    on as many sets, and to itself on few.
    """

    record: dict

    @property
    def sets(self) -> tuple[int, ...]:
        return tuple(self.record["problem"]["sets"])

    def over(self, name: str, sets: int, to: str) -> float | None:
        """The ratio of a call to another one; None if there is none."""
        rows = (row for row in self.record["calls"] if row["name"] == name)
        found = next(rows, {}).get("sets", {}).get(str(sets))
        return found and (found["ratio"] if to == BARE else found["over"].get(to))

    def rows(self, part: str) -> list[dict]:
        return self.record.get(part, [])


def _against(name: str, to: str, limit: float) -> Target:
    """A call over another one with as many address sets."""

    def figures(cost: HostCost) -> Found:
        return ((ratio, _sets(n)) for n in cost.sets if (ratio := cost.over(name, n, to)) is not None)

    return Target(f"{name} over {to}, at worst", limit, False, figures)


def _steady(name: str, limit: float, many: int = SETS[-1]) -> Target:
    def figures(cost: HostCost) -> Found:
        ratio = cost.over(name, many, FEW)
        return [] if ratio is None else [(ratio, "")]

    return Target(f"{name}: {many} address sets over {FEW_SETS}", limit, False, figures)


def _rows(part: str, name: str, text: str, limit: float, value: Callable[[dict], float]) -> Target:
    """A figure of one row of a part of the record."""

    def figures(cost: HostCost) -> Found:
        return ((value(row), "") for row in cost.rows(part) if row["name"] == name)

    return Target(f"{name}: {text}", limit, False, figures)


def _ratio(row: dict) -> float:
    return row["ratio"]


MEMORY_CALLS = 100_000
MEMORY = f"{FUNCTIONAL}, random shapes and addresses"

TARGETS = (
    _against(FUNCTIONAL, BARE, 2.0),
    _steady(FUNCTIONAL, 1.15),
    _against(EXECUTE, BARE, 1.5),
    _steady(EXECUTE, 1.15),
    _against(manner(MODULE, KEPT), manner(TORCH, KEPT), 0.9),
    _against(manner(MODULE, BACKWARD), manner(TORCH, BACKWARD), 1.05),
    _against(manner(MODULE, BACKWARD), manner(LLAMA, BACKWARD), 0.5),
    *(_rows("unseen", name, f"a row count {NEW} over one {SEEN}", 1.3, _ratio) for name in (FUNCTIONAL, MODULE)),
    *(_rows("row_counts", name, f"{MANY} over {ONE}", 1.3, _ratio) for name in (FUNCTIONAL, MODULE)),
    _rows("memory", MEMORY, "MB left on the host", 1.0, lambda row: row["host_bytes"] / 1e6),
)


def addresses(cost: HostCost) -> Table:
    """Every call: microseconds and times a bare launch by number of address sets."""

    def cell(found: dict | None) -> str:
        if found is None:
            return "-"
        return f"{found['us']['median']:.2f}" + ("" if found["ratio"] is None else f" ({found['ratio']:.2f}×)")

    def row(call: dict) -> tuple[str, ...]:
        if "absent" in call:
            return (call["name"], "absent: " + call["absent"], *["-"] * (len(cost.sets) - 1))
        return (call["name"], *(cell(call["sets"].get(str(count))) for count in cost.sets))

    heads = map(_sets, cost.sets)
    return Table("microseconds of a call (times a bare launch)", ("", *heads), [row(c) for c in cost.rows("calls")])


def row_counts(cost: HostCost) -> Table:
    return Table(
        "microseconds of a call",
        ("", ONE, MANY, "ratio"),
        [
            (row["name"], f"{row['one']['median']:.2f}", f"{row['many']['median']:.2f}", f"{row['ratio']:.2f}")
            for row in cost.rows("row_counts")
        ],
    )


def unseen(cost: HostCost) -> Table:
    def times(of: dict) -> str:
        return f"{of['median']:.2f} ({of['p95']:.2f})"

    return Table(
        "microseconds of a single call: median (95th percentile)",
        ("", f"a row count {SEEN}", NEW, "ratio"),
        [(r["name"], times(r["seen"]), times(r["new"]), f"{r['ratio']:.2f}") for r in cost.rows("unseen")],
    )


def memory(cost: HostCost) -> Table:
    return Table(
        "bytes that calls leave",
        ("", "calls", "on the host", "on the device"),
        [
            (row["name"], f"{row['calls']:,}", f"{row['host_bytes']:,}", f"{row['device_bytes']:,}")
            for row in cost.rows("memory")
        ],
    )


def every(cost: HostCost) -> Iterable[Table]:
    """The tables there are."""
    return [table for table in (addresses(cost), row_counts(cost), unseen(cost), memory(cost)) if table.rows]


STUDY = Study("host-cost", tables=every, targets=TARGETS, read=HostCost)
