"""Default strides of outputs, as in cuDNN, and axes that one stride serves."""

from collections.abc import Iterable, Mapping, Sequence

from graphfuse.ops.op import Attributes, Shape, Stride


def packed_stride(dim: Sequence[int], order: Sequence[int] | None = None) -> Stride:
    """Strides without gaps. order: the axes, outermost first; by default in their order."""
    stride, step = [1] * len(dim), 1
    for axis in reversed(order if order is not None else range(len(dim))):
        stride[axis] = step
        step *= max(dim[axis], 1)
    return tuple(stride)


def packed_like(dim: Sequence[int], shape: Sequence[int], stride: Sequence[int]) -> Stride:
    """Strides without gaps, in the axis order of a tensor with this shape and stride (so NHWC stays NHWC)."""
    if not len(shape) == len(stride) == len(dim):
        return packed_stride(dim)
    # Extents of 1 and broadcast axes do not determine the order: they keep their positions.
    ordered = [axis for axis in range(len(dim)) if dim[axis] != 1 and stride[axis]]
    ranked = iter(sorted(ordered, key=lambda axis: (-stride[axis], axis)))
    return packed_stride(dim, [next(ranked) if axis in ordered else axis for axis in range(len(dim))])


def row_major(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    """Row-major strides, whatever the inputs' layouts."""
    return packed_stride(dim)


def channels_last(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    """Strides of [N, C, spatial axes...] with C innermost, whatever the inputs' layouts."""
    return packed_stride(dim, [0, *range(2, len(dim)), 1])


def merge(axes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(extent, stride) pairs, outermost first, without extents of 1, and with neighbours merged if one stride serves
    both."""
    merged: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return tuple(merged)
