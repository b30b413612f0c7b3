"""SiLU of one half of a row times the other half, to FP8 with a scale for each row (token), which is written too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import reduction_mode
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

COLUMNS = 14336
"""Of the output; the input has two such halves, as the joint projection of a gated MLP makes them."""
ROWS = (1, 16, 128, 1024, 4096, 16384)
LARGEST = 448
"""Of FP8 E4M3."""
SMALLEST = 1 / (LARGEST * 512)
"""The least scale: rows of zeros have one to divide by."""
SCALE = Accuracy(Tolerance(2**-18), Tolerance(2**-6))
# Of the value over the scale; loose also covers a product that was rounded to bfloat16 and another scale.
ELEMENT = Accuracy(Tolerance(2**-4 + 2**-10, 2**-9), Tolerance(2**-3, 2**-6))


@dataclass
class Operands:
    """One buffer set. x (rows, 2 columns) bfloat16: a and b side by side; out (rows, columns) float8_e4m3fn, scale
    (rows, 1) float32."""

    x: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor

    @property
    def halves(self) -> tuple[torch.Tensor, ...]:
        """a and b."""
        return self.x.chunk(2, 1)

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        a, b = self.halves
        return {"a": a, "b": b, "out": self.out, "scale": self.scale}


@dataclass(frozen=True)
class Case:
    """rows of twice `columns` bfloat16."""

    rows: int
    columns: int
    output: str = "fp8_e4m3"

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: both halves read, elements and scales written."""
        return self.rows * ((2 * 2 + 1) * self.columns + 4)

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        a, b = (graph.tensor([self.rows, self.columns], [2 * self.columns, 1], name=name) for name in "ab")
        y = graph.mul(graph.swish(a), b)
        amax = graph.reduction(y, mode=reduction_mode.AMAX).set_dim([self.rows, 1])
        scale = graph.max(graph.mul(amax, 1 / LARGEST), SMALLEST)
        scale.set_output().set_name("scale").set_data_type(data_type.FLOAT).set_byte_alignment(4)
        out = graph.mul(y, graph.reciprocal(scale))
        out.set_output().set_name("out").set_data_type(data_type.FP8_E4M3)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own."""
        import torch

        def one() -> Operands:
            x = torch.randn(self.rows, 2 * self.columns, dtype=torch.bfloat16, device=device)
            out = torch.empty(self.rows, self.columns, dtype=torch.float8_e4m3fn, device=device)
            return Operands(x, out, torch.empty(self.rows, 1, device=device))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        import torch

        operands.out.view(torch.uint8).fill_(0xFF)
        operands.scale.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why scales or elements are wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        a, b = operands.x[rows].double().chunk(2, 1)
        exact = a * a.sigmoid() * b
        scale = (exact.abs().amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST)
        found, accepted = operands.scale[rows].double(), SCALE.of(tight).around(scale)
        if complaint := judge.wrong(found, scale, accepted, rows, "scale"):
            return complaint
        exact = (exact / scale).clamp(-LARGEST, LARGEST)
        accepted = ELEMENT.of(tight).around(exact)
        return judge.wrong(judge.taken(operands.out, rows).double(), exact, accepted, rows)


BENCH = Bench(
    name="silu-mul-fp8",
    title="SiLU · mul → FP8 with a scale for each row, bf16 input",
    cases=tuple(Case(rows, COLUMNS) for rows in ROWS),
    quick=tuple(Case(rows, COLUMNS) for rows in (1, 16384)),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.SILU_MUL_FP8,
        torch_eager.SILU_MUL_FP8,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("fp8_e4m3",), 1 / 1.05),
        target.least_of_stream("fp8_e4m3", 512 * MB, math.inf, 0.95),
    ),
)
