"""Cost model that decides whether an operator is faster than what inductor makes of the same graph, by bytes moved and
by measured cases.

The bytes of tensors that an operator moves and inductor would keep within one kernel (`neighbours`) count against the
operator. The time that its backward saves by the records counts for it, as inductor needs one more kernel there. An
operator without a measured case saves nothing, and is used if nothing counts against it. A record of a norm alone
counts for a norm with neighbours only if the operator is slower: with neighbours, inductor moves more in the same time.
All cases were measured on one H200 in bfloat16, which stands for all types of two bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.torch.analysis.components import connected_components
from graphfuse.torch.analysis.meaning import value
from graphfuse.torch.analysis.neighbours import ReplacedNodes

REACH = 16
"""Factor up to which the rows and columns of a measured case may differ from those that it stands for."""

DEVICE = "cuda"
BYTES = 2

LAYER = "layer norm"
RMS_BACKWARD = "the backward of RMSNorm"
LAYER_BACKWARD = "the backward of layer norm"
"""What was measured: a norm alone in the inference phase, and backwards with the weight's gradient."""

_TENSORS = {LAYER: 2, RMS_BACKWARD: 3, LAYER_BACKWARD: 3}
"""Number of tensors as large as x that are moved."""
_ALONE = {"layernorm": LAYER}
_BACKWARDS = {"rmsnorm": RMS_BACKWARD, "layernorm": LAYER_BACKWARD}
HELD = 32 << 20
"""Largest tensor in bytes that a kernel still finds in the L2 after the kernel before it."""
SUMMED = f"its backward reads more than {HELD >> 20} MiB once more, to add up gradients of samples"


@dataclass(frozen=True)
class MeasuredCase:
    """A measured case. ours, inductors: medians in microseconds. record: the file in docs/records."""

    what: str
    rows: int
    columns: int
    ours: float
    inductors: float
    record: str

    @property
    def saved(self) -> float:
        """Bytes of an element that could be moved in the time that is saved; negative if inductor is faster."""
        return (self.inductors / self.ours - 1) * _TENSORS[self.what] * BYTES

    def __str__(self) -> str:
        return f"{self.inductors:.2f} against {self.ours:.2f} µs for {self.what} at {self.rows} x {self.columns}"


_LAYER = "layernorm-nvidia-h200.json"
_RMS_BACKWARD, _LAYER_BACKWARD = "rmsnorm-backward-nvidia-h200.json", "layernorm-backward-nvidia-h200.json"

CASES = (
    MeasuredCase(LAYER, 4096, 1024, 6.1473, 6.1182, _LAYER),
    MeasuredCase(LAYER, 4096, 2048, 10.2063, 14.7849, _LAYER),
    MeasuredCase(LAYER, 4096, 4096, 18.0874, 25.617, _LAYER),
    MeasuredCase(LAYER, 4096, 8192, 34.9324, 39.4793, _LAYER),
    MeasuredCase(LAYER, 32768, 1024, 33.4665, 33.8338, _LAYER),
    MeasuredCase(LAYER, 32768, 2048, 64.2154, 98.835, _LAYER),
    MeasuredCase(LAYER, 32768, 4096, 125.8667, 183.078, _LAYER),
    MeasuredCase(LAYER, 32768, 8192, 251.384, 285.544, _LAYER),
    MeasuredCase(RMS_BACKWARD, 4096, 1024, 10.4761, 20.0665, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 4096, 2048, 16.7353, 30.1206, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 4096, 4096, 28.3551, 54.213, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 4096, 8192, 51.487, 104.832, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 4096, 16384, 99.638, 176.704, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 32768, 4096, 191.668, 261.968, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 32768, 8192, 387.568, 559.608, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 32768, 32768, 1521.848, 2593.0481, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 8192, 128, 5.7459, 12.431, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 8192, 768, 13.3186, 30.3582, _RMS_BACKWARD),
    MeasuredCase(RMS_BACKWARD, 8192, 5120, 63.66, 163.56, _RMS_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 4096, 1024, 10.8478, 28.4428, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 4096, 2048, 17.0552, 40.0852, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 4096, 4096, 29.1729, 78.8976, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 4096, 8192, 54.9686, 132.868, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 32768, 1024, 53.2365, 85.0568, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 32768, 2048, 98.567, 152.9667, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 32768, 4096, 192.582, 299.348, _LAYER_BACKWARD),
    MeasuredCase(LAYER_BACKWARD, 32768, 8192, 392.176, 638.292, _LAYER_BACKWARD),
)


