"""Rows that are quantized to integers of 8 bits: a graph of the public API, and its results by torch and numpy."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from graphfuse import data_type, pygraph, reduction_mode
from support import graphs
from support.graphs import FLOAT

INT8, UINT8 = data_type.INT8, data_type.UINT8
KINDS = {INT8: np.int8, UINT8: np.uint8}
BOUNDS = {INT8: (-128.0, 127.0), UINT8: (0.0, 255.0)}


def values() -> np.ndarray:
    """Numbers around and beyond both types' ends, in quarters, their neighbours, and what is none."""
    near = np.arange(-300, 300, 0.25, np.float32)
    special = np.array(
        [np.nan, np.inf, -np.inf, -0.0, 1e-45, 2.0**31, -(2.0**31), 3e38, -3e38, 2.0**23 + 1], np.float32
    )
    every = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)), special]
    found = np.concatenate(every)
    return np.concatenate([found, np.zeros(-len(found) % 256, np.float32)])


def stored(numbers: np.ndarray, dtype: data_type) -> np.ndarray:
    """Rounded to nearest, ties to even, saturated; 0 for NaN."""
    known = np.where(np.isnan(numbers), 0, numbers)
    return np.clip(np.rint(known), *BOUNDS[dtype]).astype(KINDS[dtype])


@dataclass(frozen=True)
class Stored:
    """Numbers as a type of 8 bits, and each row's largest, too; and these stored integers plus 1 as floats.

    spelled: whether the graph itself rounds and bounds them.
    """

    dtype: data_type
    device: str
    spelled: bool = False

    @cached_property
    def graph(self) -> pygraph:
        g = graphs.new(device=self.device)
        rows = len(self.pack["x"])
        x = value = g.tensor([rows, 256], data_type=FLOAT, name="x")
        if self.spelled:
            low, high = BOUNDS[self.dtype]
            value = g.min(g.max(g.round(value), low), high)
        codes = g.identity(value).set_output().set_name("codes").set_data_type(self.dtype)
        g.add(codes, 1.0).set_output().set_name("more").set_data_type(FLOAT)
        largest = g.reduction(x, mode=reduction_mode.MAX).set_dim([rows, 1])
        largest.set_output().set_name("largest").set_data_type(self.dtype)
        return g

    @cached_property
    def pack(self) -> dict[str, torch.Tensor]:
        x = torch.from_numpy(values().reshape(-1, 256)).to("cuda" if self.device == "cuda" else "cpu")
        kind = getattr(torch, self.dtype.facts.torch)
        codes, largest = torch.empty_like(x, dtype=kind), torch.empty(len(x), 1, dtype=kind, device=x.device)
        return {"x": x, "codes": codes, "more": torch.empty_like(x), "largest": largest}

    def hold(self) -> None:
        found = {name: t.cpu().numpy() for name, t in self.pack.items()}
        want = stored(found["x"], self.dtype)
        np.testing.assert_array_equal(found["codes"], want)
        np.testing.assert_array_equal(found["more"], want.astype(np.float32) + 1)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(found["largest"], stored(found["x"].max(1, keepdims=True), self.dtype))
