"""Convolutions in groups that are products, in channels-last, where cuDNN would launch kernels for each group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from graphfuse.torch.convolutional import spatial

_OPTIONS = MappingProxyType({"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1})
_OPTIONS_TRANSPOSED = MappingProxyType(
    {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
)
"""Arguments of torch's functions after input and weight, in order, with their usual values."""


def convolved(convolve: Callable[..., torch.Tensor], rank: int) -> Callable[..., torch.Tensor]:
    """``conv2d`` or ``conv3d``, which is a matrix product for each group if it reads single pixels. cuDNN launches
    several kernels for each group."""
    return _or_product(convolve, _OPTIONS, functools.partial(_of_pixels, rank))


def transposed(convolve: Callable[..., torch.Tensor], rank: int) -> Callable[..., torch.Tensor]:
    """``conv_transpose2d`` or ``conv_transpose3d``, which is a product of each channel with its own weight if no two
    products meet in an element. cuDNN launches two kernels for each channel."""
    return _or_product(convolve, _OPTIONS_TRANSPOSED, functools.partial(_of_channels, rank))


def _or_product(
    convolve: Callable[..., torch.Tensor],
    usual: Mapping[str, object],
    product: Callable[[torch.Tensor, torch.Tensor, Mapping[str, object]], torch.Tensor | None],
) -> Callable[..., torch.Tensor]:
    """The function, in place of which a product is made where that is not None. usual: its options."""

    def call(input: torch.Tensor, weight: torch.Tensor, *given: object, **named: object) -> torch.Tensor:  # noqa: A002
        asked = dict(zip(usual, given, strict=False)) | named
        if len(asked) == len(given) + len(named) and asked.keys() <= usual.keys():
            if (made := product(input, weight, usual | asked)) is not None:
                return made
        return convolve(input, weight, *given, **named)

    return call


def _of_pixels(rank: int, x: torch.Tensor, weight: torch.Tensor, options: Mapping[str, object]) -> torch.Tensor | None:
    groups = options["groups"]
    if type(groups) is not int or groups < 2 or not _is_weight(weight, x, rank) or not spatial.is_channels_last(x):
        return None
    made, read, *kernel = weight.shape
    if read == 1 or kernel != [1] * rank or made % groups or x.shape[1] != groups * read:
        return None
    is_usual = _are(options, rank, stride=1, padding=0, dilation=1)
    return spatial.group_products(x, weight, groups) if is_usual else None


def _of_channels(
    rank: int, x: torch.Tensor, weight: torch.Tensor, options: Mapping[str, object]
) -> torch.Tensor | None:
    if not _is_weight(weight, x, rank) or weight.shape[:2] != (options["groups"], 1) or x.shape[1] != weight.shape[0]:
        return None
    is_usual = _are(options, rank, padding=0, output_padding=0, dilation=1)
    is_outer = is_usual and _each(options["stride"], rank) == weight.shape[2:]
    return spatial.outer_product(x, weight) if is_outer else None


def _is_weight(weight: torch.Tensor, x: torch.Tensor, rank: int) -> bool:
    """True if products of two tensors are what a convolution of images or frames has."""
    if not spatial.is_taken(weight) or not x.dim() == weight.dim() == rank + 2:
        return False
    is_same = weight.dtype is x.dtype and weight.device == x.device
    return is_same and not torch.is_autocast_enabled(x.device.type)


def _are(options: Mapping[str, object], rank: int, **numbers: int) -> bool:
    """True if there is no bias, and these options have these numbers in each dimension."""
    return options["bias"] is None and all(_each(options[name], rank) == (n,) * rank for name, n in numbers.items())


def _each(option: object, rank: int) -> tuple[int, ...] | None:
    """An option of a convolution for each dimension; None if it has others than an int, or another number of them."""
    each = (option,) * rank if type(option) is int else option
    is_usual = isinstance(each, tuple | list) and len(each) == rank and all(type(n) is int for n in each)
    return tuple(each) if is_usual else None
