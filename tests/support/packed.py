"""Arithmetic of two elements of 16 bits an instruction, on all such numbers."""

from dataclasses import dataclass
from functools import cached_property

import torch

from graphfuse import data_type, pygraph, reduction_mode
from support import graphs
from support.graphs import FLOAT, TORCH

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(256, 256)
"""The bits of all numbers of two bytes."""
PARTNERS = 96
"""Other numbers that each of them is computed with."""
OPS = {"products": ("mul", torch.mul), "sums": ("add", torch.add), "differences": ("sub", torch.sub)}


@dataclass(frozen=True)
class Packed:
    """A graph of one op of two tensors, and its results by torch: in float32, then rounded."""

    op: str
    dtype: data_type
    device: str

    @cached_property
    def graph(self) -> pygraph:
        g = graphs.new(device=self.device, intermediate_rounding="declared")
        shape = [*self.pack["x"].shape]
        x, y = (g.tensor(shape, data_type=self.dtype, name=name) for name in "xy")
        made = getattr(g, OPS[self.op][0])(x, y).set_output().set_name("made").set_data_type(self.dtype)
        largest = g.reduction(made, mode=reduction_mode.MAX).set_dim([shape[0], 1])
        largest.set_output().set_name("largest").set_data_type(FLOAT)
        return g

    @cached_property
    def pack(self) -> dict[str, torch.Tensor]:
        memory = "cuda" if self.device == "cuda" else "cpu"
        order = torch.randperm(65536, generator=graphs.generator("cpu", 3))
        shifted = torch.stack([EVERY.flatten().roll(k * 683)[order] for k in range(PARTNERS)]).view(-1, 256)
        x, y = (t.view(TORCH[self.dtype]).to(memory) for t in (EVERY.repeat(PARTNERS, 1), shifted))
        return {"x": x, "y": y, "made": torch.empty_like(x), "largest": torch.empty(len(x), 1, device=x.device)}

    def hold(self) -> None:
        """Fails unless results are those of torch. A product that is subnormal in float32 torch rounds twice."""
        exact = OPS[self.op][1](self.pack["x"].float(), self.pack["y"].float())
        want, got = exact.to(TORCH[self.dtype]), self.pack["made"]
        same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
        assert same[exact.abs() >= 2.0**-126].all() and same[exact == 0].all()
        near = torch.nextafter(want, got) == got
        assert (same | near).all()
