"""Padding by the values at the edges, upsampling and moves between channels and pixels of images and frames, in
channels-last, for inference.

Torch's own functions return contiguous results.
"""

import functools
from collections.abc import Sequence

import torch

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.ops.layouts import packed_stride
from graphfuse.torch.analysis.set_forward import RUN_ON
from graphfuse.torch.operators.convolution import FORMATS

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors. Subclasses have functions of their own."""
_SCALES = (1, 2, 4, 8)
"""Scales for which torch's float32 arithmetic finds the nearest element without rounding."""
_KEPT = 1024  # views of each kind, by layout
_PADS = {"replicate": torch.ops.aten.replication_pad3d.out, "reflect": torch.ops.aten.reflection_pad3d.out}

View = tuple[Sequence[int], Sequence[int]]
"""Shape and strides, the arguments of ``as_strided``."""


def is_taken(given: object) -> bool:
    """True for a tensor, or several, that the functions here may get in place of torch's."""
    if isinstance(given, list | tuple):
        return bool(given) and all(map(is_taken, given))
    if type(given) not in PLAIN or given.dtype not in FLOATS or given.device.type not in RUN_ON:
        return False
    return given.layout is torch.strided and given.numel() > 0


def has_layout(given: object) -> bool:
    """True for images and frames."""
    return isinstance(given, torch.Tensor) and given.dim() in FORMATS


def has_channels_inside(given: object) -> bool:
    """True for images and frames, or a part of them, with channels next to each other in memory."""
    return has_layout(given) and given.stride(1) == 1 and given.shape[1] > 1


def is_channels_last(t: object) -> bool:
    """True if a tensor of images or frames is channels-last in memory, and not also contiguous."""
    if type(t) is not torch.Tensor or t.dim() not in FORMATS or t.is_contiguous():
        return False
    return t.is_contiguous(memory_format=FORMATS[t.dim()])


def edge_padded(x: torch.Tensor, pad: Sequence[int], mode: str = "replicate") -> torch.Tensor:
    """``torch.nn.functional.pad(x, pad, mode="replicate")``, channels-last. x: [n, channels, (frames,) height, width],
    any strides. pad: begin and end of each dimension but the first two, the last first, each at least 0. mode: of
    height and width; it may be "reflect"."""
    if x.dim() == 5 and not any(pad[:4]) and (views := _frames_padded(x.shape, x.stride(), *pad[4:])) is not None:
        read, made, padded = views
        source, target = _wide(x.as_strided(*read), x.new_empty(made))
        _pad_planes(source, (0, 0, *pad[4:]), target, "replicate")
        return target.view(x.dtype).as_strided(*padded)
    begins, ends = pad[-2::-2], pad[::-2]
    extents = [b + n + e for b, n, e in zip(begins, x.shape[2:], ends, strict=True)]
    made = x.new_empty((x.shape[0], *extents, x.shape[1]))
    source, target = _wide(x.movedim(1, -1), made)
    if x.dim() == 4:
        _pad_planes(source, pad, target, mode)
    else:
        begin, frames = begins[0], x.shape[2]
        for sample, place in zip(source, target.narrow(1, begin, frames), strict=True):
            _pad_planes(sample, pad[:4], place, mode)
        for start, count, edge in ((0, begin, begin), (begin + frames, ends[0], begin + frames - 1)):
            if count:
                target.narrow(1, start, count).copy_(target.narrow(1, edge, 1).expand_as(target.narrow(1, 0, count)))
    return made.movedim(-1, 1)


@functools.lru_cache(maxsize=_KEPT)
def _frames_padded(
    shape: Sequence[int], strides: Sequence[int], begin: int, end: int
) -> tuple[View, Sequence[int], View] | None:
    """Frames as one plane for each sample, whose rows are frames: as they are read; the shape that is padded; and that
    as frames. None if places of a frame are not equally far apart."""
    n, channels, frames, height, width = shape
    of_n, of_channel, of_frame, of_row, of_place = strides
    if height > 1 and of_row != width * of_place:
        return None
    read = (n, frames, height * width, channels), (of_n, of_frame, of_place, of_channel)
    made = n, begin + frames + end, height * width, channels
    return read, made, _channels_last((n, channels, begin + frames + end, height, width))


