"""Padding by the values at the edges and nearest upsampling of images and frames, in channels-last, for inference.

Torch's own functions return contiguous results. These copy whole channels, so that no layout changes.
"""

from collections.abc import Sequence

import torch

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.operators.convolution import FORMATS

_SCALES = (1, 2, 4, 8)
"""Scales for which torch's float32 arithmetic finds the nearest element without rounding."""


def has_layout(given: object) -> bool:
    """True for images and frames."""
    return isinstance(given, torch.Tensor) and given.dim() in FORMATS


def is_channels_last(t: object) -> bool:
    """True if a tensor of images or frames is channels-last in memory, and not also contiguous."""
    if type(t) is not torch.Tensor or t.dim() not in FORMATS or t.is_contiguous():
        return False
    return t.is_contiguous(memory_format=FORMATS[t.dim()])


def edge_padded(x: torch.Tensor, pad: Sequence[int]) -> torch.Tensor:
    """``torch.nn.functional.pad(x, pad, mode="replicate")``, channels-last. x: [n, channels, (frames,) height, width],
    any strides. pad: begin and end of each dimension but the first two, the last first, each at least 0."""
    begins, ends = pad[-2::-2], pad[::-2]
    extents = [b + n + e for b, n, e in zip(begins, x.shape[2:], ends, strict=True)]
    made = x.new_empty((x.shape[0], *extents, x.shape[1]))
    source, target = _wide(x.movedim(1, -1), made)
    if x.dim() == 4:
        _pad_planes(source, pad, target)
    elif not any(pad[:4]):
        for sample, place in zip(source, target, strict=True):  # a frame is a row of one plane
            _pad_planes(sample.flatten(1, 2)[None], (0, 0, *pad[4:]), place.flatten(1, 2)[None])
    else:
        begin, frames = begins[0], x.shape[2]
        for sample, place in zip(source, target.narrow(1, begin, frames), strict=True):
            _pad_planes(sample, pad[:4], place)
        for start, count, edge in ((0, begin, begin), (begin + frames, ends[0], begin + frames - 1)):
            if count:
                target.narrow(1, start, count).copy_(target.narrow(1, edge, 1).expand_as(target.narrow(1, 0, count)))
    return made.movedim(-1, 1)


def _pad_planes(source: torch.Tensor, pad: Sequence[int], target: torch.Tensor) -> None:
    """Pads planes, [count, height, width, channels]. To torch, channels are the width."""
    torch.ops.aten.replication_pad3d.out(source, [0, 0, *pad], out=target)


def nearest(x: torch.Tensor, scales: Sequence[int]) -> torch.Tensor:
    """Nearest upsampling of x by integers, channels-last. x: [n, channels, (frames,) height, width], any strides.
    scales: of each dimension but the first two."""
    extents = [part for n, scale in zip(x.shape[2:], scales, strict=True) for part in (n, scale)]
    made = x.new_empty((x.shape[0], *extents, x.shape[1]))
    source, target = _wide(x.movedim(1, -1), made)
    for axis in range(2, 2 * len(scales) + 1, 2):
        source = source.unsqueeze(axis)
    target.copy_(source.expand_as(target))
    return made.view(x.shape[0], *[n * s for n, s in zip(x.shape[2:], scales, strict=True)], x.shape[1]).movedim(-1, 1)


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat(tensors, dim)``, channels-last. tensors: [n, channels, (frames,) height, width], of one type and any
    strides. dim: from 2, of frames, height or width."""
    *others, last = tensors
    if others and all(_is_first(t, last, dim) for t in others):
        return edge_padded(last, [*[0] * (2 * (last.dim() - dim - 1)), len(others), *[0] * (2 * dim - 3)])
    axis, rank = dim - 1, tensors[0].dim()
    extents = [tensors[0].shape[0], *tensors[0].shape[2:], tensors[0].shape[1]]
    extents[axis] = sum(t.shape[dim] for t in tensors)
    made = tensors[0].new_empty(extents)
    start = 0
    for t in tensors:
        part = made.narrow(axis, start, t.shape[dim])
        source, target = _wide(t.movedim(1, rank - 1), part)
        target.copy_(source)
        start += t.shape[dim]
    return made.movedim(-1, 1)


def _is_first(t: torch.Tensor, x: torch.Tensor, dim: int) -> bool:
    """True if `t` has the memory of what x has first along a dimension, with the same values, and torch pads x's
    type."""
    is_view = t.data_ptr() == x.data_ptr() and t.stride() == x.stride() and t.is_neg() == x.is_neg()
    return is_view and t.shape[dim] == 1 and 0 not in x.shape and x.dtype in FLOATS


def channels_innermost(x: torch.Tensor) -> torch.Tensor:
    """A copy of x, [n, channels, ...], with channels next to each other and the other dimensions in order: those can be
    joined then."""
    n, channels, *extents = x.shape
    made = x.new_empty((n, *extents, channels)).movedim(-1, 1)
    return made.copy_(x)


def scales(x: torch.Tensor, size: object, factor: object) -> tuple[int, ...] | None:
    """Scales of ``interpolate(x, size, factor)``; None if they are others than `nearest` has."""
    spatial = x.shape[2:]
    if (size is None) == (factor is None):
        return None
    given = factor if size is None else size
    each = tuple(given) if isinstance(given, Sequence) else (given,) * len(spatial)
    if len(each) != len(spatial) or 0 in spatial:
        return None
    found = each if size is None else tuple(s / n for s, n in zip(each, spatial, strict=True))
    return tuple(map(int, found)) if all(s in _SCALES for s in found) else None


def wide(t: torch.Tensor) -> torch.Tensor:
    """A view with elements of 16 bytes, if channels, which are last, can be grouped so: torch copies one element at a
    time."""
    size = 16 // t.element_size()
    if t.is_conj() or t.is_neg() or t.shape[-1] % size or t.stride(-1) != 1:
        return t
    if any(n % size for n in (*t.stride()[:-1], t.storage_offset())):
        return t
    return t.view(torch.complex128)


def _wide(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of both, whose channels are as many and contiguous in `target`."""
    made = wide(source)
    return made, target if made is source else target.view(made.dtype)
