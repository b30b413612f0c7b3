"""How the tensors of a call are seen: as so many times the same, so that only their number changes between calls."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphfuse.functional.argument import Argument, Shape, elements, stored
from graphfuse.functional.layout import Layout
from graphfuse.ir import packed_stride


class Kind(enum.Enum):
    """What the extents of a tensor have to do with the number: its leading ones are counted, it has nothing to do with
    them, or it has a size that follows from the number in another way."""

    COUNTED = enum.auto()
    FIXED = enum.auto()
    SIZED = enum.auto()


@dataclass(frozen=True, eq=False)
class Split:
    """leading: extents of the first tensor that are counted. count: their product. kinds: of the tensors of a call, in
    order."""

    arguments: tuple[Argument, ...]
    layouts: Mapping[str, Layout]
    leading: int
    count: int
    kinds: Mapping[str, Kind]

    def at(self, count: int) -> tuple[tuple[str, Layout], ...]:
        """The layouts for another number, with one leading extent. For no rank to lead, `layouts` as they are."""
        if not self.leading:
            return tuple(self.layouts.items())
        sizes = self._sizes(count)
        return tuple((name, self._at(name, count, sizes[name])) for name in self.layouts)

    def tail(self, name: str) -> Shape:
        """The extents that are not counted, torch's."""
        return self.layouts[name].shape[self.leading if self.kinds[name] is Kind.COUNTED else 0 :]

    def row_stride(self, name: str) -> int:
        """Elements, torch's, from one of the counted to the next."""
        found = _joined(self.layouts[name], self.leading)
        assert found is not None
        return found

    def can_grow(self, name: str) -> bool:
        """Whether a tensor with counted extents is seen alike with another first extent and the strides that it has:
        the stride of a first extent of 1 may be any."""
        t = self.layouts[name]
        return t.stride[0] == self.row_stride(name) * math.prod(t.shape[1 : self.leading])

    def extents(self, name: str, count: int) -> tuple[Shape, Shape]:
        """Shape and packed strides, torch's, of a tensor that is sized."""
        shape = stored(self._sizes(count)[name], self.layouts[name].stored)
        return shape, packed_stride(shape)

    def _at(self, name: str, count: int, size: Shape) -> Layout:
        t = self.layouts[name]
        if self.kinds[name] is Kind.FIXED:
            return t
        if self.kinds[name] is Kind.SIZED:
            shape = stored(size, t.stored)
            return replace(t, shape=shape, stride=packed_stride(shape))
        stride = (self.row_stride(name), *t.stride[self.leading :])
        return replace(t, shape=(count, *t.shape[self.leading :]), stride=stride)

    def _sizes(self, count: int) -> dict[str, Shape]:
        """Shapes in elements, with one leading extent."""
        return _sizes(self.arguments, {n: elements(t.shape, t.stored) for n, t in self.layouts.items()}, self, count)


def split(arguments: Sequence[Argument], layouts: Mapping[str, Layout]) -> Split:
    """The split that counts most, of tensors whose shapes fit each other.

    Leading extents are counted as one where one stride serves them all in every tensor; the first extent alone always
    can be.
    """
    used = tuple(a for a in arguments if a.name in layouts)
    shapes = {a.name: elements(layouts[a.name].shape, layouts[a.name].stored) for a in used}
    rank = len(shapes[used[0].name])
    for leading in range(rank - 1, 0, -1):
        kinds = _kinds(used, shapes, leading)
        counted = [name for name, kind in (kinds or {}).items() if kind is Kind.COUNTED]
        if kinds and all(_joined(layouts[name], leading) is not None for name in counted):
            count = math.prod(shapes[used[0].name][:leading])
            return Split(used, layouts, leading, count, kinds)
    return Split(used, layouts, 0, 1, dict.fromkeys(shapes, Kind.FIXED))


_NUMBERS = (1 << 12, 1 << 14)
"""Two numbers that no rounding of a size to whole tiles makes the same."""


def _kinds(used: Sequence[Argument], shapes: Mapping[str, Shape], leading: int) -> dict[str, Kind] | None:
    """None where shapes follow from the leading extents in a way that their product alone does not tell."""
    extents = shapes[used[0].name][:leading]
    candidate = Split(tuple(used), {}, leading, math.prod(extents), {})
    few, many = (_sizes(used, shapes, candidate, n) for n in _NUMBERS)
    same = _sizes(used, shapes, candidate, candidate.count)
    kinds: dict[str, Kind] = {}
    free = {a.name for a in used if a.free}
    for name, shape in shapes.items():
        one, two = few[name], many[name]
        if one == two == shape and name not in free:
            kinds[name] = Kind.FIXED
        elif (one[:1], two[:1]) == ((_NUMBERS[0],), (_NUMBERS[1],)) and (*extents, *one[1:]) == shape:
            kinds[name] = Kind.COUNTED
        elif one != two and same[name] == shape:
            kinds[name] = Kind.SIZED
        else:
            return None
    return kinds


def _sizes(used: Sequence[Argument], shapes: Mapping[str, Shape], split: Split, count: int) -> dict[str, Shape]:
    """Shapes in elements if `count` took the place of the leading extents of all that has them."""
    known, found = dict(shapes), {}
    leading = shapes[used[0].name][: split.leading]
    for a in used:
        shape = shapes[a.name]
        if a.free or a is used[0]:  # its rule asks what it is itself
            counted = shape[: split.leading] == leading
            found[a.name] = (count, *shape[split.leading :]) if counted else shape
        else:
            alternative = [s == shape for s in a.shape(known)].index(True)
            found[a.name] = a.shape(found)[alternative]
    return found


def _joined(t: Layout, leading: int) -> int | None:
    """The stride that serves the leading axes as one, torch's; of one position, that of what follows side by side."""
    axes = [(e, s) for e, s in zip(t.shape[:leading], t.stride, strict=False) if e != 1]
    if not axes:
        return 1 + sum((e - 1) * s for e, s in zip(t.shape[leading:], t.stride[leading:], strict=True))
    for (_, outer), (extent, inner) in zip(axes, axes[1:], strict=False):
        if outer != extent * inner:
            return None
    return axes[-1][1]