def _pad_planes(source: torch.Tensor, pad: Sequence[int], target: torch.Tensor, mode: str) -> None:
    """Pads planes, [count, height, width, channels]. To torch, channels are the width, and each plane is a sample: the
    result of a single sample would lie in memory as the input does, whatever the strides of `target`."""
    _PADS[mode](source.unsqueeze(1), [0, 0, *pad], out=target.unsqueeze(1))


def nearest(x: torch.Tensor, scales: Sequence[int]) -> torch.Tensor:
    """Nearest upsampling of x by integers, channels-last. x: [n, channels, (frames,) height, width], any strides.
    scales: of each dimension but the first two."""
    read, made = _enlarged(x.shape, x.stride(), tuple(scales))
    source, target = _wide(x.as_strided(*read), x.new_empty(read[0]))
    return target.copy_(source).view(x.dtype).as_strided(*made)


def outer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Transposed convolution of each channel by its own weight with a stride as large as the kernel, channels-last:
    each element of the result is one product. x: [n, channels, (frames,) height, width], any strides. weight: of x's
    type, [channels, 1, ...]."""
    channels, _, *extents = weight.shape
    of_channel, _, *of_weights = weight.stride()
    read, made = _enlarged(x.shape, x.stride(), tuple(extents))
    ones, steps = ([part for n in of for part in (one, n)] for one, of in ((1, extents), (0, of_weights)))
    each = weight.as_strided((1, *ones, channels), (0, *steps, of_channel))
    return torch.mul(x.as_strided(*read), each, out=x.new_empty(read[0])).as_strided(*made)


@functools.lru_cache(maxsize=_KEPT)
def _enlarged(shape: Sequence[int], strides: Sequence[int], scales: Sequence[int]) -> tuple[View, View]:
    """Images or frames as they are read for a result that is larger by `scales`, [n, (frames, scale,) height, scale,
    width, scale, channels]; and a contiguous tensor of that shape as the result."""
    (n, channels, *extents), (of_n, of_channel, *of_extents) = shape, strides
    split = [part for extent, scale in zip(extents, scales, strict=True) for part in (extent, scale)]
    read = (n, *split, channels), (of_n, *(part for stride in of_extents for part in (stride, 0)), of_channel)
    return read, _channels_last((n, channels, *(a * b for a, b in zip(extents, scales, strict=True))))


@functools.lru_cache(maxsize=_KEPT)
def _channels_last(shape: Sequence[int]) -> View:
    """Images or frames that are channels-last."""
    n, channels, *extents = shape
    of_n, *of_extents, of_channel = packed_stride((n, *extents, channels))
    return tuple(shape), (of_n, of_channel, *of_extents)


def repeated(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """``x.repeat(*counts)``, channels-last. x: [n, channels, (frames,) height, width], any strides. counts: of each
    dimension."""
    samples, channels, *others = counts
    return x.movedim(1, -1).repeat(samples, *others, channels).movedim(-1, 1)


def channels_repeated(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x.repeat_interleave(count, 1)``, channels-last. x: [n, channels, (frames,) height, width], any strides."""
    made = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1], count))
    return made.copy_(x.movedim(1, -1).unsqueeze(-1)).flatten(-2).movedim(-1, 1)


