"""Division of the tensors of a call into a count of equal slices, so that calls with other counts can share a plan.

A slice is a row, or everything at one index of the counted leading axes. Plans and fast paths depend on slices, not on
their count.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from graphfuse.base.errors import VariantPackError
from graphfuse.contract.row_counts import joined
from graphfuse.functional.layout import Layout
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, elements, stored
from graphfuse.op_graph.ir import packed_stride

T = TypeVar("T")


class CountKind(enum.Enum):
    """Relation of the count to a tensor's extents. COUNTED: the leading extents are those of the first tensor, and
    their product is the count. FIXED: none. SIZED: the extents follow from the count by another rule, as for block
    scales in whole tiles."""

    COUNTED = enum.auto()
    FIXED = enum.auto()
    SIZED = enum.auto()


@dataclass(frozen=True, eq=False)
class CountSplit:
    """The tensors of a call as `count` slices. arguments, layouts: of the tensors in use, in order. leading: number of
    counted extents of the first tensor. count: their product; 1 for no extents. kinds: by tensor."""

    arguments: tuple[TensorParameter, ...]
    layouts: Mapping[str, Layout]
    leading: int
    count: int
    kinds: Mapping[str, CountKind]

    def at(self, count: int) -> tuple[tuple[str, Layout], ...]:
        """The layouts for another count, with the counted extents joined to one; `layouts` unchanged if none is
        counted."""
        if not self.leading:
            return tuple(self.layouts.items())
        sizes = self._sizes(count)
        return tuple((name, self._at(name, count, sizes[name])) for name in self.layouts)

    def planned(self, plan: Callable[[tuple[tuple[str, Layout], ...]], T]) -> T:
        """Result of `plan` for the layouts of the split's count. Errors describe the call's own layouts."""
        try:
            return plan(self.at(self.count))
        except VariantPackError:
            return plan(tuple(self.layouts.items()))

    def tail(self, name: str) -> Shape:
        """The extents that are not counted, in torch's units."""
        return self.layouts[name].shape[self.leading if self.kinds[name] is CountKind.COUNTED else 0 :]

    def row_stride(self, name: str) -> int:
        """Stride from one slice to the next, in torch's units."""
        t = self.layouts[name]
        found = joined(t.shape, t.stride, self.leading)
        assert found is not None
        return found

    def can_grow(self, name: str) -> bool:
        """True if another first extent, with the same strides, gives the same view of slices; the stride of a first
        extent of 1 is arbitrary."""
        t = self.layouts[name]
        return t.stride[0] == self.row_stride(name) * math.prod(t.shape[1 : self.leading])

    def extents(self, name: str, count: int) -> tuple[Shape, Shape]:
        """Shape and packed strides, in torch's units, of a SIZED tensor."""
        shape = stored(self._sizes(count)[name], self.layouts[name].stored)
        return shape, packed_stride(shape)

    def _at(self, name: str, count: int, size: Shape) -> Layout:
        t = self.layouts[name]
        if self.kinds[name] is CountKind.FIXED:
            return t
        if self.kinds[name] is CountKind.SIZED:
            shape = stored(size, t.stored)
            return replace(t, shape=shape, stride=packed_stride(shape))
        stride = (self.row_stride(name), *t.stride[self.leading :])
        return replace(t, shape=(count, *t.shape[self.leading :]), stride=stride)

    def _sizes(self, count: int) -> dict[str, Shape]:
        """Shapes in elements for a count, with the counted extents joined to one."""
        return _sizes(self.arguments, {n: elements(t.shape, t.stored) for n, t in self.layouts.items()}, self, count)


def split(arguments: Sequence[TensorParameter], layouts: Mapping[str, Layout]) -> CountSplit:
    """The split that counts as many leading extents as possible, for tensors whose shapes fit each other. Leading
    extents can be counted together if one stride joins them in every counted tensor, and if shapes depend only on their
    product."""
    used = tuple(a for a in arguments if a.name in layouts)
    shapes = {a.name: elements(layouts[a.name].shape, layouts[a.name].stored) for a in used}
    rank = len(shapes[used[0].name])
    for leading in range(rank - used[0].row_axes, 0, -1):
        kinds = _kinds(used, shapes, leading)
        counted = [name for name, kind in (kinds or {}).items() if kind is CountKind.COUNTED]
        if kinds and all(joined(layouts[n].shape, layouts[n].stride, leading) is not None for n in counted):
            count = math.prod(shapes[used[0].name][:leading])
            return CountSplit(used, layouts, leading, count, kinds)
    return CountSplit(used, layouts, 0, 1, dict.fromkeys(shapes, CountKind.FIXED))


_NUMBERS = (1 << 12, 1 << 14)
"""Two counts to evaluate shape rules with. They remain different if sizes are rounded up to whole tiles."""


def _kinds(used: Sequence[TensorParameter], shapes: Mapping[str, Shape], leading: int) -> dict[str, CountKind] | None:
    """The kind of each tensor if this many leading extents are counted; None if shapes depend on more than their
    product."""
    extents = shapes[used[0].name][:leading]
    candidate = CountSplit(tuple(used), {}, leading, math.prod(extents), {})
    few, many = (_sizes(used, shapes, candidate, n) for n in _NUMBERS)
    same = _sizes(used, shapes, candidate, candidate.count)
    kinds: dict[str, CountKind] = {}
    free = {a.name for a in used if a.free and not a.table}
    for name, shape in shapes.items():
        one, two = few[name], many[name]
        if one == two == shape and name not in free:
            kinds[name] = CountKind.FIXED
        elif (one[:1], two[:1]) == ((_NUMBERS[0],), (_NUMBERS[1],)) and (*extents, *one[1:]) == shape:
            kinds[name] = CountKind.COUNTED
        elif one != two and same[name] == shape:
            kinds[name] = CountKind.SIZED
        else:
            return None
    return kinds


def _sizes(
    used: Sequence[TensorParameter], shapes: Mapping[str, Shape], split: CountSplit, count: int
) -> dict[str, Shape]:
    """Shapes in elements with `count` in place of the leading extents, in every tensor that has these."""
    known, found = dict(shapes), {}
    leading = shapes[used[0].name][: split.leading]
    for a in used:
        shape = shapes[a.name]
        if a.free or a is used[0]:  # its rule, if it has one, may read its own shape
            counted = not a.table and shape[: split.leading] == leading
            found[a.name] = (count, *shape[split.leading :]) if counted else shape
        else:
            alternative = [s == shape for s in a.shape(known)].index(True)
            found[a.name] = a.shape(found)[alternative]
    return found
