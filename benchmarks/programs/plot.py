"""Bandwidth against bytes moved, one line a peer: an SVG for each output type. The time of a call by kind of kernel,
one bar a way. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path

from graphfuse.benchmarks import record as records
from graphfuse.benchmarks.programs import kernel_times
from graphfuse.benchmarks.results import MB, Results, mean

STYLES = (("#d62728", "o", 2.2), ("#1f77b4", "s", 1.3), ("#17becf", "D", 1.3), ("#9467bd", "v", 1.3))
STYLES += (("#2ca02c", "^", 1.3), ("#8c564b", "P", 1.3), ("#e377c2", "X", 1.3))
STYLES += (("#ff7f0e", "<", 1.3), ("#bcbd22", ">", 1.3), ("#000000", "*", 1.3))
"""Colour, marker and line width: ours first, then the peers."""


def name(kind: str, output: str) -> str:
    return f"{kind}-{output}.svg"


def write(r: Results, kind: str, folder: Path) -> list[Path]:
    """The files written; the same record gives the same files."""
    with _style(kind):
        return [_figure(r, output, folder / name(kind, output), digest(r.record)) for output in r.outputs]


def _style(kind: str):
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": kind, "svg.fonttype": "none", "font.family": "sans-serif"})


def digest(record: dict) -> str:
    """What the plots were made from."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(record["cases"], sort_keys=True).encode()).hexdigest()[:16]


def kinds_name(kind: str, record: dict) -> str:
    """Name of the picture of a record whose ways have milliseconds by kind of kernel."""
    return f"{records.path(Path(), kind, record['environment']).stem}.svg"


def write_kinds(record: dict, kind: str, folder: Path) -> Path:
    """The file written: a bar for each case and way, over what the first way of the case takes."""
    import matplotlib.pyplot as plt

    found = [(case, way, of["kinds"]) for case in record["cases"] for way, of in case["ways"].items() if "kinds" in of]
    whole = {case["name"]: sum(kinds.values()) for case, way, kinds in reversed(found)}  # of each case's first way
    labels = [f"{case['name']}: {way}" for case, way, _ in found]
    file = folder / kinds_name(kind, record)
    with _style(file.stem):
        figure, axes = plt.subplots(figsize=(9, 1.4 + 0.34 * len(found)), layout="constrained")
        before = [0.0] * len(found)
        for one, (colour, *_) in zip(kernel_times.ALL, STYLES, strict=False):
            parts = [kinds[one] / whole[case["name"]] for case, _, kinds in found]
            axes.barh(labels, parts, left=before, color=colour, height=0.7, label=one)
            before = [a + b for a, b in zip(before, parts, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("time of the GPU in a call, over that of the case's first way")
        axes.set_title(f"{kind} on {record['environment']['device']}, by kind of kernel")
        figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
        figure.savefig(file, metadata=_about(digest(record)))
        plt.close(figure)
    return file


def _about(made_from: str) -> dict[str, str | None]:
    return {"Date": None, "Creator": None, "Description": f"record {made_from}"}


def points(r: Results, output: str, peer: str) -> list[tuple[float, float]]:
    """(MB moved, TB/s); problems that move equally many bytes are one point, their geometric mean."""
    found: dict[int, list[tuple[float, float]]] = {}
    for case in r.cases(output):
        if us := r.us(case, peer):
            size = case["bytes"] // 50_000  # a weight more or less
            found.setdefault(size, []).append((case["bytes"] / MB, case["bytes"] / us / 1e6))
    return [(mean(mb for mb, _ in group), mean(speed for _, speed in group)) for _, group in sorted(found.items())]


def _figure(r: Results, output: str, file: Path, made_from: str) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    stream = points(r, output, r.stream)
    axes.plot(*zip(*stream, strict=True), color="#7f7f7f", linestyle="--", linewidth=1.6, label=r.title(r.stream))
    for peer, (colour, marker, width) in zip((r.ours, *r.peers), STYLES, strict=False):
        if line := points(r, output, peer):
            axes.plot(
                *zip(*line, strict=True),
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=width,
                label=r.title(peer),
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MB moved (inputs read, outputs written)")
    axes.set_ylabel("TB/s")
    axes.set_title(f"{r.record['bench']}: {output} output on {r.record['environment']['device']}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="best", fontsize="small", frameon=False)
    figure.savefig(file, metadata=_about(made_from))
    plt.close(figure)
    return file
