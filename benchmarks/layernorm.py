"""LayerNorm forward with weight and bias, in inference phase."""

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
from graphfuse.benchmarks.row_case import Buffer, RowCase, around_one, normal, rms_normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

MEAN = 1.0
"""Of the inputs: a norm that forgets to take it away is wrong everywhere."""
ROWS = (4096, 32768)
COLUMNS = (1024, 2048, 4096, 8192)
# One rounding of what is exact but for float32 sums; the bias may cancel most of a value.
ACCURACY = Accuracy(Tolerance(2**-8 + 2**-12, 2**-17), Tolerance(2**-6, 2**-6))


@dataclass(frozen=True)
class LayerNormCase(RowCase):
    """rows x columns of bfloat16."""

    def buffers(self) -> dict[str, Buffer]:
        return {
            "x": self.whole(data_type.BFLOAT16, normal(mean=MEAN)),
            "weight": self.by_column(data_type.BFLOAT16, around_one),
            "bias": self.by_column(data_type.BFLOAT16, normal()),
            "y": self.whole(data_type.BFLOAT16),
        }

    def draw(self, graph, x, weight, bias):
        return {"y": graph.layernorm(x, weight, bias, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)[0]}

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        x = operands.x[rows].double()
        normalized = rms_normal(x - x.mean(1, keepdim=True), operands.eps)
        yield "y", normalized * operands.weight.double() + operands.bias.double(), ACCURACY


BENCH = Bench(
    name="layernorm",
    title="LayerNorm forward, bf16",
    cases=tuple(LayerNormCase(r, c) for r, c in itertools.product(ROWS, COLUMNS)),
    quick=tuple(LayerNormCase(4096, c) for c in (1024, 8192)),
    peers=(
        graphfuse.PEER,
        quack.LAYERNORM,
        liger.LAYERNORM,
        flashinfer.LAYERNORM,
        torch_compile.LAYERNORM,
        torch_eager.LAYERNORM,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.least_of_stream("bf16", 256 * MB, math.inf, 0.97),
    ),
)
