"""Things that others lead to."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(first: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Things, and those that follow from them, each once, the nearest first. following: of one that was looked at."""
    waiting = [*dict.fromkeys(first)]
    seen = {*waiting}
    for thing in waiting:  # to which those are added that follow
        yield thing
        new = [other for other in dict.fromkeys(following(thing)) if other not in seen]
        seen.update(new)
        waiting += new
