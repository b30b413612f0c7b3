"""Which engine comes first in a family of nodes: times of all that take them, for ``graphfuse.tuned_tables``.

    python -m graphfuse.benchmarks.programs.ranking [--write] [--family rmsnorm] [--record FOLDER]

Each problem of a family runs on every engine that takes it alone, on cold buffers. An engine's figure in the table is
the geometric mean of its times over the family's problems that all engines of the family take. Families that fewer than
two engines take leave no entry.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.programs import turns
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.untuned import untuned
from graphfuse.tuned_tables import measured
from graphfuse.tuned_tables.entry import Source

ENGINES = ("rows", "cudnn", "torch", "reference")
BF16 = data_type.BFLOAT16
FILE = record.CHECKOUT / "graphfuse/tuned_tables/measured.py"
LINE = 120
STUDY = Study("ranking", __doc__)


@dataclass(frozen=True)
class Problem:
    """draw(graph): draws the nodes of `family`, and what is an output of them."""

    family: str
    name: str
    draw: Callable[[pygraph], object]

    def graph(self, engine: str) -> pygraph:
        """Built with one engine alone. GraphNotSupportedError where it does not take it."""
        made = pygraph(self.family, io_data_type=BF16, intermediate_data_type=data_type.FLOAT)
        self.draw(made)
        made.build([heur_mode.A, heur_mode.FALLBACK], engines=[engine])
        return made


def _rows(family: str, rows: int, columns: int) -> Problem:
    def draw(g) -> None:
        x, scale, bias = g.tensor([rows, columns], name="x"), *(g.tensor([1, columns], name=n) for n in ("s", "b"))
        phase = norm_forward_phase.INFERENCE
        if family == "rmsnorm":
            made = g.rmsnorm(x, scale, 1e-5, norm_forward_phase=phase)[:1]
        elif family == "layernorm":
            made = g.layernorm(x, scale, bias, 1e-5, phase)[:1]
        else:
            dy, *saved = (
                g.tensor([rows, columns], name="dy"),
                *(g.tensor([rows, 1], data_type=data_type.FLOAT, name=n) for n in ("inverse", "mean")),
            )
            if family == "rmsnorm_backward":
                made = g.rmsnorm_backward(dy, x, scale, saved[0], has_dbias=True)
            else:
                made = g.layernorm_backward(dy, x, scale, saved[1], saved[0])
        for t in made:
            t.set_output()

    return Problem(family, f"{rows}x{columns}", draw)


def _product(rows: int, inner: int, columns: int) -> Problem:
    def draw(g) -> None:
        a, b = g.tensor([rows, inner], name="a"), g.tensor([inner, columns], name="b")
        g.bias(g.matmul(a, b), g.tensor([1, columns], name="bias")).set_output()

    return Problem("matmul", f"{rows}x{inner}x{columns}", draw)


def _convolution(channels: int, *extents: int) -> Problem:
    def last(extents: Sequence[int]) -> list[int]:
        n, c, *spatial = extents
        stride, step = [0] * len(extents), 1
        for axis in (1, *range(len(extents) - 1, 1, -1), 0):
            stride[axis] = step
            step *= extents[axis]
        return stride

    def draw(g) -> None:
        image, weight = [1, channels, *extents], [channels, channels, *[3] * len(extents)]
        x, w = g.tensor(image, last(image), name="x"), g.tensor(weight, last(weight), name="w")
        y = g.conv_fprop(x, w, padding=[1] * len(extents))
        g.bias(y, g.tensor([1, channels, *[1] * len(extents)], name="bias")).set_output()

    return Problem("conv_fprop", "x".join(map(str, (channels, *extents))), draw)


def _attention(heads: int, length: int, width: int) -> Problem:
    def draw(g) -> None:
        q, k, v = (g.tensor([1, heads, length, width], name=n) for n in "qkv")
        g.sdpa(q, k, v, width**-0.5, use_causal_mask=True)[0].set_output()

    return Problem("sdpa", f"{heads}x{length}x{width}", draw)


_NORMS = ("rmsnorm", "layernorm", "rmsnorm_backward", "layernorm_backward")
PROBLEMS = (
    *(_rows(family, *shape) for family in _NORMS for shape in ((512, 4096), (4096, 4096), (16384, 8192))),
    *(_product(*shape) for shape in ((512, 4096, 4096), (4096, 4096, 4096))),
    *(_convolution(*shape) for shape in ((256, 128, 128), (192, 4, 120, 208))),
    *(_attention(*shape) for shape in ((16, 2048, 64), (16, 2048, 128))),
)

Timer = Callable[[Problem, str], float | None]
"""Microseconds of a problem on an engine; None where that does not take it."""


def on_gpu(problem: Problem, engine: str) -> float | None:
    """Calls in a captured graph; of the reference engine, which runs torch, between events."""
    import torch

    from graphfuse.runtime import timing

    try:
        graph = problem.graph(engine)
    except GraphNotSupportedError:
        return None
    dtypes = {data_type.BFLOAT16: torch.bfloat16, data_type.FLOAT: torch.float32}
    kinds = [(t, dtypes[t.dtype]) for t in graph.frozen.bound]
    moved = sum(t.elements * dtype.itemsize for t, dtype in kinds)
    size = graph.get_workspace_size()
    space = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

    def pack() -> dict[str, torch.Tensor]:
        made = {}
        for t, dtype in kinds:
            memory = torch.rand(t.span, device="cuda").add_(0.5).to(dtype)  # an inverse deviation is above 0
            made[t.name] = memory.as_strided(t.dim, t.stride)
        return made

    calls = [graph.bind(pack(), space) for _ in range(timing.buffer_sets(moved))]
    if engine != "reference":
        return timing.measure(calls, 5).median
    took = [turns.between_events(call) for call in (calls * 6)[:6]]
    return statistics.median(took[1:]) * 1e3


def timed(problems: Iterable[Problem], timer: Timer) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds by family, problem and engine."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for problem in problems:
        us = {engine: timer(problem, engine) for engine in ENGINES}
        found.setdefault(problem.family, {})[problem.name] = {e: t for e, t in us.items() if t is not None}
    return found


def figures(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The table's microseconds, by family and engine."""
    made = {}
    for family, problems in times.items():
        engines = [e for e in ENGINES if any(e in us for us in problems.values())]
        common = [us for us in problems.values() if all(e in us for e in engines)]
        if len(engines) > 1 and common:
            made[family] = {e: round(statistics.geometric_mean(us[e] for us in common), 2) for e in engines}
    return made


