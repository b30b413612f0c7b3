"""RMSNorm → residual add → RMSNorm, the sum written beside the normalized row: a norm on both sides of each block of a
model, as Gemma has them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

    from graphfuse.tensor import Tensor

EPS = 1e-6
HIDDEN = (2560, 5376)
ROWS = (16, 4096, 16384)
# Loose: what is normalized first may be rounded, and is up to eight times as large as what it is added up to.
SUM = Accuracy(Tolerance(2**-8, 2**-18), Tolerance(2**-6, 2**-4))
# Tight: the sum is rounded, and what becomes of it again.
ACCURACY = Accuracy(Tolerance(2**-7 + 2**-12, 2**-16), Tolerance(2**-5, 2**-4))


@dataclass
class Operands:
    """One buffer set, all bfloat16: x, residual, sum, out (rows, columns), weight before the sum and after it
    (columns)."""

    x: torch.Tensor
    residual: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    sum: torch.Tensor
    out: torch.Tensor
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        return {**self.first_pack(), "after": self.after[None], "out": self.out}

    def first_pack(self) -> dict[str, torch.Tensor]:
        return {"x": self.x, "residual": self.residual, "before": self.before[None], "sum": self.sum}

    def second_pack(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum, "after": self.after[None], "out": self.out}


@dataclass(frozen=True)
class Case:
    """rows x columns of bfloat16."""

    rows: int
    columns: int
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: x and residual read, sum and normalized rows written, both weights."""
        return 2 * self.columns * (4 * self.rows + 2)

    def graph(self, handle=None) -> pygraph:
        """All of it."""
        graph = _graph(handle)
        self._normalize(graph, self._first(graph))
        return graph

    def first_graph(self, handle=None) -> pygraph:
        """What makes the sum."""
        graph = _graph(handle)
        self._first(graph)
        return graph

    def second_graph(self, handle=None) -> pygraph:
        """What reads the sum from memory."""
        graph = _graph(handle)
        self._normalize(graph, graph.tensor([self.rows, self.columns], name="sum"))
        return graph

    def _first(self, graph: pygraph) -> Tensor:
        x, residual = (graph.tensor([self.rows, self.columns], name=name) for name in ("x", "residual"))
        total = graph.add(self._norm(graph, x, "before"), residual)
        return total.set_output().set_name("sum").set_data_type(data_type.BFLOAT16)

    def _normalize(self, graph: pygraph, total: Tensor) -> None:
        self._norm(graph, total, "after").set_output().set_name("out").set_data_type(data_type.BFLOAT16)

    def _norm(self, graph: pygraph, x: Tensor, weight: str) -> Tensor:
        scale = graph.tensor([1, self.columns], name=weight)
        return graph.rmsnorm(x, scale, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with the same weights."""
        import torch

        def random() -> torch.Tensor:
            return torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device)

        before, after = ((torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16) for _ in range(2))

        def one() -> Operands:
            x, residual = random(), random()
            return Operands(x, residual, before, after, torch.empty_like(x), torch.empty_like(x))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        for tensor in (operands.sum, operands.out):
            tensor.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the outputs are wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        total = _normalized(operands.x[rows].double(), operands.before, operands.eps) + operands.residual[rows].double()
        found, accepted = operands.sum[rows].double(), SUM.of(tight).around(total)
        if complaint := judge.wrong(found, total, accepted, rows, "sum"):
            return complaint
        exact = _normalized(total, operands.after, operands.eps)
        return judge.wrong(operands.out[rows].double(), exact, ACCURACY.of(tight).around(exact), rows)


def _graph(handle) -> pygraph:
    return pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()


BENCH = Bench(
    name="norm-add-norm",
    title="RMSNorm → residual add → RMSNorm, bf16, sum written",
    cases=tuple(Case(r, c) for c, r in itertools.product(HIDDEN, ROWS)),
    quick=tuple(Case(r, 5376) for r in (16, 4096)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        graphfuse.NORM_ADD_THEN_NORM,
        graphfuse.NORM_THEN_ADD_NORM,
        quack.NORM_ADD_NORM,
        torch_compile.NORM_ADD_NORM,
        torch_eager.NORM_ADD_NORM,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.mean_speedup(
            graphfuse.NORM_THEN_ADD_NORM.name,
            "our two kernels, norm, then add and norm, 4096x5376",
            ("bf16",),
            1.35,
            lambda c: (c["rows"], c["columns"]) == (4096, 5376),
        ),
        target.slowest_against(
            graphfuse.NORM_ADD_THEN_NORM.name, "our two kernels, norm and add, then norm", ("bf16",), 1
        ),
        target.least_of_stream("bf16", 128 * MB, math.inf, 0.95),
    ),
)
