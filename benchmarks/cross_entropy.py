"""Cross entropy forward of rows of logits with integer targets, the loss of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.dtypes import data_type
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

SIZES = ((4096, 32000), (4096, 131072))
# A logarithm and what it nearly cancels; loose also covers a loss that was rounded to bfloat16.
ACCURACY = Accuracy(Tolerance(2**-18, 2**-18), Tolerance(2**-7, 2**-7))
_JUDGED = 1 << 26  # elements whose exact values are in memory at the same time


@dataclass
class Operands:
    """One buffer set. x (rows, columns) bfloat16, target (rows) int64, loss (rows) float32."""

    x: torch.Tensor
    target: torch.Tensor
    loss: torch.Tensor

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        return {"x": self.x, "target": self.target[:, None], "loss": self.loss[:, None]}


@dataclass(frozen=True)
class Case:
    """rows x columns of bfloat16."""

    rows: int
    columns: int
    output: str = "fp32"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: logits and targets read, losses written."""
        return self.rows * (2 * self.columns + 8 + 4)

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        x = graph.tensor([self.rows, self.columns], name="x")
        numbers = graph.tensor([self.rows, 1], data_type=data_type.INT64, byte_alignment=8, name="target")
        loss, _ = graph.cross_entropy(x, numbers)
        loss.set_output().set_name("loss").set_data_type(data_type.FLOAT).set_byte_alignment(4)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own. No row is ignored, as then not all would read the same."""
        import torch

        def one() -> Operands:
            x = torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device).mul_(3)
            numbers = torch.randint(self.columns, (self.rows,), device=device)
            return Operands(x, numbers, torch.empty(self.rows, device=device))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        operands.loss.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why losses are wrong, on some rows."""
        from torch.nn.functional import cross_entropy

        rows = judge.checked_rows(self.rows, operands.x.device)
        for part in rows.split(max(1, _JUDGED // self.columns)):
            logits, numbers = operands.x[part].double(), operands.target[part]
            exact = cross_entropy(logits, numbers, reduction="none")[:, None]
            found, accepted = operands.loss[part, None].double(), ACCURACY.of(tight).around(exact)
            if complaint := judge.wrong(found, exact, accepted, part, "loss"):
                return complaint
        return None


BENCH = Bench(
    name="cross-entropy",
    title="Cross entropy forward, bf16 logits, int64 targets",
    cases=tuple(Case(r, c) for r, c in SIZES),
    quick=(Case(4096, 32000),),
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
