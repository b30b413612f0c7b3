"""Convolutions of video autoencoders: torch's, with cuDNN's plans measured where that pays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

_LARGE = 4e11
"""Operations of a convolution from which on plans are measured, for 40 ms at the first call of a shape. On an H200 this
saved 0.85 ms of 2.74 in a call of 1.2e12 operations, and 0.06 at most in calls of 4e11 and fewer."""
_MEASURED = 3
"""Plans that are measured: those that cuDNN takes for the fastest. Torch measures more by default, for longer."""


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: tuple[int, ...] | int = 1,
    padding: tuple[int, ...] | int = 0,
) -> torch.Tensor:
    """conv2d or conv3d of images or frames, [n, channels, (frames,) height, width]."""
    convolved = functional.conv2d if x.dim() == 4 else functional.conv3d
    if x.is_cuda and 2.0 * x.numel() / x.shape[1] * weight.numel() >= _LARGE:
        with measured_plans():
            return convolved(x, weight, bias, stride, padding)
    return convolved(x, weight, bias, stride, padding)


@contextmanager
def measured_plans() -> Iterator[None]:
    """cuDNN's plans for convolutions are measured at the first call of each shape in a process."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, _MEASURED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
