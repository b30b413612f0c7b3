"""RMSNorm → SiLU over the channels of a video tensor, as in the WAN VAE: contiguous, and channels-last."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase
from graphfuse.benchmarks import target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.judge import Accuracy, Tolerance
from graphfuse.benchmarks.peers import graphfuse, stream, torch_compile, torch_eager
from graphfuse.benchmarks.results import MB
from graphfuse.benchmarks.row_case import Buffer, BufferCase, around_one, normal, rms_normal

if TYPE_CHECKING:
    import torch

    from graphfuse.benchmarks.row_case import BufferSet, Exact

CONTIGUOUS, CHANNELS_LAST = LAYOUTS = ("contiguous", "channels-last")
VIDEOS = ((96, 4, 480, 832), (192, 4, 240, 416), (384, 4, 120, 208))
"""Channels, frames, height and width of what the decoder's blocks normalize."""
ACCURACY = Accuracy(Tolerance(2**-7, 2**-20), Tolerance(2**-5, 2**-7))


@dataclass(frozen=True)
class RmsNormChannelsCase(BufferCase):
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

    def buffers(self) -> dict[str, Buffer]:
        plane, rows, columns = self.height * self.width, self.rows, self.columns
        stride = (rows * columns, rows, plane, self.width, 1)
        if self.layout == CHANNELS_LAST:
            stride = (rows * columns, 1, plane * columns, self.width * columns, columns)
        video = Buffer(data_type.BFLOAT16, (1, columns, self.frames, self.height, self.width), stride)
        weight = Buffer(data_type.BFLOAT16, (1, columns, 1, 1, 1), values=around_one, shared=True)
        return {"x": replace(video, values=normal()), "weight": weight, "out": video}

    def draw(self, graph, x, weight):
        y, _ = graph.rmsnorm(x, weight, self.eps, norm_forward_phase=norm_forward_phase.INFERENCE)
        return {"out": graph.swish(y)}

    def of_rows(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        frame, place = rows // (self.height * self.width), rows % (self.height * self.width)
        return tensor[0][:, frame, place // self.width, place % self.width].T

    def exact(self, operands: BufferSet, rows: torch.Tensor) -> Exact:
        y = rms_normal(self.of_rows(operands.x, rows).double(), operands.eps) * operands.weight.double().flatten()
        yield "out", y * y.sigmoid(), ACCURACY


def _in(layout: str):
    return lambda case: case["layout"] == layout


BENCH = Bench(
    name="rmsnorm-channels",
    title="RMSNorm → SiLU over the channels of video, bf16",
    cases=tuple(RmsNormChannelsCase(*video, layout) for video, layout in itertools.product(VIDEOS, LAYOUTS)),
    quick=tuple(RmsNormChannelsCase(*VIDEOS[-1], layout) for layout in LAYOUTS),
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
