"""Softmax of rows, written as nodes: the largest element, the exponentials, their sum, the quotient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, RowCase, normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

SIZES = ((8192, 4096), (8192, 32768), (4096, 131072))
# One rounding of what is exact but for float32 exponentials and their sum.
ACCURACY = Accuracy(Tolerance(2**-8 + 2**-12), Tolerance(2**-6, 2**-30))


@dataclass(frozen=True)
class SoftmaxCase(RowCase):
    """rows x columns of bfloat16."""

    def buffers(self) -> dict[str, Buffer]:
        return {"x": self.whole(data_type.BFLOAT16, normal()), "y": self.whole(data_type.BFLOAT16)}

    def draw(self, graph, x):
        return {"y": graph.softmax(x)}

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        yield "y", operands.x[rows].double().softmax(1), ACCURACY


BENCH = Bench(
    name="softmax",
    title="Softmax forward, bf16",
    cases=tuple(SoftmaxCase(r, c) for r, c in SIZES),
    quick=(SoftmaxCase(8192, 4096),),
    peers=(
        graphfuse.PEER,
        quack.SOFTMAX,
        torch_compile.SOFTMAX,
        torch_eager.SOFTMAX,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.slowest_against("quack", "Quack", ("bf16",), 1.0),
        target.least_of_stream("bf16", 128 * MB, math.inf, 0.98),
    ),
)
