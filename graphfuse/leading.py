"""The leading axes of a tensor as one axis, along which rows are counted."""

from collections.abc import Sequence


def joined(shape: Sequence[int], stride: Sequence[int], leading: int) -> int | None:
    """The stride of the leading axes joined to one; None if no single stride serves them. Where they have one position,
    slices are taken to lie side by side."""
    axes = [(e, s) for e, s in zip(shape[:leading], stride, strict=False) if e != 1]
    if not axes:
        return 1 + sum((e - 1) * s for e, s in zip(shape[leading:], stride[leading:], strict=True))
    for (_, outer), (extent, inner) in zip(axes, axes[1:], strict=False):
        if outer != extent * inner:
            return None
    return axes[-1][1]
