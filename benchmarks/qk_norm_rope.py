"""RMSNorm of each head of Q and of K, then rotary position embedding, from the packed output of a projection."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.qk_norm import HEAD, HEADS
from graphfuse.op_graph.tensor import Tensor

if TYPE_CHECKING:
    import torch

EPS = 1e-6
POSITIONS = 32768
"""Rows of the table of cosines and sines."""
ROWS = (1, 16, 64, 1024, 4096, 32768)
ACCURACY = Accuracy(Tolerance(2**-7, 2**-18), Tolerance(2**-5, 2**-7))


@dataclass
class QkNormRopeOperands:
    """One buffer set. x (rows, all heads x HEAD), bfloat16: a token's heads of Q, of K, of V; q, k (rows, heads, HEAD)
    are views of it. q_out, k_out: of their shapes. q_weight, k_weight (HEAD). table (POSITIONS, HEAD), bfloat16: the
    cosines of each position's pairs, then their sines. positions (rows), int64."""

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    q_out: torch.Tensor
    k_out: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        weights = {f"{n}_weight": getattr(self, f"{n}_weight").expand(1, getattr(self, n).shape[1], -1) for n in "qk"}
        tensors = {name: getattr(self, name) for name in ("q", "k", "q_out", "k_out")}
        return weights | tensors | {"table": self.table[:, None], "positions": self.positions[:, None, None]}


def joined(graph: pygraph, given: dict[str, Tensor], suffix: str) -> Tensor:
    return graph.join(given[f"q{suffix}"], given[f"k{suffix}"], 1)


@dataclass(frozen=True)
class QkNormRopeCase:
    """rows tokens. q_heads, k_heads: heads of Q, and of K, of which V has as many. interleaved: pairs of neighbouring
    columns, else of the halves of a head."""

    rows: int
    q_heads: int
    k_heads: int
    interleaved: bool = False
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.q_heads}x{self.k_heads}" + " interleaved" * self.interleaved

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

    @property
    def heads(self) -> dict[str, int]:
        return {"q": self.q_heads, "k": self.k_heads}

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        given = self.given(graph)
        y, _ = graph.rmsnorm(joined(graph, given, ""), None, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = self.rotated(graph, graph.mul(y, joined(graph, given, "_weight")), given)
        for name in self.heads:
            self.store(graph, y, name)
        return graph

    def given(self, graph: pygraph) -> dict[str, Tensor]:
        """By name: Q and K of the packed tensor, their weights, the table and positions."""
        wide = (self.q_heads + 2 * self.k_heads) * HEAD
        given = {}
        for name, n in self.heads.items():
            given[name] = graph.tensor([self.rows, n, HEAD], [wide, HEAD, 1], data_type.BFLOAT16, name=name)
            weight = f"{name}_weight"
            given[weight] = graph.tensor([1, n, HEAD], [0, 0, 1], data_type.BFLOAT16, name=weight)
        given["table"] = graph.tensor([POSITIONS, 1, HEAD], data_type=data_type.BFLOAT16, name="table")
        given["positions"] = graph.tensor([self.rows, 1, 1], data_type=data_type.INT64, name="positions")
        return given

    def rotated(self, graph: pygraph, y: Tensor, given: dict[str, Tensor], inverse: bool = False) -> Tensor:
        whole, half = slice(None), HEAD // 2
        halves = (graph.slice(given["table"], [whole, whole, part]) for part in (slice(half), slice(half, None)))
        cos, sin = (graph.gather_rows(part, given["positions"]) for part in halves)
        return graph.rotate_pairs(y, cos, sin, interleaved=self.interleaved, inverse=inverse)

    def part(self, graph: pygraph, t: Tensor, name: str) -> Tensor:
        """The heads of Q, or those of K."""
        first, end = (0, self.q_heads) if name == "q" else (self.q_heads, self.q_heads + self.k_heads)
        return graph.slice(t, [slice(None), slice(first, end), slice(None)])

    def store(self, graph: pygraph, y: Tensor, name: str) -> None:
        out = self.part(graph, y, name).set_output().set_name(f"{name}_out").set_data_type(data_type.BFLOAT16)
        out.set_stride([self.heads[name] * HEAD, HEAD, 1])

    def sets(self, count: int, device: str) -> list[QkNormRopeOperands]:
        """Sets of random numbers of their own, with the same weights and table."""
        import torch

        q_weight, k_weight = torch.randn(2, HEAD, device=device).bfloat16()
        frequencies = 1e6 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device, torch.bfloat16)
        heads = (self.q_heads, self.k_heads)
        made = []
        for _ in range(count):
            x = torch.randn(self.rows, (sum(heads) + self.k_heads) * HEAD, dtype=torch.bfloat16, device=device)
            q, k, _ = x.unflatten(1, (-1, HEAD)).split((*heads, self.k_heads), dim=1)
            q_out, k_out = (torch.empty(self.rows, n, HEAD, dtype=x.dtype, device=device) for n in heads)
            positions = torch.arange(self.rows, device=device) % POSITIONS
            made.append(QkNormRopeOperands(x, q, k, q_out, k_out, q_weight, k_weight, table, positions))
        return made

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: QkNormRopeOperands) -> None:
        operands.q_out.fill_(99.0)
        operands.k_out.fill_(99.0)

    def wrong(self, operands: QkNormRopeOperands, tight: bool) -> str | None:
        rows = judge.checked_rows(self.rows, operands.x.device)
        for name in "qk":
            y = normalized(getattr(operands, name)[rows].double(), getattr(operands, f"{name}_weight"), operands.eps)
            exact = self.turned(operands, y, rows).flatten(1)
            found = getattr(operands, f"{name}_out")[rows].double().flatten(1)
            # What a pair's other column cancels is a place of either.
            apart = ACCURACY.of(tight).around(y.abs().amax(2, keepdim=True).expand_as(y).flatten(1))
            if complaint := judge.wrong(found, exact, apart, rows, name.upper()):
                return complaint
        return None

    def turned(self, operands: QkNormRopeOperands, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Heads of some rows, rotated."""
        import torch

        cos, sin = operands.table[operands.positions[rows]].to(y.dtype)[:, None].chunk(2, dim=-1)
        one, two = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        pairs = one * cos - two * sin, two * cos + one * sin
        return torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(2, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


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
