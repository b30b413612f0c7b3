"""RMSNorm of each head of Q and of K, then rotary position embedding, from the packed output of a projection."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Around, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.qk_norm import HEAD, HEADS, HeadsCase, normalized, weight
from graphfuse.benchmarks.row_case import Buffer, normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact, Values

POSITIONS = 32768
"""Rows of the table of cosines and sines."""
ROWS = (1, 16, 64, 1024, 4096, 32768)
ACCURACY = Accuracy(Tolerance(2**-7, 2**-18), Tolerance(2**-5, 2**-7))


def _angles(*shape: int, **like) -> torch.Tensor:
    """The cosines of each position's pairs, then their sines."""
    import torch

    positions, columns = shape
    frequencies = 1e6 ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(**like)


def _positions(*shape: int, **like) -> torch.Tensor:
    import torch

    return torch.arange(*shape, **like) % POSITIONS


@dataclass(frozen=True)
class QkNormRopeCase(HeadsCase):
    """interleaved: pairs of neighbouring columns, else of the halves of a head."""

    interleaved: bool = False
    output: str = "bf16"

    def __str__(self) -> str:
        return super().__str__() + " interleaved" * self.interleaved

    @property
    def moved(self) -> int:
        """Bytes: Q and K read and written, positions, the rows of the table that are asked for, the weights."""
        return 2 * self.head_bytes + self.angle_bytes + 2 * 2 * HEAD

    @property
    def head_bytes(self) -> int:
        """Of Q and K."""
        return 2 * self.rows * (self.q_heads + self.k_heads) * HEAD

    @property
    def angle_bytes(self) -> int:
        """Of positions, and of the rows of the table that they ask for."""
        return self.rows * 8 + 2 * min(self.rows, POSITIONS) * HEAD

    def buffers(self) -> dict[str, Buffer | None]:
        named = {"x": self.packed(normal())}
        for name, n in self.heads.items():
            named |= {name: self.part(n), f"{name}_weight": weight(normal(), n, (0, 0, 1)), f"{name}_out": self.out(n)}
        table = Buffer(data_type.BFLOAT16, (POSITIONS, 1, HEAD), values=_angles, shared=True, own=(POSITIONS, HEAD))
        return named | {"table": table, "positions": self.numbers(_positions)}

    def out(self, heads: int, values: Values | None = None) -> Buffer:
        """Heads without others beside them."""
        stride = (heads * HEAD, HEAD, 1)
        return Buffer(data_type.BFLOAT16, (self.rows, heads, HEAD), stride, values=values)

    def numbers(self, values: Values) -> Buffer:
        """An integer for each token."""
        return Buffer(data_type.INT64, (self.rows, 1, 1), values=values, own=(self.rows,))

    def draw(self, graph, **given):
        y = self.normed(graph, **given)
        return {f"{name}_out": self.of(graph, y, name) for name in self.heads}

    def normed(self, graph, q, k, q_weight, k_weight, table, positions):
        """All heads, normalized and rotated."""
        y, *_ = graph.rmsnorm(graph.join(q, k, 1), None, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        return self.rotated(graph, graph.mul(y, graph.join(q_weight, k_weight, 1)), table, positions)

    def rotated(self, graph, y, table, positions, inverse: bool = False):
        whole, half = slice(None), HEAD // 2
        halves = (graph.slice(table, [whole, whole, part]) for part in (slice(half), slice(half, None)))
        cos, sin = (graph.gather_rows(part, positions) for part in halves)
        return graph.rotate_pairs(y, cos, sin, interleaved=self.interleaved, inverse=inverse)

    def of(self, graph, t, name: str):
        """The heads of Q, or those of K."""
        first, end = (0, self.q_heads) if name == "q" else (self.q_heads, self.q_heads + self.k_heads)
        return graph.slice(t, [slice(None), slice(first, end), slice(None)])

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        for name in self.heads:
            exact, size = self.exact_heads(operands, name, rows)
            yield f"{name}_out", exact.flatten(1), Around(ACCURACY, size.flatten(1))

    def exact_heads(self, operands: BufferSet, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads, and the largest that they are made of: what a pair's other column cancels is a place of either."""
        y = normalized(getattr(operands, name)[rows].double(), getattr(operands, f"{name}_weight"), operands.eps)
        return self.turned(operands, y, rows), y.abs().amax(2, keepdim=True).expand_as(y)

    def turned(self, operands: BufferSet, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Heads of some rows, rotated."""
        import torch

        cos, sin = operands.table[operands.positions[rows]].to(y.dtype)[:, None].chunk(2, dim=-1)
        one, two = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        pairs = one * cos - two * sin, two * cos + one * sin
        return torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)


BENCH = Bench(
    name="qk-norm-rope",
    title="RMSNorm and rotary position embedding of Q's and K's heads, bf16",
    cases=(
        *(QkNormRopeCase(r, *heads) for heads, r in itertools.product(HEADS, ROWS)),
        *(QkNormRopeCase(r, *HEADS[0], interleaved=True) for r in ROWS),
    ),
    quick=tuple(QkNormRopeCase(r, 32, 8) for r in (1, 64, 4096)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.QK_NORM_ROPE,
        torch_eager.QK_NORM_ROPE,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.least_of_stream("bf16", 16e6, math.inf, 1 / 1.1),
    ),
)
