"""LayerNorm forward with weight and bias, in inference phase."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import flashinfer, graphfuse, liger, quack, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
MEAN = 1.0
"""Of the inputs: a norm that forgets to take it away is wrong everywhere."""
ROWS = (4096, 32768)
COLUMNS = (1024, 2048, 4096, 8192)
# One rounding of what is exact but for float32 sums; the bias may cancel most of a value.
ACCURACY = Accuracy(Tolerance(2**-8 + 2**-12, 2**-17), Tolerance(2**-6, 2**-6))


@dataclass
class Operands:
    """One buffer set, all bfloat16: x, y (rows, columns), weight, bias (columns)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        return {"x": self.x, "weight": self.weight[None], "bias": self.bias[None], "y": self.y}


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
        """Bytes: x, the normalized rows, weight and bias."""
        return 2 * self.columns * (2 * self.rows + 2)

    def graph(self, handle=None) -> pygraph:
        graph = pygraph(intermediate_data_type=data_type.FLOAT, io_data_type=data_type.BFLOAT16, handle=handle)
        x = graph.tensor([self.rows, self.columns], name="x")
        weight, bias = (graph.tensor([1, self.columns], name=name) for name in ("weight", "bias"))
        y, *_ = graph.layernorm(x, weight, bias, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
        y.set_output().set_name("y")
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight and one bias."""
        import torch

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        weight, bias = (torch.rand(self.columns, device=device) + 0.5).to(torch.bfloat16), random(self.columns)

        def one() -> Operands:
            x = random(self.rows, self.columns).add_(MEAN)
            return Operands(x, weight, bias, torch.empty_like(x))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        operands.y.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the output is wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        x = operands.x[rows].double()
        apart = x - x.mean(1, keepdim=True)
        normal = apart * (apart.square().mean(1, keepdim=True) + operands.eps).rsqrt()
        exact = normal * operands.weight.double() + operands.bias.double()
        return judge.wrong(operands.y[rows].double(), exact, ACCURACY.of(tight).around(exact), rows, "y")


BENCH = Bench(
    name="layernorm",
    title="LayerNorm forward, bf16",
    cases=tuple(Case(r, c) for r, c in itertools.product(ROWS, COLUMNS)),
    quick=tuple(Case(4096, c) for c in (1024, 8192)),
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
