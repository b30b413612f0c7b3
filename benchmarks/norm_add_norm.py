"""RMSNorm → residual add → RMSNorm, the sum written beside the normalized row: a norm on both sides of each block of a
model, as Gemma has them."""

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
from graphfuse.benchmarks.peers import graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, RowCase, around_one, normal, rms_normal

if TYPE_CHECKING:
    import torch

    from graphfuse.api import pygraph
    from graphfuse.benchmarks.row_case import BufferSet, Exact


HIDDEN = (2560, 5376)
ROWS = (16, 4096, 16384)
# Loose: what is normalized first may be rounded, and is up to eight times as large as what it is added up to.
SUM = Accuracy(Tolerance(2**-8, 2**-18), Tolerance(2**-6, 2**-4))
# Tight: the sum is rounded, and what becomes of it again.
ACCURACY = Accuracy(Tolerance(2**-7 + 2**-12, 2**-16), Tolerance(2**-5, 2**-4))


@dataclass(frozen=True)
class NormAddNormCase(RowCase):
    """rows x columns of bfloat16. before, after: the weights before the sum and after it."""

    def buffers(self) -> dict[str, Buffer]:
        return {
            "x": self.whole(data_type.BFLOAT16, normal()),
            "before": self.by_column(data_type.BFLOAT16, around_one),
            "residual": self.whole(data_type.BFLOAT16, normal()),
            "after": self.by_column(data_type.BFLOAT16, around_one),
            "sum": self.whole(data_type.BFLOAT16),
            "out": self.whole(data_type.BFLOAT16),
        }

    def draw(self, graph, x, before, residual, after):
        first = self._sum(graph, x, before, residual)
        return first | self._normalized(graph, first["sum"], after)

    def first_graph(self, handle=None) -> pygraph:
        """What makes the sum."""
        return self.graph_of(self._sum, handle, "x", "before", "residual")

    def second_graph(self, handle=None) -> pygraph:
        """What reads the sum from memory."""
        return self.graph_of(self._normalized, handle, "sum", "after")

    def _sum(self, graph, x, before, residual):
        return {"sum": graph.add(self._norm(graph, x, before), residual)}

    def _normalized(self, graph, sum, after):
        return {"out": self._norm(graph, sum, after)}

    def _norm(self, graph, x, weight):
        return graph.rmsnorm(x, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)[0]

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        total = rms_normal(operands.x[rows].double(), operands.eps) * operands.before.double()
        total = total + operands.residual[rows].double()
        yield "sum", total, SUM
        yield "out", rms_normal(total, operands.eps) * operands.after.double(), ACCURACY


BENCH = Bench(
    name="norm-add-norm",
    title="RMSNorm → residual add → RMSNorm, bf16, sum written",
    cases=tuple(NormAddNormCase(r, c) for c, r in itertools.product(HIDDEN, ROWS)),
    quick=tuple(NormAddNormCase(r, 5376) for r in (16, 4096)),
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
