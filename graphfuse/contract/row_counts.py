"""Classes of row counts that share a plan: it is made for the largest count of the class, and started for fewer rows.

The largest count of a class is at most an eighth above the smallest, so that a plan's knobs are never far from those
for the call's own count. The number of classes grows with the logarithm of the count.
"""

from collections.abc import Callable, Sequence

from graphfuse.ops.layouts import merge

ROW_CLASS = "(count if count < 16 else -(-count >> (s := count.bit_length() - 4)) << s)"
"""The class of a count, as a Python expression: its largest count, which has four significant bits at most."""

row_class: Callable[[int], int] = eval(f"lambda count: {ROW_CLASS}")


def joined(shape: Sequence[int], stride: Sequence[int], leading: int) -> int | None:
    """The stride of the leading axes merged to one row axis; None if no single stride addresses them.

    If all leading extents are 1, the stride is that of slices without gaps."""
    axes = merge(zip(shape[:leading], stride, strict=False))
    if not axes:
        return 1 + sum((e - 1) * s for e, s in zip(shape[leading:], stride[leading:], strict=True))
    return axes[0][1] if len(axes) == 1 else None
