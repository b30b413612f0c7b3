"""Forwards of the modules of the VAEs of WAN and Qwen-Image, channels-last from the first convolution to the last.

Each computes the same as the class's own, in other kernels. A norm and SiLU write where the convolution reads. The same
kernel adds the bias and the residual sum of the previous convolution. Upsampling and the mixing of frames are one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from graphfuse.torch.convolutional import fault, roles
from graphfuse.torch.convolutional.frames import FRAMES, Cache, Frames, PendingSum, channels_last, empty, normed
from graphfuse.torch.convolutional.spatial import wide
from graphfuse.torch.operators.convolution import convolution

_NO_FRAMES = Cache(None, [])


def residual(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    frames = _normed_frames(block.conv1, block.norm1, x, cache)
    before = x.tensor
    if not isinstance(block.conv_shortcut, torch.nn.Identity):
        before = _linear(before.permute(0, 2, 3, 4, 1), block.conv_shortcut).permute(0, 4, 1, 2, 3)
    middle = PendingSum(frames.convolved(None), block.conv1.bias)
    frames = _normed_frames(block.conv2, block.norm2, middle, cache, is_read=False)
    return PendingSum(frames.convolved(None), block.conv2.bias, before)


def attention(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    before = x.complete()
    n, c, t, h, w = before.shape
    frames = normed(before, block.norm).permute(0, 2, 3, 4, 1).view(n * t, 1, h * w, c)
    q, k, v = _linear(frames, block.to_qkv).chunk(3, dim=-1)
    made = _linear(functional.scaled_dot_product_attention(q, k, v), block.proj)
    return PendingSum(made.view(n, t, h, w, c).permute(0, 4, 1, 2, 3).add_(before))


def resample(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    return _RESAMPLED[block.mode](block, x.complete(), cache)


def middle(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    first, *others = block.resnets
    x = run(first, x, cache)
    for attention, residual in zip(block.attentions, others, strict=False):
        x = x if attention is None else run(attention, x, _NO_FRAMES)
        x = run(residual, x, cache)
    return x


def up(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    return _in_order([*block.resnets, *(block.upsamplers or ())], x, cache)


def residual_up(block: torch.nn.Module, x: PendingSum, cache: Cache, first_chunk: bool = False) -> PendingSum:
    before = x.complete()
    x = _in_order([*block.resnets, block.upsampler], x, cache)
    if block.avg_shortcut is None:
        return x
    return PendingSum(channels_last(x.complete() + block.avg_shortcut(before, first_chunk=first_chunk)))


def residual_down(block: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    before = x.complete()
    x = _in_order([*block.resnets, block.downsampler], x, cache)
    return PendingSum(channels_last(x.complete() + block.avg_shortcut(before)))


def encoder(module: torch.nn.Module, x: PendingSum, cache: Cache, **_: object) -> PendingSum:
    x = _in_order([*module.down_blocks, module.mid_block], _first(module, x, cache), cache)
    return _last(module, x, cache)


def decoder(module: torch.nn.Module, x: PendingSum, cache: Cache, **first: object) -> PendingSum:
    """Result of a decoder. first: whether it is the first chunk, if the class has this argument."""
    x = run(module.mid_block, _first(module, x, cache), cache)
    for block in module.up_blocks:
        x = run(block, x, cache, **first)
    return _last(module, x, cache)


FORWARDS: dict[str, Callable[..., PendingSum]] = {
    roles.RESIDUAL: residual,
    roles.ATTENTION: attention,
    roles.RESAMPLE: resample,
    roles.MIDDLE: middle,
    roles.UP: up,
    roles.RESIDUAL_UP: residual_up,
    roles.RESIDUAL_DOWN: residual_down,
    roles.ENCODER: encoder,
    roles.DECODER: decoder,
}
"""Forwards by role, of (module, activation, cache), and first_chunk if the own forward has it."""


def run(module: torch.nn.Module, x: PendingSum, cache: Cache, **more: object) -> PendingSum:
    """Result of a submodule: by its forward here, or by the module itself if that would compute something else."""
    role = roles.role(module)
    if role in FORWARDS and fault.is_fit(module, role, x.tensor):
        return FORWARDS[role](module, x, cache, **more)
    frames = {"feat_cache": cache.kept, "feat_idx": cache.position} if cache else {}
    return PendingSum(channels_last(module(x.complete(), **frames, **more)))


def _in_order(modules: Iterable[torch.nn.Module | None], x: PendingSum, cache: Cache) -> PendingSum:
    for module in modules:
        x = x if module is None else run(module, x, cache)
    return x


def _normed_frames(
    conv: torch.nn.Module, norm: torch.nn.Module, x: PendingSum, cache: Cache, is_read: bool = True
) -> Frames:
    frames = Frames(conv, x.tensor.shape, cache.get(), x.tensor)
    x.norm_silu_into(frames.new, norm, is_read)
    cache.put(frames.last() if cache else None)
    return frames


def _first(module: torch.nn.Module, x: PendingSum, cache: Cache) -> PendingSum:
    frames = Frames(module.conv_in, x.tensor.shape, cache.get(), x.tensor)
    frames.new.copy_(x.tensor)
    cache.put(frames.last() if cache else None)
    return PendingSum(frames.convolved(None), module.conv_in.bias)


def _last(module: torch.nn.Module, x: PendingSum, cache: Cache) -> PendingSum:
    frames = _normed_frames(module.conv_out, module.norm_out, x, cache, is_read=False)
    return PendingSum(frames.convolved(module.conv_out.bias))


def _linear(x: torch.Tensor, conv: torch.nn.Module) -> torch.Tensor:
    """A convolution of single pixels, for channels-last tensors."""
    return functional.linear(x, conv.weight.flatten(1), conv.bias)


def _frames(images: torch.Tensor, samples: int) -> torch.Tensor:
    return images.unflatten(0, (samples, -1)).permute(0, 2, 1, 3, 4)


def _upsampled(block: torch.nn.Module, x: torch.Tensor, mixed: int) -> PendingSum:
    """The convolution of frames at double height and width. mixed: how many frames lie one after another in the
    channels of each frame of x."""
    n, c, t, h, w = x.shape
    small = wide(x.permute(0, 2, 3, 4, 1).view(n * t, h, w, mixed, c // mixed)).permute(0, 3, 1, 2, 4)
    large = small.new_empty((n * t, mixed, h, 2, w, 2, small.shape[-1]))
    large.copy_(small[:, :, :, None, :, None].expand(large.shape))
    images = large.view(x.dtype).view(n * t * mixed, 2 * h, 2 * w, c // mixed).permute(0, 3, 1, 2)
    conv = block.resample[1]
    made = convolution(images, conv.weight, padding=conv.padding)
    return PendingSum(channels_last(_frames(made, n)), conv.bias)


def _upsample_frames(block: torch.nn.Module, x: torch.Tensor, cache: Cache) -> PendingSum:
    if not cache:
        return _upsampled(block, x, 1)
    kept = cache.get()
    if kept is None:
        cache.put("Rep")
        return _upsampled(block, x, 1)
    frames = Frames(block.time_conv, x.shape, kept if isinstance(kept, torch.Tensor) else None, x)
    frames.new.copy_(x)
    last = frames.last()
    if last.shape[2] == 1:
        last = torch.cat([torch.zeros_like(last), last], dim=2)
    cache.put(last)
    return _upsampled(block, frames.convolved(block.time_conv.bias), 2)


def _downsampled(block: torch.nn.Module, x: torch.Tensor, cache: Cache) -> PendingSum:
    """The downsampling convolution of frames. The own forward pads one pixel at the end of height and width; this pads
    two on all sides. Its first results then come from padding alone and are dropped; the others are the same."""
    conv, (h, w), images = block.resample[1], x.shape[-2:], x.transpose(1, 2).flatten(0, 1)
    made = convolution(images, conv.weight, stride=conv.stride, padding=(2, 2))
    made = made[:, :, 1 : 1 + (h - 2) // 2 + 1, 1 : 1 + (w - 2) // 2 + 1]
    total = empty(x.shape[0], made.shape[1], x.shape[2], *made.shape[2:], like=made)
    torch.add(_frames(made, x.shape[0]), conv.bias.view(-1, 1, 1, 1), out=total)
    return PendingSum(total)


def _downsample_frames(block: torch.nn.Module, x: torch.Tensor, cache: Cache) -> PendingSum:
    made = _downsampled(block, x, cache)
    if not cache:
        return made
    frames, kept = made.tensor, cache.get()
    cache.put(frames[:, :, -1:].clone(memory_format=FRAMES))
    if kept is None:
        return made
    n, c, t, h, w = frames.shape
    joined = empty(n, c, t + 1, h, w, frames)
    joined[:, :, :1].copy_(kept[:, :, -1:])
    joined[:, :, 1:].copy_(frames)
    conv = block.time_conv
    return PendingSum(channels_last(convolution(joined, conv.weight, stride=conv.stride)), conv.bias)


_RESAMPLED: dict[str, Callable[[torch.nn.Module, torch.Tensor, Cache], PendingSum]] = {
    "upsample2d": lambda block, x, cache: _upsampled(block, x, 1),
    "upsample3d": _upsample_frames,
    "downsample2d": _downsampled,
    "downsample3d": _downsample_frames,
}
"""Functions by the mode of a resampling module."""
