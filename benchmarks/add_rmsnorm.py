"""Residual add -> RMSNorm, the sum written beside the normalized row, in bf16 or in FP8 at a static scale."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import TYPES, Buffer, RowCase, around_one, full, normal, rms_normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

SCALE = 0.05
"""What FP8 output is divided by: the largest values come near E4M3's end, 448."""
OUTPUTS = ("bf16", "fp8_e4m3")
HIDDEN = (2048, 3584, 5120, 7168)
ROWS = (1, 16, 128, 4096, 32768)
LARGE = (
    *((128, 4096), (4096, 1024), (4096, 4096), (4096, 8192)),
    *((32768, 4096), (32768, 8192), (16384, 16384), (32768, 32768)),
)
"""Rows and columns beside all of HIDDEN with all of ROWS."""
# Ours normalizes the sum as it is stored; that is half a step of bf16 from the exact one.
SUM = Accuracy(Tolerance(2**-8), Tolerance(2**-8))
ACCURACY = {
    # Tight: the sum is rounded, and what becomes of it again.
    "bf16": Accuracy(Tolerance(2**-7 + 2**-12, 2**-20), Tolerance(2**-5, 2**-7)),
    "fp8_e4m3": Accuracy(Tolerance(2**-4 + 2**-8, 2**-9), Tolerance(2**-3, 2**-6)),
}


@dataclass(frozen=True)
class AddRmsNormCase(RowCase):
    """rows x columns of bfloat16, to one of OUTPUTS."""

    def buffers(self) -> dict[str, Buffer | None]:
        scale = Buffer(data_type.FLOAT, (1, 1), values=full(SCALE), shared=True, own=(1,), alignment=4)
        return {
            "x": self.whole(data_type.BFLOAT16, normal()),
            "residual": self.whole(data_type.BFLOAT16, normal()),
            "weight": self.by_column(data_type.BFLOAT16, around_one),
            "scale": scale if self.output == "fp8_e4m3" else None,
            "sum": self.whole(data_type.BFLOAT16),
            "out": self.whole(TYPES[self.output]),
        }

    def draw(self, graph, x, residual, weight, scale=None):
        total = graph.add(x, residual)
        y, _ = graph.rmsnorm(total, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        return {"sum": total, "out": y if scale is None else graph.mul(y, graph.reciprocal(scale))}

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        total = operands.x[rows].double() + operands.residual[rows].double()
        yield "sum", total, SUM
        exact = rms_normal(total, operands.eps) * operands.weight.double()
        if operands.scale is not None:
            exact = (exact / operands.scale.double()).clamp(-448, 448)
        yield "out", exact, ACCURACY[self.output]


def _targets(output: str) -> tuple[target.Target, ...]:
    dependent = (graphfuse.DEPENDENT.name, " with dependent launch")
    return (
        target.slowest_against_best((output,), 1.02),
        target.slowest_against_best((output,), 1.02, *dependent),
        target.least_of_stream(output, 512 * MB, math.inf, 0.97),
    )


def _cases(output: str) -> tuple[AddRmsNormCase, ...]:
    return tuple(AddRmsNormCase(r, c, output) for c, r in itertools.product(HIDDEN, ROWS))


BENCH = Bench(
    name="add-rmsnorm",
    title="Residual add → RMSNorm, bf16, sum written",
    cases=_cases("bf16") + tuple(AddRmsNormCase(r, c, "bf16") for r, c in LARGE),
    quick=tuple(AddRmsNormCase(r, 7168, "bf16") for r in (1, 128, 32768)),
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
    quick=tuple(AddRmsNormCase(r, 7168, "fp8_e4m3") for r in (1, 128, 32768)),
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
