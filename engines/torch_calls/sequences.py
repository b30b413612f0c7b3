"""Attention of sequences whose lengths are in memory, by flash attention with packed rows (variable length).

The kernel gets the places where sequences begin, so no mask is materialized. Rows after a sequence's end are a separate
sequence, which attends to nothing. Their memory may have any content.
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
"""Types of devices whose flash attention accepts places where sequences begin."""

PARTS, MOST = 4, 65535
"""Number of sequences of the kernel for each sequence of the graph, and the kernel's maximum."""

_OF_K = ("k", "v", "dK", "dV")


@dataclass(frozen=True)
class SequenceBand:
    """The rows of k that a row of q attends to.

    left, right: bounds as distances from the diagonal, which ends at the last row of each sequence; None for no bound.
    first: whether the diagonal begins at the first row of each sequence instead, for q and k that differ in length. The
    band is then causal.
    """

    left: int | None = None
    right: int | None = None
    first: bool = False


def sequence_band(node: Node, read: Mapping[str, FrozenTensor]) -> SequenceBand | None:
    """Band of an attention node; None if sequences have no lengths, or a mask has to be materialized."""
    given = [port for port in LENGTHS if port in read]
    if not given or "bias" in read or "block_mask" in read:
        return None
    left, right = (node.attribute(f"diagonal_band_{side}_bound") for side in ("left", "right"))
    if left is None and right is None:
        return SequenceBand()
    alike = len({node.input(port) for port in given}) == 1 and read["q"].dim[ROWS] == read["k"].dim[ROWS]
    if alike or node.attribute("diagonal_alignment") is diagonal_alignment.BOTTOM_RIGHT:
        return SequenceBand(left, right)
    return SequenceBand(first=True) if left is None and right == 0 else None


def window(left: int | None, right: int | None) -> tuple[bool, dict[str, int | None]]:
    """Arguments of flash attention for a band: whether it is causal, and its windows."""
    causal = left is None and right == 0
    last = None if left is None else left - 1
    return causal, {"window_size_left": last, "window_size_right": None if causal else right}


@dataclass(frozen=True, eq=False)
class Starts:
    """Places where sequences begin in packed rows.

    rows: [sequences + 1], the first row of each sequence, and the end of the last one.
    longest: maximum number of rows of a sequence.
    """

    rows: torch.Tensor
    longest: int

    @property
    def room(self) -> int:
        """Maximum number of rows of all sequences."""
        return (self.rows.shape[0] - 1) * self.longest

    def every(self, torch) -> torch.Tensor:
        """Numbers of all rows up to the maximum."""
        return torch.arange(self.room, device=self.rows.device)

    def ends(self, torch, lengths: torch.Tensor) -> torch.Tensor:
        """End of each sequence with these lengths, one past its last row."""
        return torch.minimum(self.rows[:-1] + lengths.clamp(min=0), self.rows[1:])

    def counterparts(self, torch, rows: torch.Tensor, other: Starts) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of another tensor with the same places in their sequences as `rows` here, and whether there are such
        rows. If there is none, its number is that of any valid row."""
        sequence = torch.bucketize(rows, self.rows[1:-1], right=True)
        found = rows - self.rows[sequence] + other.rows[sequence]
        there = found < other.rows[sequence + 1]
        return torch.minimum(found, (other.rows[-1] - 1)).clamp(min=0), there


@dataclass(frozen=True)
class Pass:
    """One call of the kernel.

    q, k: places where sequences begin. Each sequence of the graph is four of the kernel: rows of q before those that
    attend; rows of q that attend to rows of k; rows of q after these; the other rows of k. Results and gradients of
    rows without a counterpart in the other tensor are zeros.
    causal, window: of the band, whose diagonal ends at the last rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    causal: bool
    window: Mapping[str, int | None]

    @staticmethod
    def of(torch, q: Starts, k: Starts, begin, end, reached, band: SequenceBand) -> Pass:
        """Call for the rows of q that attend, from `begin` to `end` in each sequence. reached: end of the rows of k
        that they attend to."""
        of_q = torch.stack((q.rows[:-1], begin, end, q.rows[1:]), dim=1).flatten()
        of_k = torch.stack((k.rows[:-1], k.rows[:-1], reached, reached), dim=1).flatten()
        of_q, of_k = (torch.cat((of, each.rows[-1:])).int() for of, each in ((of_q, q), (of_k, k)))
        return Pass(of_q, of_k, *window(band.left, band.right))


