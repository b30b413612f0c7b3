"""torch's convolutions for video autoencoders. cuDNN's plans are measured for large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

_LARGE = 4e11
"""Smallest number of operations for which plans are measured, which takes 40 ms at the first call of a shape. On an
H200 this saved 0.85 ms of 2.74 in a call of 1.2e12 operations, and at most 0.06 ms in calls of 4e11 and fewer."""
_MEASURED = 3
"""Number of plans that are measured, the fastest by cuDNN's estimate. Torch measures more by default, which takes
longer."""


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
    """Context in which cuDNN's plans for convolutions are measured at the first call of each shape in a process."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, _MEASURED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
