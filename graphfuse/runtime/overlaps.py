"""Which tensors of a call may not share memory, and whether they do."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from graphfuse.runtime.storage import Storage, overlap

_KEPT = 64


@dataclass(frozen=True)
class Conflict:
    """Memory that is written, and other that may have none of it; or, in place and with elements of the same type, all
    of it and nothing else."""

    made: Storage
    other: Storage
    in_place: bool
    same_type: bool = True

    @property
    def near(self) -> tuple[int, int]:
        """Where the two share no byte unless the first begins between these many bytes from the second, both
        excluded."""
        return -self.made.nbytes, self.other.nbytes

    @cached_property
    def clash(self) -> Callable[[int], bool]:
        """Whether they share memory that they may not, the first beginning so many bytes behind the second.

        Views of one tensor, as queries and keys of a packed projection, lie equally far apart in every call: few
        distances are kept.
        """
        return functools.lru_cache(maxsize=_KEPT)(self._clash)

    def _clash(self, apart: int) -> bool:
        low, high = self.near
        if not low < apart < high or not overlap(self.made, apart - low, self.other, -low):
            return False
        same = self.same_type and self.made.layout == self.other.layout
        return not (self.in_place and apart == 0 and same)
