"""How tensors are seen as rows x columns."""

import math
from dataclasses import dataclass

from graphfuse.engine import No
from graphfuse.enums import tensor_reordering
from graphfuse.ir import Tensor, TensorId
from graphfuse.patterns.axes import Axes
from graphfuse.rowwise import View


@dataclass(frozen=True)
class Layout:
    """How tensors are seen as rows x columns. groups: the axes that each row axis joins."""

    rows: Axes
    extents: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Axes, tensors: list[TensorId]) -> "Layout":
        """Row axes joined wherever one stride serves both in every tensor."""
        if 0 in rows.dim:
            return cls(rows, (0,), ((),))
        strides = [_row_strides(rows.tensor(t)) for t in tensors]
        groups: list[list[int]] = []
        for axis in rows.axes:
            if rows.dim[axis] == 1:
                continue
            last = groups[-1][-1] if groups else None
            if last is not None and all(s[last] == rows.dim[axis] * s[axis] for s in strides):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if not groups:
            return cls(rows, (1,), ((),))
        extents = tuple(math.prod(rows.dim[axis] for axis in group) for group in groups)
        return cls(rows, extents, tuple(map(tuple, groups)))

    def view(self, tensor: Tensor, rows: bool, columns: bool) -> View | No:
        packed = merge((tensor.dim[a], tensor.stride[a]) for a in self.rows.columns)
        if len(packed) > 1:
            axes = list(self.rows.columns)
            return No(f"{tensor}: the normalized axes {axes} are not one run of elements with one stride")
        width, column_stride = packed[0] if packed else (1, 1)
        swizzled = tensor.reordering is tensor_reordering.F8_128x4
        if swizzled and len(self.rows.columns) > 1:
            axes = list(self.rows.columns)
            return No(
                f"{tensor}: accepted where one axis is normalized, as its rows are all axes but the last; got {axes}"
            )
        strides = _row_strides(tensor)
        if self.groups == ((),):
            # One row keeps the stride it declares, so that it is planned like any number of them.
            declared = [tensor.stride[axis] for axis in self.rows.axes]
            row_strides = (declared[0] if rows and declared and declared[0] >= width else 0,)
        else:
            row_strides = tuple(strides[group[-1]] for group in self.groups)
        return View(
            tensor.id,
            tensor.name,
            tensor.dtype,
            row_strides,
            column_stride,
            tensor.alignment,
            rows,
            columns,
            swizzled,
        )


def _row_strides(tensor: Tensor) -> tuple[int, ...]:
    """By axis, 0 where the tensor does not vary."""
    return tuple(0 if extent == 1 else stride for extent, stride in zip(tensor.dim, tensor.stride, strict=True))


def merge(axes) -> tuple[tuple[int, int], ...]:
    """(extent, stride) pairs, outermost first, with neighbours joined where one stride serves
    both and extents of 1 left out."""
    merged: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    return tuple(merged)
