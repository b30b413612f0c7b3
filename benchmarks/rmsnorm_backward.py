"""RMSNorm backward: the gradients of its input and of its weight, and with the gradient of a residual branch added."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
TYPES = {"bf16": data_type.BFLOAT16, "fp16": data_type.HALF, "fp32": data_type.FLOAT}
TABLE = tuple((4096, columns) for columns in (1024, 2048, 4096, 8192, 16384))
"""Rows and columns that published results of others have."""
SIZES = (*TABLE, *((32768, c) for c in (4096, 8192, 32768)), *((8192, c) for c in (128, 768, 5120)))
RESIDUAL = ((4096, 4096), (4096, 8192), (8192, 5120), (32768, 4096), (32768, 8192), (32768, 32768))
# One rounding of what is exact but for float32 sums; peers may round what is normalized, too.
_DX = {
    "bf16": Accuracy(Tolerance(2**-8 + 2**-12, 2**-16), Tolerance(2**-5, 2**-4)),
    "fp16": Accuracy(Tolerance(2**-11 + 2**-14, 2**-16), Tolerance(2**-8, 2**-7)),
    "fp32": Accuracy(Tolerance(2**-18, 2**-16), Tolerance(2**-16, 2**-12)),
}
# Relative to the root of the number of rows that are added.
_DWEIGHT = {
    "bf16": Accuracy(Tolerance(2**-8 + 2**-12, 2**-14), Tolerance(2**-7, 2**-5)),
    "fp16": Accuracy(Tolerance(2**-11 + 2**-14, 2**-14), Tolerance(2**-10, 2**-8)),
    "fp32": Accuracy(Tolerance(2**-18, 2**-14), Tolerance(2**-16, 2**-12)),
}
_SUMMED = 1024  # rows whose exact gradients are in memory at the same time


@dataclass
class Operands:
    """One buffer set, of the case's type: x, dy, dx (rows, columns), weight, dweight (columns). residual: the
    gradient of the residual branch, like dx, or None. inverse_rms (rows) float32."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    inverse_rms: torch.Tensor
    residual: torch.Tensor | None
    dx: torch.Tensor
    dweight: torch.Tensor

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        named = {"x": self.x, "dy": self.dy, "weight": self.weight[None], "inverse_rms": self.inverse_rms[:, None]}
        named |= {"dx": self.dx, "dweight": self.dweight[None]}
        return named if self.residual is None else named | {"residual": self.residual}


