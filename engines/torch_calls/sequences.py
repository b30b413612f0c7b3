"""Attention of sequences whose lengths are in memory, by flash attention of rows that lie one behind another.

The kernel is told where sequences begin, so no mask is drawn. Rows behind a sequence's end are a sequence of their own,
which attends to nothing: their memory may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from graphfuse.base.enums import diagonal_alignment
from graphfuse.base.ragged import COLUMNS, HEADS, ROWS
from graphfuse.op_graph.ir import FrozenTensor, Node
from graphfuse.ops.scores import PAGED, gathered, lengths

if TYPE_CHECKING:
    import torch

LENGTHS = ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv")

DEVICES = {"cuda"}
"""Types of devices whose flash attention knows where sequences begin."""

_OF_K = ("k", "v", "dK", "dV")


@dataclass(frozen=True)
class SequenceBand:
    """Rows of k that a row of q attends to.

    left, right: how far from the diagonal, which ends at the last row of each sequence; None for all the way.
    first: whether it begins at the first row of each instead, of sequences of q and k that differ in length. Then the
    band is causal.
    """

    left: int | None = None
    right: int | None = None
    first: bool = False


def sequence_band(node: Node, read: Mapping[str, FrozenTensor]) -> SequenceBand | None:
    """None where sequences have no lengths, or a mask has to be drawn."""
    given = [port for port in LENGTHS if port in read]
    if not given or "bias" in read or "block_mask" in read:
        return None
    left, right = (node.attribute(f"diagonal_band_{side}_bound") for side in ("left", "right"))
    if left is None and right is None:
        return SequenceBand()
    if len(given) != 2:
        return None
    alike = len({node.input(port) for port in given}) == 1 and read["q"].dim[ROWS] == read["k"].dim[ROWS]
    if alike or node.attribute("diagonal_alignment") is diagonal_alignment.BOTTOM_RIGHT:
        return SequenceBand(left, right)
    return SequenceBand(first=True) if left is None and right == 0 else None


@dataclass(frozen=True)
class Rows:
    """A tensor as rows one behind another.

    rows: [rows, heads, columns].
    starts: [sequences + 1]: the first row of each sequence, and one past those of the last.
    longest: rows of a sequence at most.
    place: what tensors with the same starts have in common.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    longest: int
    place: object

    def ends(self, torch, lengths: torch.Tensor | None) -> torch.Tensor:
        """One past the last row of each sequence of such a length."""
        return self.starts[1:] if lengths is None else torch.minimum(self.starts[:-1] + lengths, self.starts[1:])

    def of(self, torch, rows: torch.Tensor, other: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """For some of its rows, the row of another tensor that has the same place in its sequence, and whether there is
        one. In place of one that there is not stands one that there is."""
        sequence = torch.bucketize(rows, self.starts[1:-1], right=True)
        found = rows - self.starts[sequence] + other.starts[sequence]
        there = found < other.starts[sequence + 1]
        return torch.minimum(found, (other.starts[-1] - 1)).clamp(min=0), there


@dataclass(frozen=True)
class Pass:
    """One call of the kernel.

    q, k: where sequences begin. Each of the graph's sequences is five of the kernel's: rows of q before those that
    attend; rows of q that attend to rows of k; rows of q behind them; the other rows of k; and none, as a sequence ends
    where the next begins. Rows that have none of the other tensor have zeros as their result and their gradient.
    causal, left, right: the band, whose diagonal ends at the last rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    causal: bool
    left: int | None
    right: int | None

    @staticmethod
    def of(torch, q: Rows, k: Rows, begin, end, reached, band: SequenceBand) -> Pass:
        """begin, end: rows of q that attend, by sequence. reached: one past the last row of k that they attend to."""
        of_q = torch.stack((q.starts[:-1], begin, end, q.starts[1:], q.starts[1:]), dim=1)
        of_k = torch.stack((k.starts[:-1], k.starts[:-1], reached, reached, k.starts[1:]), dim=1)
        causal = band.left is None and band.right == 0
        left, right = None if band.left is None else band.left - 1, None if causal else band.right
        return Pass(of_q.flatten().int(), of_k.flatten().int(), causal, left, right)

    @property
    def window(self) -> dict[str, int | None]:
        return {"window_size_left": self.left, "window_size_right": self.right}


def _passes(torch, band: SequenceBand, q: Rows, k: Rows, of_q, of_k) -> list[Pass]:
    """Calls of the kernel whose results are added. of_q, of_k: lengths; None for all rows."""
    if not band.first:
        return [Pass.of(torch, q, k, q.starts[:-1], q.ends(torch, of_q), k.ends(torch, of_k), band)]
    # Rows of q behind as many as there are of k attend to all of k.
    both = torch.minimum(of_q, of_k)
    middle = q.ends(torch, both)
    causal = Pass.of(torch, q, k, q.starts[:-1], middle, k.ends(torch, both), SequenceBand(None, 0))
    return [causal, Pass.of(torch, q, k, middle, q.ends(torch, of_q), k.ends(torch, of_k), SequenceBand())]


def bound(torch, asked, memory: Mapping, given: Mapping, offsets: Mapping) -> Callable[..., None]:
    """What computes attention or its gradients, given the scale if execute gives it.

    asked: of ``attention``. memory, given: tensors that are read and written, by port. offsets: of those at ragged
    offsets.
    """

    def run(*number: float) -> None:
        x = dict(memory)
        if PAGED.values() & x.keys():
            x["k"], x["v"] = gathered(torch, x, asked.attributes)
        layout = _RowLayout(torch, asked.ragged, offsets, x)
        rows = {port: layout.rows(port, x[port]) for port in ("q", "k", "v", "o", "dO", "stats") if port in x}
        q, k = rows["q"], rows["k"]
        passes = _passes(torch, asked.sequences, q, k, *(layout.each(lengths(x, of)) for of in ("q", "kv")))
        read = {port: layout.at(t, k if port in _OF_K else q) for port, t in rows.items()}
        scale = number[0] if number else asked.scale
        made = (_backward if "dO" in x else _forward)(torch, passes, read, (q.longest, k.longest), scale)
        if "Stats" in given:
            made["Stats"] = _statistics(torch, made["Stats"], made["O"])
        for port, t in given.items():
            layout.write(port, t, made[port], k if port in _OF_K else q)

    return run


def _forward(torch, passes: list[Pass], x: Mapping, longest: tuple[int, int], scale: float) -> dict[str, torch.Tensor]:
    kernel, made = torch.ops.aten._flash_attention_forward.default, []
    for one in passes:
        read = (x["q"], x["k"], x["v"], one.q, one.k, *longest, 0.0, one.causal, False)
        made.append(kernel(*read, scale=scale, **one.window)[:2])
    (o, sums), *more = made
    for found, of_rows in more:
        o, sums = o.add_(found), torch.minimum(sums, of_rows)
    return {"O": o, "Stats": sums}


def _statistics(torch, sums: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """[rows, heads, 1] of the kernel's sums, which are infinity for rows with NaN, and for those that attend to nothing
    and are zeros."""
    sums = sums.t().unsqueeze(2)
    return torch.where(sums == math.inf, o[..., :1] * 0.0 - math.inf, sums)


def _backward(torch, passes: list[Pass], x: Mapping, longest: tuple[int, int], scale: float) -> dict[str, torch.Tensor]:
    kernel, unused = torch.ops.aten._flash_attention_backward.default, x["q"].new_empty(2)
    sums = x["stats"].squeeze(2).t().contiguous()
    sums = torch.where(sums == -math.inf, math.inf, sums)
    made = []
    for one in passes:
        read = (x["dO"], x["q"], x["k"], x["v"], x["o"], sums, one.q, one.k, *longest, 0.0, one.causal)
        made.append(kernel(*read, unused, unused, scale=scale, **one.window))
    return {port: reduce(torch.Tensor.add_, parts) for port, *parts in zip(("dQ", "dK", "dV"), *made, strict=True)}


class _RowLayout:
    """How tensors of one call lie as rows.

    ragged: those at ragged offsets, by port. x: what is read.
    """

    def __init__(self, torch, ragged: Mapping[str, FrozenTensor], offsets: Mapping, x: Mapping):
        self.torch, self.ragged, self.offsets = torch, ragged, offsets
        self._whole: list[torch.Tensor] = []  # of offsets that need not be: whether they are those of rows
        read = [x[port] for port in ("q", "k", "v", "o", "dO") if port in x]
        # Where heads are outside of rows, each head is a sequence: rows of all heads do not lie at one stride.
        self.heads = 1
        if not ragged and all(t.shape[HEADS] == read[0].shape[HEADS] and t.is_contiguous() for t in read):
            self.heads = read[0].shape[HEADS]

    def rows(self, port: str, t: torch.Tensor) -> Rows:
        if port in self.ragged:
            return self._at_offsets(self.ragged[port], t, self.offsets[port].flatten())
        of = t.flatten(0, 2).unsqueeze(1) if self.heads > 1 else t.transpose(1, 2).flatten(0, 1)
        rows, longest = of.shape[0], t.shape[ROWS]
        starts = self.torch.arange(0, rows + 1, longest, device=t.device)
        return Rows(of, starts, longest, (rows, longest))

    def _at_offsets(self, t: FrozenTensor, memory: torch.Tensor, offsets: torch.Tensor) -> Rows:
        batch, heads, longest, columns = t.dim
        stride, unit = t.stride[ROWS], t.multiplier
        rows = memory.as_strided((batch * longest, heads, columns), (stride, t.stride[HEADS], t.stride[COLUMNS]))
        place = (offsets.data_ptr(), unit / stride)
        if unit % stride == 0:
            return Rows(rows, offsets.long() * (unit // stride), longest, place)
        elements = offsets.long() * unit
        self._whole.append((elements % stride == 0).all())
        return Rows(rows, elements // stride, longest, place)

    def each(self, found: torch.Tensor | None) -> torch.Tensor | None:
        """Lengths of the sequences. found: of the batches."""
        return None if found is None else found.flatten().repeat_interleave(self.heads)

    def at(self, t: Rows, other: Rows) -> torch.Tensor:
        """Rows of a tensor at the places of another's."""
        if t.place == other.place:
            return t.rows
        rows = self.torch.arange(other.rows.shape[0], device=t.starts.device)
        return t.rows.index_select(0, other.of(self.torch, rows, t)[0])

    def write(self, port: str, t: torch.Tensor, made: torch.Tensor, own: Rows) -> None:
        """made: rows at the places of `own`, which may be written to."""
        torch, to = self.torch, self.rows(port, t)
        if self._whole:
            made.mul_(torch.where(torch.stack(self._whole).all(), 1.0, math.nan))
        if port not in self.ragged and to.place == own.place:
            t.copy_(self._dense(made, to))
            return
        nothing, last = -math.inf if port == "Stats" else 0.0, to.rows.shape[0] - 1
        rows = torch.arange(last + 1, device=to.starts.device)
        if port not in self.ragged:
            found, there = to.of(torch, rows, own)
            t.copy_(self._dense(torch.where(there[:, None, None], made.index_select(0, found), nothing), to))
            return
        first, stop = to.starts[:1].clamp(max=last), to.starts[-1:]
        # In place of rows that there are not, others are written twice; memory without any keeps what it has.
        rows = torch.minimum(torch.maximum(rows, first), torch.maximum(stop - 1, first))
        found, there = (rows, None) if to.place == own.place else to.of(torch, rows, own)
        kept = torch.where(stop > first, made.index_select(0, found[:1]), to.rows.index_select(0, first))
        made = made.index_copy_(0, found[:1], kept).index_select(0, found)
        if there is not None:
            made = torch.where((there | (stop <= first))[:, None, None], made, nothing)
        _wide(torch, to.rows).index_copy_(0, rows, _wide(torch, made))

    def _dense(self, made: torch.Tensor, to: Rows) -> torch.Tensor:
        """[batch, heads, rows, columns] of rows."""
        if self.heads > 1:
            return made.unflatten(0, (-1, self.heads, to.longest)).squeeze(3)
        return made.unflatten(0, (-1, to.longest)).transpose(1, 2)


def _wide(torch, rows: torch.Tensor) -> torch.Tensor:
    """The same memory in elements of 16 bytes, which are moved in half the time; of statistics, as it is."""
    return rows.view(torch.complex128) if rows.element_size() == 2 else rows
