"""A mode of torch in which some functions keep the layout of channels-last images and frames, where torch's own return
contiguous tensors for them, and ``linear`` adds its bias in the product.

In the mode torch calls Python for each function, and also for each property of a tensor that is read. Operators of
graphfuse need none of the functions, and read many properties. So they run outside of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphfuse.runtime import torch_private
from graphfuse.torch.convolutional import group_convolutions, spatial
from graphfuse.torch.operators.convolution import FORMATS

_SPLIT = 8
"""Dimensions of frames whose channels become pixels: samples, channels, then frames, height and width, each with its
part of the channels."""
_SPLITS = {6: 4, _SPLIT: 5}
"""Dimensions of images and frames by those of ones whose channels become pixels, or pixels channels."""
_INTERPOLATED = {"align_corners": None, "recompute_scale_factor": None, "antialias": False}
"""Options of ``interpolate`` for nearest elements."""
_modes = torch_private.function_modes()
_observed = torch_private.needs_dispatcher()

Given, Made = ParamSpec("Given"), TypeVar("Made")


class LayoutMode(TorchFunctionMode):
    """The mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's
        call = None if is_dynamo_compiling() else _CALLS.get(function)
        is_usual = call is not None and spatial.PLAIN.issuperset(types) and args and spatial.is_taken(args[0])
        if not is_usual or not is_inference():
            call = function
        return call(*args, **(kwargs or {}))


def is_inference() -> bool:
    """True without gradients, and where neither a compiler nor a transform sees each call."""
    return not torch.is_grad_enabled() and not _observed()


