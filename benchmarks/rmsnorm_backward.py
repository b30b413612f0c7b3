"""RMSNorm backward: the gradients of its input and of its weight, and with the gradient of a residual branch added."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import TYPES, Buffer, RowCase, around_one, by_parts, normal, unset

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

OUTPUTS = ("bf16", "fp16", "fp32")
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


@dataclass(frozen=True)
class RmsNormBackwardCase(RowCase):
    """rows x columns of one of OUTPUTS. residual: the gradient of the residual branch."""

    residual: ClassVar[bool] = False

    def buffers(self) -> dict[str, Buffer | None]:
        dtype = TYPES[self.output]
        return {
            "x": self.whole(dtype, normal()),
            "dy": self.whole(dtype, normal()),
            "weight": self.by_column(dtype, around_one),
            "inverse_rms": self.by_row(data_type.FLOAT, unset),
            "residual": self.whole(dtype, normal()) if self.residual else None,
            "dx": self.whole(dtype),
            "dweight": self.by_column(dtype),
        }

    def draw(self, graph, x, dy, weight, inverse_rms, residual=None):
        dx, dweight, _ = graph.rmsnorm_backward(dy, x, weight, inverse_rms, has_dbias=False)
        return {"dx": dx if residual is None else graph.add(dx, residual), "dweight": dweight}

    def fill(self, operands: BufferSet) -> None:
        for x, inverse_rms in by_parts(operands.x, operands.inverse_rms):
            inverse_rms.copy_((x.double().square().mean(1) + self.eps).rsqrt())

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        normalized, scaled = self._normal(operands, rows), operands.dy[rows].double() * operands.weight.double()
        along = normalized * (scaled * normalized).mean(1, keepdim=True)
        dx = operands.inverse_rms[rows, None].double() * (scaled - along)
        yield "dx", dx if operands.residual is None else dx + operands.residual[rows].double(), _DX[self.output]

    def terms(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        yield "dweight", operands.dy[rows].double() * self._normal(operands, rows), _DWEIGHT[self.output]

    def _normal(self, operands: BufferSet, rows: torch.Tensor) -> torch.Tensor:
        return operands.x[rows].double() * operands.inverse_rms[rows, None].double()


@dataclass(frozen=True)
class AddRmsNormBackwardCase(RmsNormBackwardCase):
    """A case with the gradient of the residual branch added to that of the input."""

    residual: ClassVar[bool] = True


_PEERS = (graphfuse.PEER, quack.RMSNORM_BACKWARD, liger.RMSNORM_BACKWARD, torch_compile.RMSNORM_BACKWARD)
_PEERS += (torch_eager.RMSNORM_BACKWARD, stream.PEER)


def _in_table(case: dict) -> bool:
    return (case["rows"], case["columns"]) in TABLE


def _wide(case: dict) -> bool:
    return case["columns"] >= 2048


BENCH = Bench(
    name="rmsnorm-backward",
    title="RMSNorm backward, gradients of input and weight",
    cases=tuple(RmsNormBackwardCase(r, c, output) for output, (r, c) in itertools.product(OUTPUTS, SIZES)),
    quick=tuple(RmsNormBackwardCase(4096, c, "bf16") for c in (1024, 4096, 16384)),
    peers=_PEERS,
    targets=(
        *(target.slowest_against_best((output,), 1.02) for output in OUTPUTS),
        target.mean_speedup("quack", "Quack, sizes of the published table", ("bf16", "fp16"), 1.5, _in_table),
        *(
            target.least_of_stream_where(o, lambda c: c["columns"] >= 2048, "from 2048 columns on", 0.85)
            for o in OUTPUTS
        ),
        *(target.least_of_stream_where(o, lambda c: c["rows"] == 32768, "32768 rows", 0.95) for o in OUTPUTS),
    ),
)

RESIDUAL_BENCH = Bench(
    name="add-rmsnorm-backward",
    title="Residual add → RMSNorm backward, gradients of input and weight, the residual branch's added",
    cases=tuple(AddRmsNormBackwardCase(r, c, "bf16") for r, c in RESIDUAL),
    quick=(AddRmsNormBackwardCase(4096, 4096, "bf16"),),
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
