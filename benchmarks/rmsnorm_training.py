"""RMSNorm forward in training phase, which writes the inverse RMS as well, beside the same norm in inference phase."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, quack, stream
from graphfuse.benchmarks.rmsnorm_backward import SIZES
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
TYPES = {"bf16": data_type.BFLOAT16, "fp32": data_type.FLOAT}
# One rounding of what is exact but for a float32 sum.
_Y = {
    "bf16": Accuracy(Tolerance(2**-8 + 2**-12, 2**-20), Tolerance(2**-6, 2**-8)),
    "fp32": Accuracy(Tolerance(2**-20, 2**-24), Tolerance(2**-16, 2**-16)),
}
_INVERSE_RMS = Accuracy(Tolerance(2**-20), Tolerance(2**-16))


@dataclass
class Operands:
    """One buffer set, of the case's type: x, y (rows, columns), weight (columns). inverse_rms (rows) float32; None in
    inference phase."""

    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    inverse_rms: torch.Tensor | None
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graphs."""
        named = {"x": self.x, "weight": self.weight[None], "y": self.y}
        return named if self.inverse_rms is None else named | {"inverse_rms": self.inverse_rms[:, None]}


@dataclass(frozen=True)
class Case:
    """rows x columns of one of TYPES."""

    rows: int
    columns: int
    output: str

    def __str__(self) -> str:
        return f"{self.output} {self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes: x, the normalized rows, the weight and the inverse RMS."""
        return TYPES[self.output].nbytes(self.columns) * (2 * self.rows + 1) + 4 * self.rows

    def graph(self, handle=None) -> pygraph:
        return self._graph(norm_forward_phase.TRAINING, handle)

    def inference_graph(self, handle=None) -> pygraph:
        """The same without the inverse RMS."""
        return self._graph(norm_forward_phase.INFERENCE, handle)

    def _graph(self, phase: norm_forward_phase, handle) -> pygraph:
        graph, dtype = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle), TYPES[self.output]
        x = graph.tensor([self.rows, self.columns], data_type=dtype, name="x")
        weight = graph.tensor([1, self.columns], data_type=dtype, name="weight")
        y, inverse_rms = graph.rmsnorm(x, weight, EPS, norm_forward_phase=phase)
        y.set_output().set_name("y").set_data_type(dtype)
        if inverse_rms is not None:
            inverse_rms.set_output().set_name("inverse_rms").set_data_type(data_type.FLOAT)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight."""
        import torch

        dtype = getattr(torch, TYPES[self.output].facts.torch)
        weight = (torch.rand(self.columns, device=device) + 0.5).to(dtype)

        def one() -> Operands:
            x = torch.randn(self.rows, self.columns, dtype=dtype, device=device)
            return Operands(x, weight, torch.empty_like(x), torch.empty(self.rows, device=device))

        return [one() for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        for tensor in (operands.y, operands.inverse_rms):
            tensor.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        """Why the outputs are wrong, on some rows."""
        rows = judge.checked_rows(self.rows, operands.x.device)
        x = operands.x[rows].double()
        inverse_rms = (x.square().mean(1, keepdim=True) + operands.eps).rsqrt()
        if operands.inverse_rms is not None:
            found, accepted = operands.inverse_rms[rows, None].double(), _INVERSE_RMS.of(tight).around(inverse_rms)
            if complaint := judge.wrong(found, inverse_rms, accepted, rows, "inverse RMS"):
                return complaint
        exact = x * inverse_rms * operands.weight.double()
        return judge.wrong(operands.y[rows].double(), exact, _Y[self.output].of(tight).around(exact), rows, "y")


BENCH = Bench(
    name="rmsnorm-training",
    title="RMSNorm forward in training phase, inverse RMS written",
    cases=tuple(Case(r, c, output) for output, (r, c) in itertools.product(TYPES, SIZES)),
    quick=tuple(Case(4096, c, output) for output, c in itertools.product(TYPES, (1024, 4096, 16384))),
    peers=(graphfuse.PEER, graphfuse.INFERENCE, quack.RMSNORM_TRAINING, stream.PEER),
    targets=(target.slowest_against(graphfuse.INFERENCE.name, "the inference phase", tuple(TYPES), 1.02),),
)
