"""Counts of rows that share a plan: one is made for the largest count of a class, and started for fewer.

The largest count of a class is at most an eighth above the smallest, so that a plan's knobs are never far from those
for the call's own count. The number of classes grows with the logarithm of the count.
"""

from collections.abc import Callable, Sequence

ROW_CLASS = "(count if count < 16 else -(-count >> (s := count.bit_length() - 4)) << s)"
"""The class of a count, as Python: the count rounded up to four significant bits, which is the largest of its class."""

row_class: Callable[[int], int] = eval(f"lambda count: {ROW_CLASS}")


def joined(shape: Sequence[int], stride: Sequence[int], leading: int) -> int | None:
    """The stride of the leading axes joined to one, along which rows are counted; None if no single stride serves them.
    Where they have one position, slices are taken to lie side by side."""
    axes = [(e, s) for e, s in zip(shape[:leading], stride, strict=False) if e != 1]
    if not axes:
        return 1 + sum((e - 1) * s for e, s in zip(shape[leading:], stride[leading:], strict=True))
    for (_, outer), (extent, inner) in zip(axes, axes[1:], strict=False):
        if outer != extent * inner:
            return None
    return axes[-1][1]
