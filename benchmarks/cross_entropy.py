"""Cross entropy forward of rows of logits with integer targets, the loss of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.row_case import Buffer, RowCase, normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

SIZES = ((4096, 32000), (4096, 131072))
# A logarithm and what it nearly cancels; loose also covers a loss that was rounded to bfloat16.
ACCURACY = Accuracy(Tolerance(2**-18, 2**-18), Tolerance(2**-7, 2**-7))


@dataclass(frozen=True)
class CrossEntropyCase(RowCase):
    """rows x columns of bfloat16. No row is ignored, as then not all would read the same."""

    output: str = "fp32"

    def buffers(self) -> dict[str, Buffer]:
        return {
            "x": self.whole(data_type.BFLOAT16, normal(3)),
            "target": self.by_row(data_type.INT64, self._numbers),
            "loss": self.by_row(data_type.FLOAT),
        }

    def _numbers(self, *shape: int, **like) -> torch.Tensor:
        import torch

        return torch.randint(self.columns, shape, **like)

    def draw(self, graph, x, target):
        return {"loss": graph.cross_entropy(x, target)[0]}

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        from torch.nn.functional import cross_entropy

        loss = cross_entropy(operands.x[rows].double(), operands.target[rows], reduction="none")
        yield "loss", loss[:, None], ACCURACY


BENCH = Bench(
    name="cross-entropy",
    title="Cross entropy forward, bf16 logits, int64 targets",
    cases=tuple(CrossEntropyCase(r, c) for r, c in SIZES),
    quick=(CrossEntropyCase(4096, 32000),),
    peers=(
        graphfuse.PEER,
        quack.CROSS_ENTROPY,
        liger.CROSS_ENTROPY,
        torch_compile.CROSS_ENTROPY,
        torch_eager.CROSS_ENTROPY,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("fp32",), 1.02),
        target.least_of_stream_where("fp32", lambda case: True, "every size", 0.95),
    ),
)
