"""Softmax of rows, written as nodes: the largest element, the exponentials, their sum, the quotient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

SIZES = ((8192, 4096), (8192, 32768), (4096, 131072))
# One rounding of what is exact but for float32 exponentials and their sum.
ACCURACY = Accuracy(Tolerance(2**-8 + 2**-12), Tolerance(2**-6, 2**-30))
_JUDGED = 1 << 26  # elements whose exact values are in memory at the same time


@dataclass
class Operands:
    """One buffer set: x, y (rows, columns) bfloat16."""

    x: torch.Tensor
    y: torch.Tensor

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        return {"x": self.x, "y": self.y}


@dataclass(frozen=True)
class Case:
    """rows x columns of bfloat16."""

    rows: int
    columns: int
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: x read, y written."""
        return 2 * 2 * self.rows * self.columns

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        x = graph.tensor([self.rows, self.columns], name="x")
        graph.softmax(x).set_output().set_name("y")
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own."""
        import torch

        def one() -> Operands:
            x = torch.randn(self.rows, self.columns, dtype=torch.bfloat16, device=device)
            return Operands(x, torch.empty_like(x))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        operands.y.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the output is wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        for part in rows.split(max(1, _JUDGED // self.columns)):
            exact = operands.x[part].double().softmax(1)
            accepted = ACCURACY.of(tight).around(exact)
            if complaint := judge.wrong(operands.y[part].double(), exact, accepted, part, "y"):
                return complaint
        return None


BENCH = Bench(
    name="softmax",
    title="Softmax forward, bf16",
    cases=tuple(Case(r, c) for r, c in SIZES),
    quick=(Case(8192, 4096),),
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
