"""Tables of a record, for the terminal and for Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.results import MB, SIZES, Results, mean, name, size_text
from graphfuse.benchmarks.target import Target


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `left` columns are words, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: int = 1


def markdown(table: Table) -> str:
    marks = ["---"] * table.left + ["--:"] * (len(table.columns) - table.left)
    lines = [table.columns, marks, *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def terminal(table: Table):
    from rich.table import Table as Rich
    from rich.text import Text

    made = Rich(title=table.title, title_justify="left")
    for i, column in enumerate(table.columns):
        made.add_column(column, justify="left" if i < table.left else "right", overflow="fold", no_wrap=i == 0)
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def line(r: Results, case: dict) -> str:
    """One case in one line."""
    ours, best = r.us(case, r.ours), r.best_peer(case)
    if not ours:
        entry = case["peers"][r.ours]
        return f"{name(case)}: {entry.get('absent') or entry.get('error')}"
    of_stream = r.ratio(case, r.stream, r.ours)
    against = f", {best} {_times(r.ratio(case, best, r.ours))}" if best else ""
    failed = [f"{p} failed" for p, entry in case["peers"].items() if "error" in entry]
    text = f"{name(case)}: {ours:.2f} us, {case['bytes'] / ours / 1e3:.0f} GB/s, {_percent(of_stream)} of stream"
    return ", ".join([text + against, *failed])


def cases(r: Results) -> Table:
    """Every case: microseconds of everybody."""
    peers = (r.stream, *r.peers)
    return Table(
        "microseconds (median)",
        ("case", "MB", r.title(r.ours), "of stream", *(r.title(peer) for peer in peers)),
        [
            (
                name(case),
                f"{case['bytes'] / MB:.1f}",
                _figure(r.us(case, r.ours), 2),
                _percent(r.ratio(case, r.stream, r.ours)),
                *(_figure(r.us(case, peer), 2) for peer in peers),
            )
            for case in r.cases()
        ],
    )


def sizes(r: Results) -> Table:
    """Fraction of the stream limit by bytes moved."""

    def cell(output: str, size: tuple[float, float]) -> str:
        found = [ratio for ratio, _ in r.ratios(r.cases(output, size=size), r.stream, r.ours)]
        return f"{_percent(mean(found))} ({_percent(min(found))})" if found else "-"

    return Table(
        "fraction of the stream limit: geometric mean (least)",
        ("bytes moved", *r.outputs),
        [(size_text(*size), *(cell(output, size) for output in r.outputs)) for size in SIZES],
    )


def speedups(r: Results) -> Table:
    """How many times faster than each peer."""

    def cell(output: str, peer: str) -> str:
        found = [ratio for ratio, _ in r.ratios(r.cases(output), peer, r.ours)]
        if found:
            return f"{_times(mean(found))} ({_times(min(found))})"
        return "failed" if any("error" in case["peers"].get(peer, {}) for case in r.cases(output)) else "absent"

    return Table(
        "times as fast as each peer: geometric mean (least)",
        ("peer", *r.outputs),
        [(r.title(peer), *(cell(output, peer) for output in r.outputs)) for peer in r.peers],
    )


def overview(benches: Iterable[tuple[Bench, Results]]) -> Table:
    """One row for each bench and output."""

    def row(bench: Bench, r: Results, output: str) -> tuple[str, ...]:
        measured = r.cases(output)
        best = [ratio for case in measured for ratio, _ in r.ratios([case], r.best_peer(case) or "", r.ours)]
        large = [ratio for ratio, _ in r.ratios(r.cases(output, size=SIZES[-1]), r.stream, r.ours)]
        against = f"{_times(mean(best))} ({_times(min(best))})" if best else "-"
        of_stream = f"{_percent(mean(large))} ({_percent(min(large))})" if large else "-"
        return (bench.title, output, str(len(measured)), against, of_stream)

    return Table(
        "times as fast as the best peer, and fraction of the stream limit: geometric mean (least)",
        ("", "output", "cases", "the best peer", f"the stream limit, {size_text(*SIZES[-1])}"),
        [row(bench, r, output) for bench, r in benches for output in r.outputs],
        left=2,
    )


def targets(bench: Bench, r: Results) -> Table:
    return judged(bench.targets, r)


def judged(targets: Iterable[Target], results: object) -> Table:
    """What is to be reached. results: what the targets' figures are of."""
    words = {True: "met", False: "not met", None: "not measured"}
    verdicts = [target.verdict(results) for target in targets]
    return Table(
        "targets",
        ("target", "limit", "measured", "", "in case"),
        [
            (
                v.target.text,
                f"{'≥' if v.target.at_least else '≤'} {v.target.limit:g}",
                "-" if v.value is None else f"{v.value:.3f}",
                words[v.met],
                v.where or "-",
            )
            for v in verdicts
        ],
    )


def absences(r: Results) -> list[str]:
    """Who was not measured where, and why."""
    total = len(r.record["cases"])
    return [
        f"{r.title(peer)}: {reason} ({count} of {total} cases)"
        for peer in r.record["peers"]
        for reason, count in r.absences(peer).items()
    ]


def dependent(r: Results) -> list[str]:
    """Whose kernels begin by programmatic dependent launch, as the captured CUDA graphs have it."""
    return [f"{r.title(peer)}: {said}" for peer in r.record["peers"] if (said := _dependent(r, peer))]


def _dependent(r: Results, peer: str) -> str | None:
    entries = [case["peers"][peer] for case in r.cases() if r.us(case, peer)]
    told = [entry["dependent_launch"] for entry in entries if entry.get("dependent_launch") is not None]
    if not told:
        return "not recorded" if entries else None
    return f"in {sum(told) or 'none'} of {len(told)} cases"


def profile(record: dict) -> Table:
    """A record of `profile`."""
    return Table(
        "what keeps the kernel busy",
        (
            *("case", "µs", "GHz", "occupancy", "registers", "instructions a cycle and SM", "an element"),
            *("ALU / FMA / XU / LSU", "DRAM", "TB/s", "KB held an SM", "in flight", "where warps are"),
        ),
        [
            (
                _profiled(case),
                _figure(case["us"], 1),
                _figure(case["ghz"], 2),
                _figure(case["occupancy"], 0, " %"),
                _figure(case["registers"], 0),
                _figure(case["instructions_per_cycle"], 2),
                _figure(case["instructions_per_element"], 2),
                " / ".join(_figure(case[f"{pipe}_percent"], 0) for pipe in ("alu", "fma", "xu", "lsu")) + " %",
                _figure(case["dram_percent"], 0, " %"),
                _figure(case["dram_tb_per_s"], 2),
                _figure(case["held_kb_per_sm"], 1),
                _figure(case["in_flight_kb_per_sm"], 1),
                ", ".join(f"{stall.replace('_', ' ')} {100 * v:.0f} %" for stall, v in [*case["stalls"].items()][:3]),
            )
            for case in record["cases"]
        ],
    )


def _profiled(case: dict) -> str:
    """The case's name, and which of its launches it is."""
    fields = dict(itertools.takewhile(lambda field: field[0] != "bytes", case.items()))
    launch = fields.pop("launch", None)
    return name(fields) + (f", launch {launch}" if launch else "")


def _figure(value: float | None, places: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{places}f}{unit}"


def spread(found: Mapping[str, float] | None, places: int) -> str:
    """A median, and from where to where."""
    if found is None:
        return "-"
    median, low, high = (f"{found[name]:.{places}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _percent(value: float | None) -> str:
    return _figure(value and 100 * value, 1, " %")


def _times(value: float | None) -> str:
    return _figure(value, 2, "×")