@dataclass(frozen=True)
class Candidate:
    """An operator that may replace nodes.

    key: the node that stands for it in verdicts. replaced: the nodes that it replaces. saved: bytes of an element that
    it is otherwise ahead of inductor; negative if it is behind. behind: the reason for that, in words.
    """

    key: Node
    replaced: ReplacedNodes
    saved: float
    behind: str = ""


def of_samples(nodes: Iterable[Node], size: int) -> int:
    """Bytes of an element that a backward reads from memory again, for gradients that have a row for each sample. size:
    bytes of the tensor of all rows."""
    if size <= HELD:
        return 0
    tensors = [t for t in map(value, nodes) if t is not None and t.requires_grad and t.numel() != t.shape[-1]]
    return BYTES * len(tensors)


def declined(candidates: Sequence[Candidate]) -> dict[Node, str]:
    """Reasons why operators are not used, by their keys. Operators that inductor would compute in one kernel are judged
    together: all are used, or none."""
    reasons = dict[Node, str]()
    for group in connected_components((one, (id(one), *_nodes(one))) for one in candidates):
        moved = dict[Node, float]()  # once for a tensor between two of them
        for crossing in (c for one in group for c in one.replaced.crossings):
            moved[crossing.tensor] = max(moved.get(crossing.tensor, 0), crossing.moved + crossing.moved_backward)
        if sum(moved.values()) > sum(one.saved for one in group):
            reasons |= {one.key: _why(one) for one in group}
    return reasons


def _nodes(one: Candidate) -> set[Node]:
    """Nodes of an operator and its neighbours; none if it has no neighbours."""
    own = one.replaced.own if one.replaced.crossings else ()
    return {*own, *(n for c in one.replaced.crossings for n in (c.tensor, *c.others))}


def _why(one: Candidate) -> str:
    if not one.replaced.crossings:
        return one.behind
    moved = sum(c.moved + c.moved_backward for c in one.replaced.crossings)
    but = f", and save no more than {one.saved:.1f} otherwise" if one.saved > 0 else ""
    why = ", ".join(map(str, one.replaced.crossings))
    return f"the operator would move {moved:.3g} bytes an element more than inductor alone{but}: {why}"


def cases(op: str, is_alone: bool, has_weights: bool, shape: Sequence[int | torch.SymInt]) -> list[MeasuredCase]:
    """Nearest measured cases of a norm of a shape. is_alone: whether nothing surrounds it. has_weights: whether it is
    trained, with gradients of its weights."""
    *leading, columns = shape
    rows = math.prod(leading) if all(isinstance(n, int) for n in leading) else None
    if not isinstance(columns, int):
        return []
    alone = _nearest(_ALONE[op], rows, columns) if is_alone and op in _ALONE else []
    return alone + (_nearest(_BACKWARDS[op], rows, columns) if has_weights and op in _BACKWARDS else [])


def saved(found: Sequence[MeasuredCase]) -> float:
    """Bytes of an element that an operator is ahead of inductor, by the measured case with the smallest gain."""
    least = dict[str, float]()
    for case in found:
        least[case.what] = min(case.saved, least.get(case.what, math.inf if case.what in _BACKWARDS.values() else 0.0))
    return sum(least.values())


def _nearest(what: str, rows: int | None, columns: int) -> list[MeasuredCase]:
    """Cases at the nearest number of columns, at the measured numbers of rows next to `rows`; at all numbers of rows if
    `rows` varies (None)."""
    there = [case for case in CASES if case.what == what and _is_near(case.columns, columns)]
    counts = sorted({case.rows for case in there})
    by_rows = {n: min((c for c in there if c.rows == n), key=lambda c: _distance(c.columns, columns)) for n in counts}
    if rows is None:
        return [*by_rows.values()]
    within = [n for n in counts if _is_near(n, rows)]
    next_to = {*[n for n in within if n <= rows][-1:], *[n for n in within if n >= rows][:1]}
    return [by_rows[n] for n in sorted(next_to)]


def _is_near(a: int, b: int) -> bool:
    return _distance(a, b) <= math.log2(REACH)


def _distance(a: int, b: int) -> float:
    return abs(math.log2(a / b)) if a > 0 and b > 0 else math.inf
