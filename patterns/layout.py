"""`RowLayout`, which views tensors as rows x columns."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from graphfuse.base.enums import tensor_reordering
from graphfuse.contract.engine import No
from graphfuse.op_graph.ir import FrozenTensor, TensorId
from graphfuse.ops.layouts import merge
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.sections import Section
from graphfuse.rows.program import Extent
from graphfuse.rows.views import View


@dataclass(frozen=True)
class RowLayout:
    """Row axes of a program. rows: axes of the match. extents: of the row axes. groups: axes merged into each row axis.

    Strides decide which axes are merged, not extents, so that a graph of one row, token or head has the same row axes
    as one of many. An axis of extent 1 keeps the strides that its tensors declare.
    """

    rows: Axes
    extents: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Axes, varying: Sequence[FrozenTensor], alone: Collection[int] = ()) -> "RowLayout":
        """The layout with adjacent axes merged if one stride serves both in every tensor. varying: tensors that vary
        over rows. alone: axes that are not merged."""
        if any(rows.dim[axis] == 0 for axis in rows.columns):
            return cls(rows, (0,), ((),))
        groups: list[list[int]] = []
        for axis in rows.axes:
            if rows.dim[axis] == 1 and axis not in alone and not all(_is_row_stride(t, axis, rows) for t in varying):
                continue
            extent, last = max(rows.dim[axis], 1), groups[-1][-1] if groups else None
            last = None if {axis, last} & {*alone} else last
            if last is not None and all(_stride(t, last, rows) == extent * _stride(t, axis, rows) for t in varying):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if not groups:
            return cls(rows, (math.prod(rows.dim[axis] for axis in rows.axes),), ((),))
        extents = tuple(math.prod(rows.dim[axis] for axis in group) for group in groups)
        return cls(rows, extents, tuple(map(tuple, groups)))

    def part(self, section: Section, extent: Extent, numbers: Sequence[TensorId]) -> View | No:
        """The view of a section. numbers: tensors of the program's indices."""
        found = self.view(section.tensor, extent)
        if isinstance(found, No):
            return found
        place = section.place.in_program({axis: k for k, group in enumerate(self.groups) for axis in group}, numbers)
        return replace(found, offset=section.offset, unit=section.unit, place=place)

    def view(self, tensor: FrozenTensor, extent: Extent) -> View | No:
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
        if swizzled and any(tensor.dim[axis] != self.rows.dim[axis] for axis in self.rows.axes):
            rows = [self.rows.dim[axis] for axis in self.rows.axes]
            return No(f"{tensor}: accepted in tiles that all rows share, {rows} of them; these are of each matrix")
        row_strides = tuple(
            _stride(tensor, group[-1], self.rows) if extent.rows and group else 0 for group in self.groups
        )
        known = (tensor.id, tensor.name, tensor.dtype, row_strides, column_stride, tensor.alignment)
        return View(*known, extent.rows, extent.columns, swizzled)


def _stride(tensor: FrozenTensor, axis: int, rows: Axes) -> int:
    """Stride between rows along an axis; 0 if the tensor does not vary along it."""
    return tensor.stride[axis] if tensor.dim[axis] == rows.dim[axis] else 0


def _is_row_stride(tensor: FrozenTensor, axis: int, rows: Axes) -> bool:
    """True if the stride of an axis of extent 1 is meaningful: 0, or longer than a row. A shorter one is arbitrary."""
    return not tensor.stride[axis] or tensor.stride[axis] > sum(
        (tensor.dim[a] - 1) * tensor.stride[a] for a in rows.columns
    )
