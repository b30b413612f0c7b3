"""Which cases of a test stand for all of them."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence


def covering(cases: Sequence[frozenset[Hashable]], some: Iterable[int] = ()) -> set[int]:
    """Indices of cases, `some` among them, that have every feature that any of them has: few of them, if not always the
    fewest, as the case with the most features that are missing comes next."""
    chosen = set(some)
    missing = set().union(*cases) - set().union(*(cases[n] for n in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda n: len(cases[n] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def pairs(features: frozenset[Hashable]) -> frozenset[Hashable]:
    """The pairs of different features, or the features themselves where they are fewer than two."""
    return frozenset(frozenset(pair) for pair in itertools.combinations(features, 2)) or features


def values(arguments: Mapping[str, object]) -> frozenset[Hashable]:
    """The features that a case has by its arguments: each of them, or each field of one that is a record."""
    found = set()
    for name, value in arguments.items():
        if dataclasses.is_dataclass(value):
            found |= {(name, field.name, repr(getattr(value, field.name))) for field in dataclasses.fields(value)}
        else:
            found.add((name, repr(value)))
    return frozenset(found)


def spread(count: int, wanted: int) -> set[int]:
    """The indices of so many of `count` cases, from the first on, as far apart as they can be."""
    return {number * count // min(count, wanted) for number in range(min(count, wanted))}