def _passes(torch, band: SequenceBand, q: Starts, k: Starts, of_q, of_k) -> list[Pass]:
    """Calls of the kernel whose results are added. of_q, of_k: lengths of sequences."""
    if not band.first:
        begin, end, reached = q.rows[:-1], q.ends(torch, of_q), k.ends(torch, of_k)
        if band.right is not None:  # if q has more rows than k, its first ones attend to nothing
            nothing = (end - begin) - (reached - k.rows[:-1]) - band.right
            begin = torch.minimum(begin + nothing.clamp(min=0), end)
        return [Pass.of(torch, q, k, begin, end, reached, band)]
    # As many rows of q as k has are causal. The rows after these attend to all of k.
    both = torch.minimum(of_q, of_k)
    middle = q.ends(torch, both)
    causal = Pass.of(torch, q, k, q.rows[:-1], middle, k.ends(torch, both), SequenceBand(None, 0))
    return [causal, Pass.of(torch, q, k, middle, q.ends(torch, of_q), k.ends(torch, of_k), SequenceBand())]


def bound(torch, options, memory: Mapping, given: Mapping, offsets: Mapping) -> Callable[..., None]:
    """Function that computes attention or its gradients, given the scale if execute gives it.

    options: ``attention.SdpaOptions``. memory, given: tensors that are read and written, by port. offsets: ragged
    offsets, by port of their tensor.
    """

    def run(*number: float) -> None:
        x = dict(memory)
        if PAGED.values() & x.keys():
            of_q = options.ragged.get("q")
            # Only the extents of q are used.
            q = x["q"] if of_q is None else x["q"].as_strided(of_q.dim, (0, *of_q.stride[HEADS:]))
            x["k"], x["v"] = gathered(torch, x | {"q": q}, options.attributes)
        layout = _RowLayout(torch, options.ragged, offsets, x)
        q, k = (layout.starts(port, x[port]) for port in ("q", "k"))
        passes = _passes(torch, options.sequences, q, k, *(layout.each(lengths(x, of)) for of in ("q", "kv")))
        read = (port for port in ("q", "k", "v", "o", "dO", "stats") if port in x)
        rows = {port: layout.read(port, x[port], k if port in _OF_K else q) for port in read}
        scale = number[0] if number else options.scale
        # The kernel treats a single row of q, and windows that are wider than k, in another way.
        longest = max(q.longest, 2), max(q.longest, k.longest)
        made = (_backward if "dO" in x else _forward)(torch, passes, rows, longest, scale)
        if "Stats" in given:
            made["Stats"] = _statistics(torch, made["Stats"], made["O"])
        for port, t in given.items():
            layout.starts(port, t)  # the offsets of all are read before the first result is written
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
    """Statistics [rows, heads, 1] of the kernel's sums.

    Sums are infinity for rows whose results are NaN, and for rows that attend to nothing, whose results are zeros."""
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
    """Tensors of one call as rows, [rows, heads, columns].

    ragged: tensors at ragged offsets, by port. x: tensors that are read, by port.
    """

    def __init__(self, torch, ragged: Mapping[str, FrozenTensor], offsets: Mapping, x: Mapping):
        self.torch, self.ragged, self.offsets, self.device = torch, ragged, offsets, x["q"].device
        self._known: dict[object, Starts] = {}
        self._at_rows: list[torch.Tensor] = []  # for offsets in smaller units than rows: whether all are at rows
        # If heads are outside of rows in memory, each head is a sequence, as its rows have one stride.
        self.heads = 1
        read = [x[port] for port in ("q", "k", "v", "o", "dO") if port in x]
        if not ragged and all(t.shape[HEADS] == read[0].shape[HEADS] and t.is_contiguous() for t in read):
            batch, heads = read[0].shape[:2]
            self.heads = heads if PARTS * batch * heads <= MOST else 1

    def starts(self, port: str, t: torch.Tensor) -> Starts:
        """Places of a tensor's rows. It is the same object for tensors with rows at the same places."""
        of = self.ragged.get(port)
        if of is None:
            count, longest = t.shape[0] * self.heads, t.shape[ROWS]
            key: object = count, longest
        else:
            count, _, longest, _ = of.dim
            key = count, longest, self.offsets[port].data_ptr(), of.multiplier / of.stride[ROWS]
        if key not in self._known:
            if of is None:
                rows = self.torch.arange(0, count * longest + 1, longest, device=self.device)
            else:
                rows = self._at_offsets(port).clamp(0, count * longest)
            self._known[key] = Starts(rows, longest)
        return self._known[key]

    def _at_offsets(self, port: str) -> torch.Tensor:
        unit, stride = self.ragged[port].multiplier, self.ragged[port].stride[ROWS]
        offsets = self.offsets[port].flatten().long()
        if unit % stride == 0:
            return offsets * (unit // stride)
        self._at_rows.append((offsets * unit % stride == 0).all())
        return offsets * unit // stride

    def _rows(self, port: str, t: torch.Tensor) -> torch.Tensor:
        if port in self.ragged:
            of = self.ragged[port]
            extents = of.dim[0] * of.dim[ROWS], of.dim[HEADS], of.dim[COLUMNS]
            return t.as_strided(extents, (of.stride[ROWS], of.stride[HEADS], of.stride[COLUMNS]))
        return t.flatten(0, 2).unsqueeze(1) if self.heads > 1 else t.transpose(1, 2).flatten(0, 1)

    def each(self, found: torch.Tensor) -> torch.Tensor:
        """Lengths of the sequences. found: lengths of the batches."""
        return found.flatten().repeat_interleave(self.heads)

    def read(self, port: str, t: torch.Tensor, own: Starts) -> torch.Tensor:
        """The rows of a tensor, moved to the places of `own`."""
        starts, rows = self.starts(port, t), self._rows(port, t)
        if starts is own:
            return rows
        return rows.index_select(0, own.counterparts(self.torch, own.every(self.torch), starts)[0])

    def write(self, port: str, t: torch.Tensor, made: torch.Tensor, own: Starts) -> None:
        """Write results to a tensor. made: the kernel's rows, at the places of `own`; they may be overwritten."""
        torch, to, nothing = self.torch, self.starts(port, t), -math.inf if port == "Stats" else 0.0
        if self._at_rows:
            made.mul_(torch.where(torch.stack(self._at_rows).all(), 1.0, math.nan))
        if port in self.ragged:
            self._write_at_offsets(self._rows(port, t), to, made, own, nothing)
            return
        if to is not own:
            found, there = to.counterparts(torch, to.every(torch), own)
            made = torch.where(there[:, None, None], made.index_select(0, found), nothing)
        if self.heads > 1:
            t.copy_(made.view(t.shape))
        else:
            t.copy_(made.unflatten(0, (-1, to.longest)).transpose(1, 2))

    def _write_at_offsets(self, memory: torch.Tensor, to: Starts, made: torch.Tensor, own: Starts, nothing) -> None:
        torch, count = self.torch, to.rows[-1:] - to.rows[:1]
        first = torch.where(count > 0, to.rows[:1], 0)
        # Numbers beyond the last row write other rows again. Without any rows, memory keeps its content.
        rows = first + to.every(torch) % count.clamp(min=1)
        begin = to.rows[torch.bucketize(rows, to.rows[1:-1], right=True)]
        rows = torch.where((rows - begin < to.longest) | (count <= 0), rows, begin)
        found, there = (rows, None) if to is own else to.counterparts(torch, rows, own)
        kept = torch.where(count > 0, made.index_select(0, found[:1]), memory.index_select(0, first))
        made = made.index_copy_(0, found[:1], kept).index_select(0, found)
        if there is not None:
            made = torch.where((there | (count <= 0))[:, None, None], made, nothing)
        _wide(torch, memory).index_copy_(0, rows, _wide(torch, made))


def _wide(torch, rows: torch.Tensor) -> torch.Tensor:
    """The same memory in elements of 16 bytes, which are moved in half the time. Statistics are not changed."""
    return rows.view(torch.complex128) if rows.element_size() == 2 else rows
