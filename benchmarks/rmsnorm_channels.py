"""RMSNorm → SiLU over the channels of a video tensor, as in the WAN VAE: contiguous, and channels-last."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.benchmarks import judge, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase
from graphfuse.user_graph import pygraph

if TYPE_CHECKING:
    import torch

EPS = 1e-6
CONTIGUOUS, CHANNELS_LAST = LAYOUTS = ("contiguous", "channels-last")
VIDEOS = ((96, 4, 480, 832), (192, 4, 240, 416), (384, 4, 120, 208))
"""Channels, frames, height and width of what the decoder's blocks normalize."""
ACCURACY = Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7))


@dataclass
class Operands:
    """One buffer set, all bfloat16. x, out (1, channels, frames, height, width) in the case's layout; weight
    (channels, 1, 1, 1)."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    eps: float = EPS

    def pack(self) -> dict[str, torch.Tensor]:
        """By the names of the case's graph."""
        return {"x": self.x, "weight": self.weight[None], "out": self.out}


@dataclass(frozen=True)
class Case:
    """columns: the channels. frames, height, width: their product is the number of rows."""

    columns: int
    frames: int
    height: int
    width: int
    layout: str
    output: str = "bf16"

    def __str__(self) -> str:
        return f"{self.output} {self.columns}x{self.frames}x{self.height}x{self.width} {self.layout}"

    @property
    def rows(self) -> int:
        return self.frames * self.height * self.width

    @property
    def moved(self) -> int:
        """Bytes: input and output, the weight."""
        return 2 * 2 * self.rows * self.columns + 2 * self.columns

    @property
    def dim(self) -> list[int]:
        return [1, self.columns, self.frames, self.height, self.width]

    @property
    def stride(self) -> list[int]:
        plane, (rows, columns) = self.height * self.width, (self.rows, self.columns)
        if self.layout == CONTIGUOUS:
            return [rows * columns, rows, plane, self.width, 1]
        return [rows * columns, 1, plane * columns, self.width * columns, columns]

    def graph(self, handle=None) -> pygraph:
        """Its tensors are named x, weight, out."""
        graph = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
        x = graph.tensor(self.dim, self.stride, data_type.BFLOAT16, name="x")
        weight = graph.tensor([1, self.columns, 1, 1, 1], data_type=data_type.BFLOAT16, name="weight")
        y = graph.swish(graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0])
        y.set_output().set_name("out").set_data_type(data_type.BFLOAT16).set_dim(self.dim).set_stride(self.stride)
        return graph

    def sets(self, count: int, device: str) -> list[Operands]:
        """Sets of random numbers of their own, with one weight."""
        import torch

        weight = (torch.rand(self.columns, 1, 1, 1, device=device) + 0.5).to(torch.bfloat16)

        def memory() -> torch.Tensor:
            return torch.empty_strided(self.dim, self.stride, dtype=torch.bfloat16, device=device)

        return [Operands(memory().normal_(), weight, memory()) for _ in range(count)]

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        return self.sets(1, device)[0].pack()

    def spoil(self, operands: Operands) -> None:
        """NaN, which no result is."""
        operands.out.fill_(math.nan)

    def wrong(self, operands: Operands, tight: bool) -> str | None:
        rows = judge.checked_rows(self.rows, operands.x.device)

        def taken(t: torch.Tensor) -> torch.Tensor:
            frame, place = rows // (self.height * self.width), rows % (self.height * self.width)
            return t[0][:, frame, place // self.width, place % self.width].T.double()

        x = taken(operands.x)
        y = x * (x.square().mean(1, keepdim=True) + operands.eps).rsqrt() * operands.weight.double().flatten()
        exact = y * y.sigmoid()
        return judge.wrong(taken(operands.out), exact, ACCURACY.of(tight).around(exact), rows)


def _in(layout: str):
    return lambda case: case["layout"] == layout


BENCH = Bench(
    name="rmsnorm-channels",
    title="RMSNorm → SiLU over the channels of video, bf16",
    cases=tuple(Case(*video, layout) for video, layout in itertools.product(VIDEOS, LAYOUTS)),
    quick=tuple(Case(*VIDEOS[-1], layout) for layout in LAYOUTS),
    peers=(
        graphfuse.PEER,
        graphfuse.DEPENDENT,
        torch_compile.RMSNORM_CHANNELS,
        torch_eager.RMSNORM_CHANNELS,
        stream.PEER,
    ),
    targets=(
        target.slowest_against_best(("bf16",), 1.02),
        target.slowest_against_best(("bf16",), 1.02, graphfuse.DEPENDENT.name, " with dependent launch"),
        target.least_of_stream("bf16", 512 * MB, math.inf, 0.97),
        *(target.least_of_stream_where("bf16", _in(layout), layout, 0.90) for layout in LAYOUTS),
    ),
)
