"""Kernels of group norm for inference: moments of rows, the factor and the summand of each channel from the moments of
its group, and channels times one number plus another, with or without SiLU."""

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
    return ((samples, others[0 if len(others) == 3 else -1]),)


def _of_groups(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """Shape of a number for each channel of each sample. The means are [samples..., groups, channels of a group,
    numbers]."""
    *samples, groups, channels, _ = shapes["means"]
    return ((*samples, groups * channels),)


def _draw_moments(d: GraphBuilder) -> None:
    mean = d.by_rows(d["input"], reduction_mode.AVG)
    centred = d.graph.sub(d["input"], mean)
    d.store_read("mean", mean)
    variance = d.by_rows(d.graph.mul(centred, centred), reduction_mode.AVG)
    d.store("variance", d.graph.add(variance, d.number("eps")))


def _joined(d: GraphBuilder) -> tuple[Tensor, Tensor]:
    """Mean and variance of what each row has the means and variances of, in equal parts."""
    graph, means, parts = d.graph, d["means"], d.number("parts")
    is_number = graph.cmp_lt(graph.gen_index(means, axis=-1), parts)

    def average(values: Tensor) -> Tensor:
        return graph.div(d.by_rows(graph.binary_select(values, 0.0, is_number)), parts)

    mean = average(means)
    centred = graph.sub(means, mean)
    return mean, average(graph.add(graph.mul(centred, centred), d["variances"]))


def _draw_joined(d: GraphBuilder) -> None:
    mean, variance = _joined(d)
    d.store_read("mean", mean)
    d.store("variance", variance)


def _draw_factors(d: GraphBuilder) -> None:
    graph = d.graph
    *samples, groups, channels, _ = d.layouts["means"].shape

    def by_group(name: str, t: Tensor) -> Tensor:
        """`t`, which is the argument `name` of (channels,) or (samples..., channels), with the axes of the means."""
        *of_samples, of_channel = d.layouts[name].stride
        t.set_dim((*(samples if of_samples else (1,) * len(samples)), groups, channels, 1))
        outer = groups * channels * of_channel
        return t.set_stride((*(of_samples or (outer,) * len(samples)), channels * of_channel, of_channel, of_channel))

    def store(name: str, t: Tensor) -> None:
        d.store(name, t)
        by_group(name, t)

    mean, variance = _joined(d)
    scale = graph.mul(graph.rsqrt(variance), by_group("weight", d["weight"]))
    store("scale", graph.identity(scale))
    store("shift", graph.sub(by_group("bias", d["bias"]), graph.mul(mean, scale)))


def _scaled(d: GraphBuilder) -> Tensor:
    def of_channels(name: str) -> Tensor:
        (samples, channels), (of_sample, of_channel) = d.layouts[name].shape, d.layouts[name].stride
        channels_last = d.rank == 3
        shape = (samples, 1, channels) if channels_last else (samples, channels, 1, 1)
        stride = (of_sample, *(of_channel,) * (d.rank - 1))
        return d[name].set_dim(shape).set_stride(stride)

    return d.graph.add(d.graph.mul(d["input"], of_channels("scale")), of_channels("shift"))


LONGEST = 1 << 24
"""Most numbers of a row of ``joined_moments`` and ``channel_factors``, as kernels number columns in float32."""


def _moments(of: str) -> tuple[TensorParameter, ...]:
    """The written mean and variance of each row of an argument."""
    return tuple(
        TensorParameter(name, FLOAT, rows(of), written=True, new=torch.float32) for name in ("mean", "variance")
    )


def _of_places(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """Shape of a number for each channel of each place of latents. The input is [1, frames, height of the latents,
    rows of one, width of the latents, columns of one, channels]."""
    return (tuple(1 if axis in (3, 5) else extent for axis, extent in enumerate(shapes["input"])),)


def _modulated(d: GraphBuilder) -> Tensor:
    def of_channels(name: str) -> Tensor:
        return d[name].set_dim((1,) * (d.rank - 1) + d.layouts[name].shape[-1:])

    normal = d.graph.add(d.graph.mul(d["input"], of_channels("scale")), of_channels("shift"))
    product = d.graph.mul(d.rounded(normal, "input"), d["factor"])
    return d.graph.add(d.rounded(product, "input"), d["summand"])


_SCALE, _SHIFT = (TensorParameter(name, FLOAT, _of_channels) for name in ("scale", "shift"))
_OUT = TensorParameter("out", FLOATS, like("input"), written=True, new=type_of("input"))
_ARGUMENTS = (INPUT, _SCALE, _SHIFT, _OUT)
_VARIANCES = TensorParameter("variances", FLOAT, like("means"))
_JOINED = (TensorParameter("means", FLOAT), _VARIANCES, *_moments("means"))
_FACTORS = (
    TensorParameter("means", FLOAT, row_axes=3),
    _VARIANCES,
    *(TensorParameter(name, FLOATS, lambda shapes: (_of_groups(shapes)[0][-1:],)) for name in ("weight", "bias")),
    *(TensorParameter(name, FLOAT, _of_groups, written=True, new=torch.float32) for name in ("scale", "shift")),
)


@function(Variant((INPUT, *_moments("input")), _draw_moments), "mean", "variance")
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


@function(Variant(_JOINED, _draw_joined), "mean", "variance")
def joined_moments(
    means: torch.Tensor,
    variances: torch.Tensor,
    parts: float,
    mean: torch.Tensor | None = None,
    variance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of a whole from those of its equal parts: the variance is the mean of the variances, plus the
    mean of the squared distances of the means.

    means, variances: float32, (..., numbers), any strides: of the parts of one whole in each row. Only the first
    `parts` numbers of a row are used, so that a kernel serves several lengths, up to LONGEST; the others may have any
    value. mean, variance: float32, (..., 1). Errors as in ``rmsnorm``.
    """


@function(Variant(_FACTORS, _draw_factors), "scale", "shift")
def channel_factors(
    means: torch.Tensor,
    variances: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    parts: float,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group norm as a factor and a summand for each channel: scale is weight / sqrt(variance of the group), shift is
    bias - mean of the group * scale.

    means, variances: as in ``joined_moments``, (samples..., groups, channels of a group, numbers): in each row, those
    of all parts of the group. The rows of all channels of a group may be the same memory. parts: as there. weight,
    bias: (channels,), bfloat16, float16 or float32. scale, shift: float32, (samples..., channels). Errors as in
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
    channels); bfloat16, float16 or float32. scale, shift: float32, (samples, channels). Errors as in ``rmsnorm``."""


@function(Variant(_ARGUMENTS, lambda d: d.store("out", d.graph.swish(d.rounded(_scaled(d), "input")))), "out")
def scaled_channels_silu(
    input: torch.Tensor,  # noqa: A002
    scale: torch.Tensor,
    shift: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU of ``scaled_channels``, both rounded."""


_OF_LATENTS = (
    TensorParameter("input", FLOATS, row_axes=6),
    *(TensorParameter(name, FLOAT, lambda shapes: ((1, shapes["input"][-1]),)) for name in ("scale", "shift")),
    *(TensorParameter(name, FLOATS, _of_places) for name in ("factor", "summand")),
    _OUT,
)


@function(Variant(_OF_LATENTS, lambda d: d.store("out", _modulated(d))), "out")
def modulated_channels(
    input: torch.Tensor,  # noqa: A002
    scale: torch.Tensor,
    shift: torch.Tensor,
    factor: torch.Tensor,
    summand: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scaled_channels`` * factor + summand, each rounded.

    input: (1, frames, height, m, width, n, channels), frames of which each place of latents has m by n places; any
    strides; bfloat16, float16 or float32. scale, shift: float32, (1, channels). factor, summand: (1, frames, height, 1,
    width, 1, channels), of these types. Errors as in ``rmsnorm``.
    """


@function(Variant(_OF_LATENTS, lambda d: d.store("out", d.graph.swish(d.rounded(_modulated(d), "input")))), "out")
def modulated_channels_silu(
    input: torch.Tensor,  # noqa: A002
    scale: torch.Tensor,
    shift: torch.Tensor,
    factor: torch.Tensor,
    summand: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiLU of ``modulated_channels``, both rounded."""
