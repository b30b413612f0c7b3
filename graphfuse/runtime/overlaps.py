"""Checks whether two tensors of a call share memory that they may not, given the distance of their addresses."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from graphfuse.base.errors import VariantPackError
from graphfuse.runtime.storage import Storage, overlap

_KEPT = 64


@dataclass(frozen=True)
class Conflict:
    """The layouts of a tensor that is written, `made`, and of another tensor that may not share memory with it.

    in_place: whether the two may be exactly the same memory, with the same address, layout and data type. same_type:
    whether both have the same data type.
    """

    made: Storage
    other: Storage
    in_place: bool
    same_type: bool = True

    @property
    def near(self) -> tuple[int, int]:
        """(low, high): the two can share a byte only if low < apart < high.

        apart: the address of `made` minus that of `other`, in bytes."""
        return -self.made.nbytes, self.other.nbytes

    @cached_property
    def clash(self) -> Callable[[int], bool]:
        """Function that returns True if the two share memory that they may not, given `apart` (``near``).

        Views of one tensor, such as queries and keys of a packed projection, have the same distance in every call, so
        the answers for a few distances are cached.
        """
        return functools.lru_cache(maxsize=_KEPT)(self._clash)

    def _clash(self, apart: int) -> bool:
        low, high = self.near
        if not low < apart < high or not overlap(self.made, apart - low, self.other, -low):
            return False
        same = self.same_type and self.made.layout == self.other.layout
        return not (self.in_place and apart == 0 and same)

    def refused(self, made: object, other: object) -> VariantPackError:
        """The error if the two clash. made, other: their names."""
        accepted = "memory of its own"
        if self.in_place:
            accepted += ", or exactly that tensor's with the same data type, shape and stride"
        return VariantPackError(f"output {made} overlaps {other}; accepted: {accepted}")