def shuffled(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``pixel_shuffle(x, factor)``, channels-last. x: [n, channels * factor ** 2, height, width], any strides."""
    n, channels, height, width = x.shape
    made = x.new_empty((n, height, factor, width, factor, channels // factor**2))
    made.copy_(x.unflatten(1, (-1, factor, factor)).permute(0, 4, 2, 5, 3, 1))
    return made.as_strided(*_channels_last((n, channels // factor**2, height * factor, width * factor)))


def unshuffled(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``pixel_unshuffle(x, factor)``, channels-last. x: [n, channels, height * factor, width * factor], any strides."""
    n, channels, height, width = x.shape
    made = x.new_empty((n, height // factor, width // factor, channels, factor, factor))
    made.copy_(x.unflatten(3, (-1, factor)).unflatten(2, (-1, factor)).permute(0, 2, 4, 1, 3, 5))
    return made.flatten(3).movedim(-1, 1)


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat(tensors, dim)``, channels-last. tensors: [n, channels, (frames,) height, width], of one type and any
    strides. dim: from 2, of frames, height or width."""
    *others, last = tensors
    if others and all(_is_first(t, last, dim) for t in others):
        return edge_padded(last, [*[0] * (2 * (last.dim() - dim - 1)), len(others), *[0] * (2 * dim - 3)])
    shapes = [t.shape for t in tensors]
    whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    made = last.new_empty((whole[0], *whole[2:], whole[1]))
    strides, start = made.stride(), 0
    for t in tensors:
        read = _channels_moved(t.shape, t.stride())
        source, target = _wide(t.as_strided(*read), made.as_strided(read[0], strides, start))
        target.copy_(source)
        start += t.shape[dim] * strides[dim - 1]
    return made.as_strided(*_channels_last(whole))


@functools.lru_cache(maxsize=_KEPT)
def _channels_moved(shape: Sequence[int], strides: Sequence[int]) -> View:
    """Images or frames as [n, (frames,) height, width, channels]."""
    return (shape[0], *shape[2:], shape[1]), (strides[0], *strides[2:], strides[1])


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


def joined_dims(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """``x.reshape(shape)``, a view or channels-last, if each of its dimensions is one of x's or several; None if
    not."""
    axes, joined = [*range(x.dim())], []
    for n in shape:
        of, count = [], 1
        while axes and (not of or count < n):
            of.append(axes.pop(0))
            count *= x.shape[of[-1]]
        if not of or count != n:
            return None
        joined.append(of)
    if any(x.shape[axis] != 1 for axis in axes):
        return None
    samples, channels, *others = joined
    order = [*samples, *(axis for of in others for axis in of), *axes, *channels]
    return x.permute(order).reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def group_products(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Convolution of single pixels in groups, channels-last. x: [n, channels, (frames,) height, width], channels-last.
    weight: of x's type, [result's channels, channels / groups, 1, ...]."""
    n, _, *extents = x.shape
    rows = x.movedim(1, -1).reshape(-1, groups, weight.shape[1]).transpose(0, 1)
    made = x.new_empty((rows.shape[1], groups, weight.shape[0] // groups))
    torch.bmm(rows, weight.flatten(1).unflatten(0, (groups, -1)).transpose(1, 2), out=made.transpose(0, 1))
    return made.view(n, *extents, weight.shape[0]).movedim(-1, 1)


def scales(x: torch.Tensor, size: object, factor: object) -> tuple[int, ...] | None:
    """Scales of ``interpolate(x, size, factor)``; None if they are others than `nearest` has."""
    spatial = x.shape[2:]
    if (size is None) == (factor is None):
        return None
    given, types = (factor, (int, float)) if size is None else (size, (int,))
    each = tuple(given) if isinstance(given, tuple | list) else (given,) * len(spatial)
    if len(each) != len(spatial) or 0 in spatial or any(type(s) not in types for s in each):
        return None
    found = each if size is None else tuple(s / n for s, n in zip(each, spatial, strict=True))
    return tuple(map(int, found)) if all(s in _SCALES for s in found) else None


def wide(t: torch.Tensor) -> torch.Tensor:
    """A view with elements of 16 bytes, if channels, which are last, can be grouped so: torch copies one element at a
    time."""
    offset = t.storage_offset() % 16  # the whole offset would make an entry for each part of a tensor
    if t.is_conj() or t.is_neg() or not _can_be_wide(t.shape, t.stride(), offset, 16 // t.element_size()):
        return t
    return t.view(torch.complex128)


@functools.lru_cache(maxsize=_KEPT)
def _can_be_wide(shape: Sequence[int], strides: Sequence[int], offset: int, size: int) -> bool:
    return strides[-1] == 1 and not shape[-1] % size and not any(n % size for n in (*strides[:-1], offset))


def _wide(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of both, whose channels are as many and contiguous in `target`."""
    made = wide(source)
    return made, target if made is source else target.view(made.dtype)
