"""Default strides of outputs, as cuDNN lays them out."""

from collections.abc import Mapping, Sequence

from graphfuse.ops.op import Attributes, Shape, Stride


def packed_stride(dim: Sequence[int], order: Sequence[int] | None = None) -> Stride:
    """Strides without gaps; order lists the axes outermost first (default: as they come)."""
    stride, step = [1] * len(dim), 1
    for axis in reversed(order if order is not None else range(len(dim))):
        stride[axis] = step
        step *= max(dim[axis], 1)
    return tuple(stride)


def packed_like(dim: Sequence[int], shape: Sequence[int], stride: Sequence[int]) -> Stride:
    """Strides without gaps, with the axes in the order of those of a tensor of this shape (so NHWC stays NHWC)."""
    if not len(shape) == len(stride) == len(dim):
        return packed_stride(dim)
    # Extents of 1 and broadcast axes say nothing about the order: they stay where they stand.
    told = [axis for axis in range(len(dim)) if dim[axis] != 1 and stride[axis]]
    ranked = iter(sorted(told, key=lambda axis: (-stride[axis], axis)))
    return packed_stride(dim, [next(ranked) if axis in told else axis for axis in range(len(dim))])


def row_major(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    """Whatever the inputs' layouts are."""
    return packed_stride(dim)


def channels_last(dim: Shape, attributes: Attributes, inputs: Mapping[str, Stride]) -> Stride:
    """Strides of [N, C, spatial axes...] with C innermost, whatever the inputs' layouts are."""
    return packed_stride(dim, [0, *range(2, len(dim)), 1])
