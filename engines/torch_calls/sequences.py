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

PARTS, MOST = 4, 65535
"""Sequences of the kernel's that each of the graph's is, and how many it takes."""

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
    alike = len({node.input(port) for port in given}) == 1 and read["q"].dim[ROWS] == read["k"].dim[ROWS]
    if alike or node.attribute("diagonal_alignment") is diagonal_alignment.BOTTOM_RIGHT:
        return SequenceBand(left, right)
    return SequenceBand(first=True) if left is None and right == 0 else None


def window(left: int | None, right: int | None) -> tuple[bool, dict[str, int | None]]:
    """True if flash attention is causal for a band, and its windows."""
    causal = left is None and right == 0
    last = None if left is None else left - 1
    return causal, {"window_size_left": last, "window_size_right": None if causal else right}


@dataclass(frozen=True, eq=False)
class Starts:
    """Places where sequences begin, in rows that lie one behind another.

    rows: [sequences + 1]: the first of each, and one past those of the last.
    longest: rows of a sequence at most.
    """

    rows: torch.Tensor
    longest: int

    @property
    def room(self) -> int:
        """Rows of all sequences at most."""
        return (self.rows.shape[0] - 1) * self.longest

    def every(self, torch) -> torch.Tensor:
        """Numbers of all rows that there may be."""
        return torch.arange(self.room, device=self.rows.device)

    def ends(self, torch, lengths: torch.Tensor) -> torch.Tensor:
        """One past the last row of each sequence of such a length."""
        return torch.minimum(self.rows[:-1] + lengths.clamp(min=0), self.rows[1:])

    def counterparts(self, torch, rows: torch.Tensor, other: Starts) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of another tensor that has the same place in its sequence, for each of some rows here, and whether
        there is one. In place of one that there is not stands one that there is."""
        sequence = torch.bucketize(rows, self.rows[1:-1], right=True)
        found = rows - self.rows[sequence] + other.rows[sequence]
        there = found < other.rows[sequence + 1]
        return torch.minimum(found, (other.rows[-1] - 1)).clamp(min=0), there


@dataclass(frozen=True)
class Pass:
    """One call of the kernel.

    q, k: where sequences begin. Each of the graph's sequences is four of the kernel's: rows of q before those that
    attend; rows of q that attend to rows of k; rows of q behind them; the other rows of k. Rows that have none of the
    other tensor have zeros as their result and their gradient.
    causal, window: of the band, whose diagonal ends at the last rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    causal: bool
    window: Mapping[str, int | None]

    @staticmethod
    def of(torch, q: Starts, k: Starts, begin, end, reached, band: SequenceBand) -> Pass:
        """begin, end: rows of q that attend, by sequence. reached: one past the last row of k that they attend to."""
        of_q = torch.stack((q.rows[:-1], begin, end, q.rows[1:]), dim=1).flatten()
        of_k = torch.stack((k.rows[:-1], k.rows[:-1], reached, reached), dim=1).flatten()
        of_q, of_k = (torch.cat((of, each.rows[-1:])).int() for of, each in ((of_q, q), (of_k, k)))
        return Pass(of_q, of_k, *window(band.left, band.right))


def _passes(torch, band: SequenceBand, q: Starts, k: Starts, of_q, of_k) -> list[Pass]:
    """Calls of the kernel whose results are added. of_q, of_k: lengths."""
    if not band.first:
        begin, end, reached = q.rows[:-1], q.ends(torch, of_q), k.ends(torch, of_k)
        if band.right is not None:  # the first rows of more than there are of k attend to nothing
            nothing = (end - begin) - (reached - k.rows[:-1]) - band.right
            begin = torch.minimum(begin + nothing.clamp(min=0), end)
        return [Pass.of(torch, q, k, begin, end, reached, band)]
    # Rows of q behind as many as there are of k attend to all of k.
    both = torch.minimum(of_q, of_k)
    middle = q.ends(torch, both)
    causal = Pass.of(torch, q, k, q.rows[:-1], middle, k.ends(torch, both), SequenceBand(None, 0))
    return [causal, Pass.of(torch, q, k, middle, q.ends(torch, of_q), k.ends(torch, of_k), SequenceBand())]


