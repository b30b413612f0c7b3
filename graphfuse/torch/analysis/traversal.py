"""Search for all things that follow from others, such as the nodes that a node depends on."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reachable(first: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Things and all that follow from them, each once, the nearest first. following: the direct followers of a
    thing."""
    waiting = [*dict.fromkeys(first)]
    seen = {*waiting}
    for thing in waiting:  # grows in the loop
        yield thing
        new = [other for other in dict.fromkeys(following(thing)) if other not in seen]
        seen.update(new)
        waiting += new
