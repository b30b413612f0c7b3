"""SiLU of one half of a row times the other half, to FP8 with a scale for each row (token), which is written too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, RowCase, normal, unset

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

COLUMNS = 14336
"""Of the output; the input has two such halves, as the joint projection of a gated MLP makes them."""
ROWS = (1, 16, 128, 1024, 4096, 16384)
LARGEST = 448
"""Of FP8 E4M3."""
SMALLEST = 1 / (LARGEST * 512)
"""The least scale: rows of zeros have one to divide by."""
SCALE = Accuracy(Tolerance(2**-18), Tolerance(2**-6))
# Of the value over the scale; loose also covers a product that was rounded to bfloat16 and another scale.
ELEMENT = Accuracy(Tolerance(2**-4 + 2**-10, 2**-9), Tolerance(2**-3, 2**-6))


@dataclass(frozen=True)
class SiluMulFp8Case(RowCase):
    """rows of twice `columns` bfloat16, a and b side by side in x."""

    output: str = "fp8_e4m3"

    def buffers(self) -> dict[str, Buffer]:
        half = Buffer(data_type.BFLOAT16, (self.rows, self.columns), (2 * self.columns, 1), values=unset, filled=True)
        return {
            "x": Buffer(data_type.BFLOAT16, (self.rows, 2 * self.columns), values=normal(), drawn=False),
            "a": half,
            "b": half,
            "scale": Buffer(data_type.FLOAT, (self.rows, 1), alignment=4),
            "out": self.whole(data_type.FP8_E4M3),
        }

    def draw(self, graph, a, b):
        y = graph.mul(graph.swish(a), b)
        amax = graph.reduction(y, mode=reduction_mode.AMAX).set_dim([self.rows, 1])
        scale = graph.max(graph.mul(amax, 1 / LARGEST), SMALLEST)
        return {"scale": scale, "out": graph.mul(y, graph.reciprocal(scale))}

    def fill(self, operands: BufferSet) -> None:
        operands.a, operands.b = operands.x.chunk(2, 1)

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        a, b = operands.a[rows].double(), operands.b[rows].double()
        exact = a * a.sigmoid() * b
        scale = (exact.abs().amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST)
        yield "scale", scale, SCALE
        yield "out", (exact / scale).clamp(-LARGEST, LARGEST), ELEMENT


BENCH = Bench(
    name="silu-mul-fp8",
    title="SiLU · mul → FP8 with a scale for each row, bf16 input",
    cases=tuple(SiluMulFp8Case(rows, COLUMNS) for rows in ROWS),
    quick=tuple(SiluMulFp8Case(rows, COLUMNS) for rows in (1, 16384)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.SILU_MUL_FP8,
        torch_eager.SILU_MUL_FP8,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("fp8_e4m3",), 1 / 1.05),
        target.least_of_stream("fp8_e4m3", 512 * MB, math.inf, 0.95),
    ),
)