def bound(torch, asked, memory: Mapping, given: Mapping, offsets: Mapping) -> Callable[..., None]:
    """A function that computes attention or its gradients, given the scale if execute gives it.

    asked: of ``attention``. memory, given: tensors that are read and written, by port. offsets: of those at ragged
    offsets.
    """

    def run(*number: float) -> None:
        x = dict(memory)
        if PAGED.values() & x.keys():
            of_q = asked.ragged.get("q")
            # Of q its extents alone are looked at.
            q = x["q"] if of_q is None else x["q"].as_strided(of_q.dim, (0, *of_q.stride[HEADS:]))
            x["k"], x["v"] = gathered(torch, x | {"q": q}, asked.attributes)
        layout = _RowLayout(torch, asked.ragged, offsets, x)
        q, k = (layout.starts(port, x[port]) for port in ("q", "k"))
        passes = _passes(torch, asked.sequences, q, k, *(layout.each(lengths(x, of)) for of in ("q", "kv")))
        read = (port for port in ("q", "k", "v", "o", "dO", "stats") if port in x)
        rows = {port: layout.read(port, x[port], k if port in _OF_K else q) for port in read}
        scale = number[0] if number else asked.scale
        # One row of q alone, and windows that are wider than k, are others to the kernel.
        longest = max(q.longest, 2), max(q.longest, k.longest)
        made = (_backward if "dO" in x else _forward)(torch, passes, rows, longest, scale)
        if "Stats" in given:
            made["Stats"] = _statistics(torch, made["Stats"], made["O"])
        for port, t in given.items():
            layout.starts(port, t)  # all are known before the first result is written
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
    """Tensors of one call as rows, [rows, heads, columns].

    ragged: those at ragged offsets, by port. x: what is read.
    """

    def __init__(self, torch, ragged: Mapping[str, FrozenTensor], offsets: Mapping, x: Mapping):
        self.torch, self.ragged, self.offsets, self.device = torch, ragged, offsets, x["q"].device
        self._known: dict[object, Starts] = {}
        self._at_rows: list[torch.Tensor] = []  # of offsets that count no rows: whether each is a row's
        # Where heads are outside of rows, each head is a sequence: rows of all heads do not lie at one stride.
        self.heads = 1
        read = [x[port] for port in ("q", "k", "v", "o", "dO") if port in x]
        if not ragged and all(t.shape[HEADS] == read[0].shape[HEADS] and t.is_contiguous() for t in read):
            batch, heads = read[0].shape[:2]
            self.heads = heads if PARTS * batch * heads <= MOST else 1

    def starts(self, port: str, t: torch.Tensor) -> Starts:
        """The same object for tensors with rows at the same places."""
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
        """Lengths of the sequences. found: of the batches."""
        return found.flatten().repeat_interleave(self.heads)

    def read(self, port: str, t: torch.Tensor, own: Starts) -> torch.Tensor:
        """The rows of a tensor, at the places of `own`."""
        starts, rows = self.starts(port, t), self._rows(port, t)
        if starts is own:
            return rows
        return rows.index_select(0, own.counterparts(self.torch, own.every(self.torch), starts)[0])

    def write(self, port: str, t: torch.Tensor, made: torch.Tensor, own: Starts) -> None:
        """made: the kernel's rows, at the places of `own`. They are written to."""
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
        # In place of rows that there are not, others are written again; memory without any keeps what it has.
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
    """The same memory in elements of 16 bytes, which are moved in half the time; of statistics, as it is."""
    return rows.view(torch.complex128) if rows.element_size() == 2 else rows
