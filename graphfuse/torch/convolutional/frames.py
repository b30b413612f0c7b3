"""Data between the convolutions of a video autoencoder: channels-last activations, and frames kept between calls.

A causal convolution also reads frames of earlier calls. They precede the new frames in one buffer, into which the
kernel before the convolution writes. cuDNN pads height and width itself.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional import fused_rmsnorm_silu, rmsnorm
from graphfuse.torch.convolutional.kernels import biased_rmsnorm_silu
from graphfuse.torch.operators.convolution import convolution

FRAMES = torch.channels_last_3d
_KEPT = 2
"""Number of frames that a causal convolution with a kernel of three frames reads from earlier calls."""


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=FRAMES)


def empty(n: int, c: int, t: int, h: int, w: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor of these extents, channels-last."""
    return like.new_empty((n, t, h, w, c)).permute(0, 4, 1, 2, 3)


def rows(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of each sample as rows of channels. t: channels-last, or some frames of such a tensor."""
    for sample in t.unbind(0):
        yield sample.permute(1, 2, 3, 0).view(-1, t.shape[1])


def epsilon(norm: torch.nn.Module) -> float:
    """The epsilon that replaces a lower bound of 1e-12 of the norm. Rows of zeros stay zeros, and rows whose norm is
    not about 1e-12 give the same result."""
    return 1e-24 / norm.gamma.numel()


class Cache:
    """Frames that causal convolutions keep, in the order of their calls: diffusers' list and position. kept: None if no
    frames are kept because all come in one call."""

    def __init__(self, kept: MutableSequence[object] | None, position: MutableSequence[int]) -> None:
        self.kept, self.position = kept, position

    def __bool__(self) -> bool:
        return self.kept is not None

    def get(self) -> object:
        return self.kept[self.position[0]] if self.kept is not None else None

    def put(self, frames: object) -> None:
        """Sets the frames of the current convolution, and moves to the next."""
        if self.kept is not None:
            self.kept[self.position[0]] = frames
            self.position[0] += 1


@dataclass(eq=False)
class PendingSum:
    """Channels-last activations with pending additions. The convolution that made them may defer its bias and a
    residual sum, so that the reader adds them in its own kernel. tensor: the reader changes it in place. addend: one
    number per channel."""

    tensor: torch.Tensor
    addend: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def complete(self) -> torch.Tensor:
        """The tensor after the pending additions."""
        if self.residual is not None:
            self.tensor.add_(self.residual)
        if self.addend is not None:
            self.tensor.add_(self.addend.view(-1, 1, 1, 1))
        self.addend = self.residual = None
        return self.tensor

    def norm_silu_into(self, out: torch.Tensor, norm: torch.nn.Module, is_read: bool = True) -> None:
        """SiLU of the norm, written to `out`. is_read: whether this tensor has other readers."""
        weight, eps = norm.gamma.view(-1), epsilon(norm)
        left = [None] * out.shape[0] if self.residual is None else rows(self.residual)
        for x, y, residual in zip(rows(self.tensor), rows(out), left, strict=True):
            if self.addend is None:
                fused_rmsnorm_silu(x, weight, eps, y)
            else:
                biased_rmsnorm_silu(x, self.addend, weight, residual, x if is_read else None, eps, y)
        self.addend = self.residual = None


def normed(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    """The norm of a channels-last tensor."""
    out = torch.empty_like(x, memory_format=FRAMES)
    for a, b in zip(rows(x), rows(out), strict=True):
        rmsnorm(a, norm.gamma.view(-1), epsilon(norm), b)
    return out


class Frames:
    """Input of a causal convolution: kept frames followed by the new ones, which the caller writes. new: memory for the
    new frames, [samples, channels, frames, height, width]."""

    def __init__(self, conv: torch.nn.Conv3d, shape: tuple[int, ...], kept: object, like: torch.Tensor) -> None:
        n, c, t, h, w = shape
        self.conv, before = conv, conv.kernel_size[0] - 1
        if kept is not None and not (isinstance(kept, torch.Tensor) and _fits(kept, shape)):
            given = tuple(kept.shape) if isinstance(kept, torch.Tensor) else kept
            raise VariantPackError(f"kept frames are {given}; accepted: {(n, c, 'frames', h, w)}, as the new ones")
        held = min(kept.shape[2], before) if kept is not None else 0
        # With one new frame, the convolution kernel's first frames are multiplied by zeros only.
        self.first = before - held if t == 1 else 0
        zeros = before - held - self.first
        self.all = empty(n, c, before - self.first + t, h, w, like)
        if zeros:
            self.all[:, :, :zeros].zero_()
        if held:
            self.all[:, :, zeros : zeros + held].copy_(kept[:, :, kept.shape[2] - held :])
        self.new, self._held = self.all[:, :, before - self.first :], held

    def convolved(self, bias: torch.Tensor | None) -> torch.Tensor:
        conv, x = self.conv, self.all
        left, _, top, _, _, _ = conv._padding
        if conv.kernel_size[0] > 1 and self.first == conv.kernel_size[0] - 1:
            n, c, t, h, w = x.shape
            weight = conv.weight[:, :, -1]
            made = convolution(x.permute(0, 2, 1, 3, 4).view(n * t, c, h, w), weight, bias, padding=(top, left))
            return channels_last(made.view(n, t, *made.shape[1:]).permute(0, 2, 1, 3, 4))
        weight = conv.weight[:, :, self.first :] if self.first else conv.weight
        return channels_last(convolution(x, weight, bias, padding=(0, top, left)))

    def last(self) -> torch.Tensor:
        """The frames that the next call reads."""
        frames = min(_KEPT, self._held + self.new.shape[2])
        if frames == self.all.shape[2]:
            return self.all
        return self.all[:, :, self.all.shape[2] - frames :].clone(memory_format=FRAMES)


def _fits(kept: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return kept.dim() == 5 and (kept.shape[:2], kept.shape[3:]) == (shape[:2], shape[3:]) and kept.shape[2] > 0
