"""LayerNorm backward: the gradients of its input, its weight and its bias."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.layernorm import COLUMNS, MEAN, ROWS
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.row_case import Buffer, RowCase, around_one, by_parts, normal, unset

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

# One rounding of what is exact but for float32 sums; peers may round what is normalized, too.
_DX = Accuracy(Tolerance(2**-8 + 2**-12, 2**-16), Tolerance(2**-5, 2**-4))
# Relative to the root of the number of rows that are added.
_DWEIGHT = Accuracy(Tolerance(2**-8 + 2**-12, 2**-14), Tolerance(2**-7, 2**-5))


@dataclass(frozen=True)
class LayerNormBackwardCase(RowCase):
    """rows x columns of bfloat16. mean, inverse: what the training phase of the forward keeps of each row."""

    def buffers(self) -> dict[str, Buffer]:
        return {
            "x": self.whole(data_type.BFLOAT16, normal(mean=MEAN)),
            "dy": self.whole(data_type.BFLOAT16, normal()),
            "weight": self.by_column(data_type.BFLOAT16, around_one),
            "bias": self.by_column(data_type.BFLOAT16, normal(), drawn=False),  # peers ask for it
            "mean": self.by_row(data_type.FLOAT, unset),
            "inverse": self.by_row(data_type.FLOAT, unset),
            "dx": self.whole(data_type.BFLOAT16),
            "dweight": self.by_column(data_type.BFLOAT16),
            "dbias": self.by_column(data_type.BFLOAT16),
        }

    def draw(self, graph, x, dy, weight, mean, inverse):
        made = graph.layernorm_backward(dy, x, weight, mean, inverse)
        return dict(zip(("dx", "dweight", "dbias"), made, strict=True))

    def fill(self, operands: BufferSet) -> None:
        for x, mean, inverse in by_parts(operands.x, operands.mean, operands.inverse):
            mean.copy_(x.double().mean(1))
            inverse.copy_((x.double().var(1, correction=0) + self.eps).rsqrt())

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        normalized, scaled = self._normal(operands, rows), operands.dy[rows].double() * operands.weight.double()
        along = normalized * (scaled * normalized).mean(1, keepdim=True)
        inverse = operands.inverse[rows, None].double()
        yield "dx", inverse * (scaled - scaled.mean(1, keepdim=True) - along), _DX

    def terms(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        dy = operands.dy[rows].double()
        yield "dweight", dy * self._normal(operands, rows), _DWEIGHT
        yield "dbias", dy, _DWEIGHT

    def _normal(self, operands: BufferSet, rows: torch.Tensor) -> torch.Tensor:
        centred = operands.x[rows].double() - operands.mean[rows, None].double()
        return centred * operands.inverse[rows, None].double()


BENCH = Bench(
    name="layernorm-backward",
    title="LayerNorm backward, gradients of input, weight and bias, bf16",
    cases=tuple(LayerNormBackwardCase(r, c) for r, c in itertools.product(ROWS, COLUMNS)),
    quick=tuple(LayerNormBackwardCase(4096, c) for c in (1024, 8192)),
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
