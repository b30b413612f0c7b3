"""Grouping of things that are connected."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def connected_components(things: Iterable[tuple[T, Sequence[Hashable]]]) -> list[list[T]]:
    """Things in groups that are connected by common keys, directly or through other things. things: each with its keys.
    Groups and the things in them keep their order."""
    above: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while (there := above.setdefault(key, key)) != key:
            above[key] = key = above[there]
        return key

    given, found = [*things], dict[Hashable, list[T]]()
    for _, (first, *others) in given:
        for key in others:
            above[root(key)] = root(first)
    for thing, (first, *_) in given:
        found.setdefault(root(first), []).append(thing)
    return [*found.values()]