def text(
    us: Mapping[str, Mapping[str, float]],
    source: Source,
    sources: Sequence[Mapping[str, object]] = measured.SOURCES,
    times: Sequence[tuple[int, str, Mapping[str, float]]] = measured.TIMES,
) -> str:
    """The table's file with new figures; those of `times` stay that are of another architecture, or of families that
    are not measured now."""
    kept = [(p, f, t) for p, f, t in times if sources[p]["arch"] != source.arch or f not in us]
    used = list(dict.fromkeys(p for p, _, _ in kept))
    origins = [*(sources[p] for p in used), source.to_json()]
    rows = [(used.index(p), f, dict(t)) for p, f, t in kept] + [(len(used), f, dict(t)) for f, t in us.items()]
    listed = {"SOURCES": origins if us else origins[:-1], "TIMES": rows}
    made = (FILE if FILE.exists() else Path(measured.__file__)).read_text()
    for name, values in listed.items():
        lines = "".join(f"    {_said(v, 4)},\n" for v in values)
        start = made.index(" = (", made.index(f"{name}: ")) + len(" = (")
        made = made[:start] + (f"\n{lines})" if values else ")") + made[made.index("\n" + '"""', start) :]
    return made


def _said(value: object, indent: int = 0) -> str:
    """As Python, formatted as the rest of the project."""
    match value:
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case dict():
            ends, parts = "{}", [f"{_said(k)}: {_said(v)}" for k, v in value.items()]
        case tuple():
            ends, parts = "()", [*map(_said, value)]
        case _:
            return repr(value)
    line = ends[0] + ", ".join(parts) + ends[1]
    if indent + len(line) < LINE:
        return line
    before = " " * indent
    return f"{ends[0]}\n" + "".join(f"{before}    {part},\n" for part in parts) + before + ends[1]


def table(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tables.Table:
    """Times, and how many times as long as ours, or as cuDNN's where ours does not take it, an engine takes."""
    rows = []
    for family, problems in times.items():
        for name, us in problems.items():
            first = next((us[e] for e in ENGINES if e in us), None)
            cells = (f"{us[e]:.1f} ({us[e] / first:.2f})" if e in us else "-" for e in ENGINES)
            rows.append((f"{family} {name}", *cells))
    return tables.Table("microseconds (over the first engine that takes it)", ("", *ENGINES), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = STUDY.parser()
    families = sorted({p.family for p in PROBLEMS})
    parser.add_argument("--write", action="store_true", help=f"write the table's file, {FILE.name}; else it is printed")
    parser.add_argument("--family", choices=families, action="append", help="measure this one alone; may be repeated")
    given = parser.parse_args(arguments)
    STUDY.need_gpu(parser)
    from rich.console import Console

    from graphfuse.runtime import device
    from graphfuse.tuning.autotune import source

    with untuned():
        times = timed([p for p in PROBLEMS if not given.family or p.family in given.family], on_gpu)
    Console(highlight=False, width=140).print(tables.terminal(table(times)))
    made = text(figures(times), source(device.get(), "measured"))
    if given.write:
        FILE.write_text(made)
        print(FILE)
    else:
        print(made)
    if given.record:
        print(STUDY.write(given.record, {"us": times}))


if __name__ == "__main__":
    main()