def outside_mode(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function, which runs outside of the mode unless another mode has been entered in it."""
    if _modes is None:
        return function
    count, at, push, pop = _modes

    @functools.wraps(function)
    def call(*given: Given.args, **named: Given.kwargs) -> Made:
        if is_dynamo_compiling() or not (depth := count()) or type(mode := at(depth - 1)) is not LayoutMode:
            return function(*given, **named)
        pop()
        try:
            return function(*given, **named)
        finally:
            push(mode)

    return call


def _padded(
    input: torch.Tensor,  # noqa: A002 - as torch's, here and below
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> torch.Tensor:
    """``pad``, whose copies of edges of images or frames are channels-last, as are reflections in height and width."""
    is_usual = isinstance(pad, tuple | list) and all(type(n) is int and n >= 0 for n in pad)
    if value is None and is_usual and input.dim() in FORMATS and len(pad) == 2 * (input.dim() - 2):
        height, width = input.shape[-2:]
        is_within = max(pad[:2]) < width and max(pad[2:4]) < height and not any(pad[4:])
        if mode == "replicate" or mode == "reflect" and is_within:
            return spatial.edge_padded(input, pad, mode)
    return functional.pad(input, pad, mode, value)


def _interpolated(
    input: torch.Tensor,  # noqa: A002
    size: object = None,
    scale_factor: object = None,
    mode: str = "nearest",
    *given: object,
    **named: object,
) -> torch.Tensor:
    """``interpolate``, whose nearest elements are channels-last for scales that `spatial` has."""
    if mode == "nearest" and not given and _INTERPOLATED | named == _INTERPOLATED and input.dim() in FORMATS:
        if (scales := spatial.scales(input, size, scale_factor)) is not None:
            return spatial.nearest(input, scales)
    return functional.interpolate(input, size, scale_factor, mode, *given, **named)


def _joined(tensors: Sequence[torch.Tensor], *given: object, **named: object) -> torch.Tensor:
    """``torch.cat``, which is channels-last along frames, height or width if the first tensor has channels next to each
    other."""
    dims = [*given, *(value for name, value in named.items() if name in ("dim", "axis"))] or [0]
    is_usual = len(dims) == 1 and len(given) + len(named) <= 1 and type(dims[0]) is int
    if is_usual and spatial.has_channels_inside(first := tensors[0]):
        dim = dims[0]
        axis = dim + first.dim() if dim < 0 else dim
        if 2 <= axis < first.dim() and all(_is_joinable(t, first, axis) for t in tensors):
            return spatial.joined(tensors, axis)
    return torch.cat(tensors, *given, **named)


def _is_joinable(t: torch.Tensor, first: torch.Tensor, dim: int) -> bool:
    if t.dim() != first.dim() or t.dtype is not first.dtype or t.device != first.device:
        return False
    return all(a == b for axis, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if axis != dim)


def _kept(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.contiguous``, which leaves a channels-last tensor as it is, and copies channels of split dimensions next
    to each other."""
    if not given and not named:
        if spatial.is_channels_last(input):
            return input
        if input.dim() == _SPLIT and not input.is_contiguous():
            return spatial.channels_innermost(input)
    return torch.Tensor.contiguous(input, *given, **named)


def _joined_dims(input: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:  # noqa: A002
    """``Tensor.flatten``, which copies channels of split dimensions next to each other."""
    if input.dim() in _SPLITS and type(start_dim) is int and start_dim >= 1 and not input.is_contiguous():
        if start_dim >= 2:
            if _is_copied(input, start_dim, end_dim):
                input = spatial.channels_innermost(input)  # noqa: A001
        elif end_dim == 1 + input.dim() - _SPLITS[input.dim()]:
            channels = math.prod(input.shape[1 : end_dim + 1])
            if (
                made := spatial.joined_dims(input, (input.shape[0], channels, *input.shape[end_dim + 1 :]))
            ) is not None:
                return made
    return torch.Tensor.flatten(input, start_dim, end_dim)


def _reshaped(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.reshape``, which is channels-last for frames or images whose dimensions were split and moved."""
    if input.dim() in _SPLITS and not named and not input.is_contiguous():
        shape = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        if len(shape) == _SPLITS[input.dim()] and all(type(n) is int and n > 0 for n in shape):
            if (made := spatial.joined_dims(input, shape)) is not None:
                return made
    return torch.Tensor.reshape(input, *given, **named)


def _is_copied(input: torch.Tensor, start: int, end: int) -> bool:  # noqa: A002
    """True if torch copies a tensor to join two dimensions of it."""
    if end != start + 1 or end >= input.dim() or 1 in input.shape[start : end + 1]:
        return False
    return input.stride(start) != input.shape[end] * input.stride(end)


def _viewed(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.view``. Own code may have made the tensor contiguous for it."""
    is_kept = spatial.is_channels_last(input) or input.dim() == _SPLIT
    if is_kept and not named and not _is_type(*given):
        return input.reshape(*given)
    return torch.Tensor.view(input, *given, **named)


def _is_type(shape: object = None, *_: object) -> bool:
    return isinstance(shape, torch.dtype)


def _repeated(
    input: torch.Tensor,  # noqa: A002
    repeats: object,
    dim: object = None,
    **named: object,
) -> torch.Tensor:
    """``Tensor.repeat_interleave``, which is channels-last for a tensor with channels next to each other."""
    is_usual = type(repeats) is int and repeats > 0 and type(dim) is int and spatial.has_channels_inside(input)
    if is_usual and 1 <= (axis := dim + input.dim() if dim < 0 else dim) < input.dim():
        if not named or named == {"output_size": input.shape[axis] * repeats}:
            if axis == 1:
                return spatial.channels_repeated(input, repeats)
            return spatial.nearest(input, [repeats if axis == n else 1 for n in range(2, input.dim())])
    return torch.Tensor.repeat_interleave(input, repeats, dim, **named)


def _tiled(input: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
    """``Tensor.repeat``, which is channels-last for a tensor with channels next to each other."""
    counts = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    is_usual = not named and spatial.has_channels_inside(input) and len(counts) == input.dim()
    if is_usual and all(type(n) is int and n > 0 for n in counts):
        return spatial.repeated(input, counts)
    return torch.Tensor.repeat(input, *given, **named)


def _shuffled(input: torch.Tensor, upscale_factor: int) -> torch.Tensor:  # noqa: A002
    """``pixel_shuffle``, which is channels-last."""
    if _is_factor(input, upscale_factor) and input.shape[1] % upscale_factor**2 == 0:
        return spatial.shuffled(input, upscale_factor)
    return functional.pixel_shuffle(input, upscale_factor)


def _unshuffled(input: torch.Tensor, downscale_factor: int) -> torch.Tensor:  # noqa: A002
    """``pixel_unshuffle``, which is channels-last."""
    if _is_factor(input, downscale_factor) and not any(n % downscale_factor for n in input.shape[2:]):
        return spatial.unshuffled(input, downscale_factor)
    return functional.pixel_unshuffle(input, downscale_factor)


def _is_factor(x: torch.Tensor, factor: object) -> bool:
    return x.dim() == 4 and type(factor) is int and factor > 0


def _multiplied(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """``linear``, whose product adds the bias for rows of any rank. Torch's own adds it in another kernel from four
    dimensions on."""
    is_usual = bias is not None and weight.dim() == 2 and bias.dim() == 1
    if is_usual and input.dim() > 3 and input.numel() and input.is_contiguous():
        return functional.linear(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])
    return functional.linear(input, weight, bias)


_CALLS: dict[object, Callable[..., torch.Tensor]] = {
    functional.pad: _padded,
    functional.linear: _multiplied,
    functional.interpolate: _interpolated,
    torch.Tensor.contiguous: _kept,
    torch.Tensor.view: _viewed,
    torch.Tensor.flatten: _joined_dims,
    torch.Tensor.reshape: _reshaped,
    torch.Tensor.repeat: _tiled,
    torch.Tensor.repeat_interleave: _repeated,
    functional.pixel_shuffle: _shuffled,
    functional.pixel_unshuffle: _unshuffled,
    functional.conv2d: group_convolutions.convolved(functional.conv2d, 2),
    functional.conv3d: group_convolutions.convolved(functional.conv3d, 3),
    functional.conv_transpose2d: group_convolutions.transposed(functional.conv_transpose2d, 2),
    functional.conv_transpose3d: group_convolutions.transposed(functional.conv_transpose3d, 3),
} | dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _joined)
"""Functions of torch that are replaced, and what replaces them."""