@dataclass(frozen=True)
class Case:
    """rows x columns of one of TYPES."""

    rows: int
    columns: int
    output: str
    residual: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: x and the gradients of rows, the inverse RMS, the weight and its gradient."""
        whole = 4 if self.residual else 3
        return TYPES[self.output].nbytes(self.columns) * (whole * self.rows + 2) + 4 * self.rows

    def graph(self, handle=None) -> pygraph:
        graph, dtype = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle), TYPES[self.output]
        x, dy = (graph.tensor([self.rows, self.columns], data_type=dtype, name=name) for name in ("x", "dy"))
        weight = graph.tensor([1, self.columns], data_type=dtype, name="weight")
        inverse_rms = graph.tensor([self.rows, 1], data_type=data_type.FLOAT, byte_alignment=4, name="inverse_rms")
        dx, dweight, _ = graph.rmsnorm_backward(dy, x, weight, inverse_rms, has_dbias=False)
        if self.residual:
            dx = graph.add(dx, graph.tensor([self.rows, self.columns], data_type=dtype, name="residual"))
        for made, name in ((dx, "dx"), (dweight, "dweight")):
            made.set_output().set_name(name).set_data_type(dtype)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight."""
        import torch

        dtype = getattr(torch, TYPES[self.output].facts.torch)

        def random() -> torch.Tensor:
            return torch.randn(self.rows, self.columns, dtype=dtype, device=device)

        weight = (torch.rand(self.columns, device=device) + 0.5).to(dtype)

        def one() -> Operands:
            x, residual = random(), random() if self.residual else None
            inverse_rms = torch.empty(self.rows, device=device)
            for rows in torch.arange(self.rows, device=device).split(_SUMMED):
                inverse_rms[rows] = (x[rows].double().square().mean(1) + EPS).rsqrt().float()
            return Operands(x, random(), weight, inverse_rms, residual, torch.empty_like(x), torch.empty_like(weight))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        for tensor in (operands.dx, operands.dweight):
            tensor.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the gradients are wrong: the input's on some rows, the weight's in all columns."""
        import torch

        rows = judge.checked_rows(self.rows, operands.x.device)
        exact = torch.empty(len(rows), self.columns, dtype=torch.float64, device=operands.x.device)
        for part, made in zip(rows.split(_SUMMED), exact.split(_SUMMED), strict=True):
            made.copy_(self._dx(operands, part))
        accepted = _DX[self.output].of(tight).around(exact)
        if complaint := judge.wrong(judge.taken(operands.dx, rows).double(), exact, accepted, rows, "dx"):
            return complaint
        exact = torch.zeros(1, self.columns, dtype=torch.float64, device=operands.x.device)
        for part in torch.arange(self.rows, device=exact.device).split(_SUMMED):
            exact += (operands.dy[part].double() * self._normal(operands, part)).sum(0)
        tolerance = _DWEIGHT[self.output].of(tight)
        accepted = Tolerance(tolerance.relative, tolerance.absolute * math.sqrt(self.rows)).around(exact)
        return judge.wrong(operands.dweight[None].double(), exact, accepted, rows[:1], "dweight")

    def _normal(self, operands: Operands, rows: torch.Tensor) -> torch.Tensor:
        return operands.x[rows].double() * operands.inverse_rms[rows, None].double()

    def _dx(self, operands: Operands, rows: torch.Tensor) -> torch.Tensor:
        normal, scaled = self._normal(operands, rows), operands.dy[rows].double() * operands.weight.double()
        dx = operands.inverse_rms[rows, None].double() * (scaled - normal * (scaled * normal).mean(1, keepdim=True))
        return dx if operands.residual is None else dx + operands.residual[rows].double()


@dataclass(frozen=True)
class ResidualCase(Case):
    """A case with the gradient of the residual branch added to that of the input."""

    residual: ClassVar[bool] = True


_PEERS = (graphfuse.PEER, quack.RMSNORM_BACKWARD, liger.RMSNORM_BACKWARD, torch_compile.RMSNORM_BACKWARD)
_PEERS += (torch_eager.RMSNORM_BACKWARD, stream.PEER)


def _in_table(case: dict) -> bool:
    return (case["rows"], case["columns"]) in TABLE


BENCH = Bench(
    name="rmsnorm-backward",
    title="RMSNorm backward, gradients of input and weight",
    cases=tuple(Case(r, c, output) for output, (r, c) in itertools.product(TYPES, SIZES)),
    quick=tuple(Case(4096, c, "bf16") for c in (1024, 4096, 16384)),
    peers=_PEERS,
    targets=(
        *(target.slowest_against_best((output,), 1.02) for output in TYPES),
        target.mean_speedup("quack", "Quack, sizes of the published table", ("bf16", "fp16"), 1.5, _in_table),
        *(target.least_of_stream_where(o, lambda c: c["columns"] >= 2048, "from 2048 columns on", 0.85) for o in TYPES),
        *(target.least_of_stream_where(o, lambda c: c["rows"] == 32768, "32768 rows", 0.95) for o in TYPES),
    ),
)

RESIDUAL_BENCH = Bench(
    name="add-rmsnorm-backward",
    title="Residual add → RMSNorm backward, gradients of input and weight, the residual branch's added",
    cases=tuple(ResidualCase(r, c, "bf16") for r, c in RESIDUAL),
    quick=(ResidualCase(4096, 4096, "bf16"),),
    peers=_PEERS,
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.mean_speedup(
            "torch_compile", "torch.compile, 32768x32768", ("bf16",), 1.5, lambda c: c["columns"] == 32768
        ),
        target.mean_speedup("quack", "Quack, 32768x32768", ("bf16",), 1.3, lambda c: c["columns"] == 32768),
        target.least_of_stream("bf16", 512 * MB, math.inf, 0.95),
    ),
)
