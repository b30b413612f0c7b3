"""RMSNorm forward in training phase, which writes the inverse RMS as well, beside the same norm in inference phase."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, quack, stream
from graphfuse.benchmarks.rmsnorm_backward import SIZES
from graphfuse.benchmarks.row_case import TYPES, Buffer, RowCase, around_one, normal

if TYPE_CHECKING:
    import torch

    from graphfuse.api import pygraph
    from graphfuse.benchmarks.row_case import BufferSet, Exact

OUTPUTS = ("bf16", "fp32")
# One rounding of what is exact but for a float32 sum.
_Y = {
    "bf16": Accuracy(Tolerance(2**-8 + 2**-12, 2**-20), Tolerance(2**-6, 2**-8)),
    "fp32": Accuracy(Tolerance(2**-20, 2**-24), Tolerance(2**-16, 2**-16)),
}
_INVERSE_RMS = Accuracy(Tolerance(2**-20), Tolerance(2**-16))


@dataclass(frozen=True)
class RmsNormTrainingCase(RowCase):
    """rows x columns of one of OUTPUTS."""

    def buffers(self) -> dict[str, Buffer]:
        dtype = TYPES[self.output]
        return {
            "x": self.whole(dtype, normal()),
            "weight": self.by_column(dtype, around_one),
            "y": self.whole(dtype),
            "inverse_rms": self.by_row(data_type.FLOAT, alignment=16),
        }

    def draw(self, graph, x, weight):
        made = graph.rmsnorm(x, weight, self.eps, norm_forward_phase=norm_forward_phase.TRAINING)
        return dict(zip(("y", "inverse_rms"), made, strict=True))

    def inference_graph(self, handle=None) -> pygraph:
        """The same without the inverse RMS."""

        def draw(graph, x, weight):
            return {"y": graph.rmsnorm(x, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)[0]}

        return self.graph_of(draw, handle)

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        x = operands.x[rows].double()
        inverse_rms = (x.square().mean(1, keepdim=True) + operands.eps).rsqrt()
        if operands.inverse_rms is not None:
            yield "inverse_rms", inverse_rms, _INVERSE_RMS
        yield "y", x * inverse_rms * operands.weight.double(), _Y[self.output]


BENCH = Bench(
    name="rmsnorm-training",
    title="RMSNorm forward in training phase, inverse RMS written",
    cases=tuple(RmsNormTrainingCase(r, c, output) for output, (r, c) in itertools.product(OUTPUTS, SIZES)),
    quick=tuple(RmsNormTrainingCase(4096, c, output) for output, c in itertools.product(OUTPUTS, (1024, 4096, 16384))),
    peers=(graphfuse.PEER, graphfuse.INFERENCE, quack.RMSNORM_TRAINING, stream.PEER),
    targets=(target.slowest_against(graphfuse.INFERENCE.name, "the inference phase", OUTPUTS, 1.02),),
)
