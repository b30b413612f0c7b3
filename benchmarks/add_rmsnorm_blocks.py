"""Residual add → RMSNorm → FP8 with a float32 scale for each 128 neighbours of a row, the sum written in bf16, and
the normalized rows in bf16 where who reads them wants both."""

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
from graphfuse.benchmarks.peers import flashinfer, graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, RowCase, around_one, normal, rms_normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

BLOCK = 128
LARGEST = 448
"""Of FP8 E4M3."""
COLUMNS = 7168
ROWS = (1, 16, 128, 1024, 4096, 32768)
OUTPUTS = ("fp8_e4m3", "fp8_e4m3_bf16")
"""The second with the normalized rows in bf16 beside."""
# Ours normalizes the sum as it is stored; that is half a step of bf16 from the exact one.
SUM = Accuracy(Tolerance(2**-8), Tolerance(2**-8))
NORM = Accuracy(Tolerance(2**-7 + 2**-12, 2**-20), Tolerance(2**-5, 2**-7))
# The largest value comes from a sum that was rounded and, where the rows are written in bf16, was rounded itself.
SCALE = Accuracy(Tolerance(2**-7 + 2**-12), Tolerance(2**-6))
# Of the value over the scale as it is stored.
ELEMENT = Accuracy(Tolerance(2**-4 + 2**-6, 2**-9), Tolerance(2**-3, 2**-6))


@dataclass(frozen=True)
class AddRmsNormBlocksCase(RowCase):
    """rows x columns of bfloat16, to one of OUTPUTS. The scales of one block of all rows are side by side, as the
    products that read them want it; by_block (columns / 128, a multiple of four) is their memory."""

    @property
    def both(self) -> bool:
        """Whether the normalized rows are written in bf16, too."""
        return self.output == OUTPUTS[1]

    @property
    def apart(self) -> int:
        """Scales from one block of a row to its next."""
        return -(-self.rows // 4) * 4

    def buffers(self) -> dict[str, Buffer | None]:
        return {
            "x": self.whole(data_type.BFLOAT16, normal()),
            "residual": self.whole(data_type.BFLOAT16, normal()),
            "weight": self.by_column(data_type.BFLOAT16, around_one),
            "sum": self.whole(data_type.BFLOAT16),
            "normed": self.whole(data_type.BFLOAT16) if self.both else None,
            "out": self.whole(data_type.FP8_E4M3),
            "scales": Buffer(data_type.FLOAT, (self.rows, self.columns // BLOCK), (1, self.apart)),
        }

    def draw(self, graph, x, residual, weight):
        total = graph.add(x, residual)
        y, _ = graph.rmsnorm(total, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        out, scales = graph.block_scale_quantize(y, block_size=BLOCK, axis=1)
        return {"sum": total, **({"normed": y} if self.both else {}), "out": out, "scales": scales}

    def fill(self, operands: BufferSet) -> None:
        operands.by_block = operands.scales.new_empty(self.columns // BLOCK, self.apart)
        operands.scales = operands.by_block.T[: self.rows]

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        total = operands.x[rows].double() + operands.residual[rows].double()
        yield "sum", total, SUM
        exact = rms_normal(total, operands.eps) * operands.weight.double()
        if operands.normed is not None:
            yield "normed", exact, NORM
        yield "scales", exact.abs().unflatten(1, (-1, BLOCK)).amax(2) / LARGEST, SCALE
        stored = operands.scales[rows].double().repeat_interleave(BLOCK, dim=1)
        yield "out", (exact / stored).clamp(-LARGEST, LARGEST), ELEMENT


BENCH = Bench(
    name="add-rmsnorm-fp8-blocks",
    title="Residual add → RMSNorm → FP8 with a scale for each 1 × 128, sum written in bf16",
    cases=tuple(AddRmsNormBlocksCase(r, COLUMNS, o) for o, r in itertools.product(OUTPUTS, ROWS)),
    quick=tuple(AddRmsNormBlocksCase(r, COLUMNS, OUTPUTS[0]) for r in (1, 32768)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        *flashinfer.ADD_RMSNORM_BLOCKS,
        torch_compile.ADD_RMSNORM_BLOCKS,
        torch_eager.ADD_RMSNORM_BLOCKS,
        stream.PEER,
    ),
    targets=tuple(
        one
        for output in OUTPUTS
        for one in (
            target.slowest_against_best((output,), 1 / 1.1),
            target.least_of_stream(output, 512 * MB, math.inf, 0.95),
        )
    ),
)
