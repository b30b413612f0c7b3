"""Residual add -> RMSNorm, the sum written beside the normalized row, in bf16 or in FP8 at a static scale."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
SCALE = 0.05
"""What FP8 output is divided by: the largest values come near E4M3's end, 448."""
TYPES = {"bf16": data_type.BFLOAT16, "fp8_e4m3": data_type.FP8_E4M3}
HIDDEN = (2048, 3584, 5120, 7168)
ROWS = (1, 16, 128, 4096, 32768)
LARGE = (
    *((128, 4096), (4096, 1024), (4096, 4096), (4096, 8192)),
    *((32768, 4096), (32768, 8192), (16384, 16384), (32768, 32768)),
)
"""Rows and columns beside all of HIDDEN with all of ROWS."""
# Ours normalizes the sum as it is stored; that is half a step of bf16 from the exact one.
SUM = Tolerance(2**-8)
ACCURACY = {
    # Tight: the sum is rounded, and what becomes of it again.
    "bf16": Accuracy(Tolerance(2**-7 + 2**-12, 2**-20), Tolerance(2**-5, 2**-7)),
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-8, 2**-9), Tolerance(2**-3, 2**-6)),
}


@dataclass
class Operands:
    """One buffer set. x, residual, sum (rows, columns) and weight (columns) bfloat16; scale (1) float32 for FP8
    output, else None."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    sum: torch.Tensor
    scale: torch.Tensor | None
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        named = {"x": self.x, "residual": self.residual, "weight": self.weight, "out": self.out, "sum": self.sum}
        return named if self.scale is None else named | {"scale": self.scale.view(1, 1)}


@dataclass(frozen=True)
class Case:
    """rows x columns of bfloat16, to one of TYPES."""

    rows: int
    columns: int
    output: str

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: x and residual read, sum and normalized rows written, the weight and the scale."""
        out = TYPES[self.output].nbytes(self.columns)
        return self.rows * (3 * 2 * self.columns + out) + 2 * self.columns + (4 if self.output == "fp8_e4m3" else 0)

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        x, residual = (
            graph.tensor([self.rows, self.columns], data_type=data_type.BFLOAT16, name=name)
            for name in ("x", "residual")
        )
        weight = graph.tensor([1, self.columns], data_type=data_type.BFLOAT16, name="weight")
        total = graph.add(x, residual)
        total.set_output().set_name("sum").set_data_type(data_type.BFLOAT16)
        y, _ = graph.rmsnorm(total, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        if self.output == "fp8_e4m3":
            scale = graph.tensor([1, 1], data_type=data_type.FLOAT, byte_alignment=4, name="scale")
            y = graph.mul(y, graph.reciprocal(scale))
        y.set_output().set_name("out").set_data_type(TYPES[self.output])
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight and one scale."""
        import torch

        def random() -> torch.Tensor:
            return torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device)

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(self.rows, self.columns, dtype=dtype, device=device)

        weight = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16)
        out = getattr(torch, TYPES[self.output].facts.torch)
        scale = torch.full((1,), SCALE, device=device) if self.output == "fp8_e4m3" else None
        return [Operands(random(), random(), weight, empty(out), empty(torch.bfloat16), scale) for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        import torch

        for tensor in (operands.out, operands.sum):
            tensor.view(torch.uint8).fill_(0xFF)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the outputs are wrong."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        total = operands.x[rows].double() + operands.residual[rows].double()
        if complaint := judge.wrong(operands.sum[rows].double(), total, SUM.around(total), rows, "sum"):
            return complaint
        norm = (total.square().mean(1, keepdim=True) + operands.eps).rsqrt()
        exact = total * norm * operands.weight.double()
        if operands.scale is not None:
            exact = (exact / operands.scale.double()).clamp(-448, 448)
        accepted = ACCURACY[self.output].of(tight).around(exact)
        return judge.wrong(judge.taken(operands.out, rows).double(), exact, accepted, rows)


def _targets(output: str) -> tuple[target.Target, ...]:
    dependent = (graphfuse.DEPENDENT.name, " with dependent launch")
    return (
        target.slowest_against_best((output,), 1.02),
        target.slowest_against_best((output,), 1.02, *dependent),
        target.least_of_stream(output, 512 * MB, math.inf, 0.97),
    )


def _cases(output: str) -> tuple[Case, ...]:
    return tuple(Case(r, c, output) for c, r in itertools.product(HIDDEN, ROWS))


BENCH = Bench(
    name="add-rmsnorm",
    title="Residual add → RMSNorm, bf16, sum written",
    cases=_cases("bf16") + tuple(Case(r, c, "bf16") for r, c in LARGE),
    quick=tuple(Case(r, 7168, "bf16") for r in (1, 128, 32768)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        quack.ADD_RMSNORM,
        *flashinfer.ADD_RMSNORM,
        liger.ADD_RMSNORM,
        torch_compile.ADD_RMSNORM,
        torch_eager.ADD_RMSNORM,
        stream.PEER,
    ),
    targets=_targets("bf16"),
)

FP8 = Bench(
    name="add-rmsnorm-fp8",
    title="Residual add → RMSNorm → FP8 at a static scale, sum written in bf16",
    cases=_cases("fp8_e4m3"),
    quick=tuple(Case(r, 7168, "fp8_e4m3") for r in (1, 128, 32768)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        *flashinfer.ADD_RMSNORM_FP8,
        torch_compile.ADD_RMSNORM_FP8,
        torch_eager.ADD_RMSNORM_FP8,
        stream.PEER,
    ),
    targets=_targets("fp8_e4m3"),
)
