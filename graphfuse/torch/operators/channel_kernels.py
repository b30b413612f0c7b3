"""Kernels of group norm for inference: moments of rows, and channels times one number plus another, with or without
SiLU."""

from collections.abc import Mapping

import torch

from graphfuse.base.enums import reduction_mode
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT
from graphfuse.functional.tensor_parameter import FLOAT, FLOATS, Shape, TensorParameter, like, rows, type_of
from graphfuse.op_graph.tensor import Tensor


def _of_channels(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """Shape of a number for each channel of each sample. The input is [samples, channels, pieces, places of a piece],
    or [samples, places, channels]."""
    samples, *others = shapes["input"]
    return ((samples, others[0], 1, 1) if len(others) == 3 else (samples, 1, others[-1]),)


def _draw_moments(d: GraphBuilder) -> None:
    mean = d.by_rows(d["input"], reduction_mode.AVG)
    centred = d.graph.sub(d["input"], mean)
    d.store_read("mean", mean)
    variance = d.by_rows(d.graph.mul(centred, centred), reduction_mode.AVG)
    d.store("variance", d.graph.add(variance, d.number("eps")))


def _scaled(d: GraphBuilder) -> Tensor:
    return d.graph.add(d.graph.mul(d["input"], d["scale"]), d["shift"])


_MOMENTS = (TensorParameter(m, FLOAT, rows("input"), written=True, new=torch.float32) for m in ("mean", "variance"))
_SCALE, _SHIFT = (TensorParameter(name, FLOAT, _of_channels) for name in ("scale", "shift"))
_OUT = TensorParameter("out", FLOATS, like("input"), written=True, new=type_of("input"))
_ARGUMENTS = (INPUT, _SCALE, _SHIFT, _OUT)


@function(Variant((INPUT, *_MOMENTS), _draw_moments), "mean", "variance")
def row_moments(
    input: torch.Tensor,  # noqa: A002 - as in the other functions
    eps: float = 1e-5,
    mean: torch.Tensor | None = None,
    variance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of each row of input, and eps + its variance (the mean of the squared distances from the mean), in float32.

    input: (..., columns), any strides; bfloat16, float16 or float32. mean, variance: (..., 1). Errors as in
    ``rmsnorm``.
    """


@function(Variant(_ARGUMENTS, lambda d: d.store("out", _scaled(d))), "out")
def scaled_channels(
    input: torch.Tensor,  # noqa: A002
    scale: torch.Tensor,
    shift: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """input * scale + shift, rounded once. input: (samples, channels, pieces, places of a piece), or (samples, places,
    channels); bfloat16, float16 or float32. scale, shift: float32, (samples, channels, 1, 1) or (samples, 1, channels).
    Errors as in ``rmsnorm``."""


@function(Variant(_ARGUMENTS, lambda d: d.store("out", d.graph.swish(d.rounded(_scaled(d), "input")))), "out")
def scaled_channels_silu(
    input: torch.Tensor,  # noqa: A002
    scale: torch.Tensor,
    shift: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU of ``scaled_channels``, both rounded."""
