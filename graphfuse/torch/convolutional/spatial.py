"""Padding by the values at the edges, upsampling and moves between channels and pixels of images and frames, in
channels-last, for inference.

Torch's own functions return contiguous results.
"""

from collections.abc import Sequence

import torch

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.torch.analysis.set_forward import RUN_ON
from graphfuse.torch.operators.convolution import FORMATS

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors. Subclasses have functions of their own."""
_SCALES = (1, 2, 4, 8)
"""Scales for which torch's float32 arithmetic finds the nearest element without rounding."""


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
    begins, ends = pad[-2::-2], pad[::-2]
    extents = [b + n + e for b, n, e in zip(begins, x.shape[2:], ends, strict=True)]
    made = x.new_empty((x.shape[0], *extents, x.shape[1]))
    source, target = _wide(x.movedim(1, -1), made)
    if x.dim() == 4:
        _pad_planes(source, pad, target, mode)
    elif not any(pad[:4]):
        for sample, place in zip(source, target, strict=True):  # a frame is a row of one plane
            _pad_planes(sample.flatten(1, 2)[None], (0, 0, *pad[4:]), place.flatten(1, 2)[None], "replicate")
    else:
        begin, frames = begins[0], x.shape[2]
        for sample, place in zip(source, target.narrow(1, begin, frames), strict=True):
            _pad_planes(sample, pad[:4], place, mode)
        for start, count, edge in ((0, begin, begin), (begin + frames, ends[0], begin + frames - 1)):
            if count:
                target.narrow(1, start, count).copy_(target.narrow(1, edge, 1).expand_as(target.narrow(1, 0, count)))
    return made.movedim(-1, 1)


def _pad_planes(source: torch.Tensor, pad: Sequence[int], target: torch.Tensor, mode: str) -> None:
    """Pads planes, [count, height, width, channels]. To torch, channels are the width."""
    call = torch.ops.aten.reflection_pad3d if mode == "reflect" else torch.ops.aten.replication_pad3d
    call.out(source, [0, 0, *pad], out=target)


def nearest(x: torch.Tensor, scales: Sequence[int]) -> torch.Tensor:
    """Nearest upsampling of x by integers, channels-last. x: [n, channels, (frames,) height, width], any strides.
    scales: of each dimension but the first two."""
    source, target = _wide(x.movedim(1, -1), made := _split(x, scales))
    target.copy_(_beside(source, 2).expand_as(target))
    return _merged(made)


def outer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Transposed convolution of each channel by its own weight with a stride as large as the kernel, channels-last:
    each element of the result is one product. x: [n, channels, (frames,) height, width], any strides. weight: of x's
    type, [channels, 1, ...]."""
    made = _split(x, weight.shape[2:])
    each = _beside(weight.squeeze(1).movedim(0, -1)[None], 1)
    return _merged(torch.mul(_beside(x.movedim(1, -1), 2), each, out=made))


def _split(x: torch.Tensor, scales: Sequence[int]) -> torch.Tensor:
    """A new tensor for a result that is larger than x by `scales`, [n, (frames, scale,) height, scale, width, scale,
    channels]."""
    extents = [part for n, scale in zip(x.shape[2:], scales, strict=True) for part in (n, scale)]
    return x.new_empty((x.shape[0], *extents, x.shape[1]))


def _beside(t: torch.Tensor, first: int) -> torch.Tensor:
    """A view of t, [n, ..., channels], with a dimension of one element from `first` on beside each of those between."""
    for axis in range(first, 2 * t.dim() - 4 + first, 2):
        t = t.unsqueeze(axis)
    return t


def _merged(t: torch.Tensor) -> torch.Tensor:
    """The tensor of `_split` as [n, channels, (frames,) height, width]."""
    extents = [n * scale for n, scale in zip(t.shape[1:-1:2], t.shape[2:-1:2], strict=True)]
    return t.view(t.shape[0], *extents, t.shape[-1]).movedim(-1, 1)


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
    return _merged(made)


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
