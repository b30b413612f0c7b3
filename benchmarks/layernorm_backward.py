"""LayerNorm backward: the gradients of its input, its weight and its bias."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.layernorm import COLUMNS, EPS, MEAN, ROWS
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.dtypes import data_type
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

# One rounding of what is exact but for float32 sums; peers may round what is normalized, too.
_DX = Accuracy(Tolerance(2**-8 + 2**-12, 2**-16), Tolerance(2**-5, 2**-4))
# Relative to the root of the number of rows that are added.
_DWEIGHT = Accuracy(Tolerance(2**-8 + 2**-12, 2**-14), Tolerance(2**-7, 2**-5))
_SUMMED = 1024  # rows whose exact gradients are in memory at the same time


@dataclass
class Operands:
    """One buffer set, bfloat16: x, dy, dx (rows, columns), weight, bias, dweight, dbias (columns). mean, inverse (rows)
    float32: what the training phase of the forward keeps of each row."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor
    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph, which the bias is not in."""
        rows = {"x": self.x, "dy": self.dy, "dx": self.dx, "mean": self.mean[:, None], "inverse": self.inverse[:, None]}
        return rows | {"weight": self.weight[None], "dweight": self.dweight[None], "dbias": self.dbias[None]}


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
        """Bytes: x, dy and dx, mean and inverse deviation, the weight, its gradient and the bias's."""
        return 2 * self.columns * (3 * self.rows + 3) + 2 * 4 * self.rows

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        x, dy = (graph.tensor([self.rows, self.columns], name=name) for name in ("x", "dy"))
        weight = graph.tensor([1, self.columns], name="weight")
        mean, inverse = (
            graph.tensor([self.rows, 1], data_type=data_type.FLOAT, byte_alignment=4, name=name)
            for name in ("mean", "inverse")
        )
        made = graph.layernorm_backward(dy, x, weight, mean, inverse)
        for tensor, name in zip(made, ("dx", "dweight", "dbias"), strict=True):
            tensor.set_output().set_name(name).set_data_type(data_type.BFLOAT16)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight and one bias."""
        import torch

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        weight, bias = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16), random(self.columns)

        def one() -> Operands:
            x = random(self.rows, self.columns).add_(MEAN)
            mean, inverse = (torch.empty(self.rows, device=device) for _ in range(2))
            for rows in torch.arange(self.rows, device=device).split(_SUMMED):
                exact = x[rows].double()
                mean[rows] = exact.mean(1).float()
                inverse[rows] = (exact.var(1, correction=0) + EPS).rsqrt().float()
            made = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
            return Operands(x, random(self.rows, self.columns), weight, bias, mean, inverse, *made)

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        for tensor in (operands.dx, operands.dweight, operands.dbias):
            tensor.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the gradients are wrong: the input's on some rows, those of weight and bias in all columns."""
        import torch

        rows = judge.checked_rows(self.rows, operands.x.device)
        for part in rows.split(_SUMMED):
            exact = self._dx(operands, part)
            found, accepted = operands.dx[part].double(), _DX.of(tight).around(exact)
            if complaint := judge.wrong(found, exact, accepted, part, "dx"):
                return complaint
        dweight, dbias = torch.zeros(2, 1, self.columns, dtype=torch.float64, device=operands.x.device)
        for part in torch.arange(self.rows, device=operands.x.device).split(_SUMMED):
            dy = operands.dy[part].double()
            dweight += (dy * self._normal(operands, part)).sum(0)
            dbias += dy.sum(0)
        tolerance = _DWEIGHT.of(tight)
        tolerance = Tolerance(tolerance.relative, tolerance.absolute * math.sqrt(self.rows))
        for exact, found, what in ((dweight, operands.dweight, "dweight"), (dbias, operands.dbias, "dbias")):
            if complaint := judge.wrong(found[None].double(), exact, tolerance.around(exact), rows[:1], what):
                return complaint
        return None

    def _normal(self, operands: Operands, rows: torch.Tensor) -> torch.Tensor:
        apart = operands.x[rows].double() - operands.mean[rows, None].double()
        return apart * operands.inverse[rows, None].double()

    def _dx(self, operands: Operands, rows: torch.Tensor) -> torch.Tensor:
        normal, scaled = self._normal(operands, rows), operands.dy[rows].double() * operands.weight.double()
        along = normal * (scaled * normal).mean(1, keepdim=True)
        return operands.inverse[rows, None].double() * (scaled - scaled.mean(1, keepdim=True) - along)


BENCH = Bench(
    name="layernorm-backward",
    title="LayerNorm backward, gradients of input, weight and bias, bf16",
    cases=tuple(Case(r, c) for r, c in itertools.product(ROWS, COLUMNS)),
    quick=tuple(Case(4096, c) for c in (1024, 8192)),
    peers=(
        graphfuse.PEER,
        quack.LAYERNORM_BACKWARD,
        liger.LAYERNORM_BACKWARD,
        torch_compile.LAYERNORM_BACKWARD,
        torch_eager.LAYERNORM_BACKWARD,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.mean_against_best(("bf16",), 1 / 1.4),
        target.least_of_stream_where(
            "bf16", lambda c: c["rows"] == 4096 and c["columns"] >= 2048, "4096 rows, from 2048 columns on", 0.85
        ),
        target.least_of_stream_where("bf16", lambda c: c["rows"] == 32768, "32768 rows", 0.95),
    ),
)
