"""Whether two tensors share memory that they may not, by how far apart they begin."""

import itertools

import pytest

from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import Storage


def touched(stored: Storage, at: int) -> set[int]:
    """The bytes of a tensor, one by one."""
    found = set()
    for place in itertools.product(*map(range, stored.dim)):
        first = at + stored.itemsize * sum(p * s for p, s in zip(place, stored.stride, strict=True))
        found |= set(range(first, first + stored.itemsize))
    return found


STORAGES = {
    "rows": Storage((3, 4), (4, 1), 2),
    "rows apart": Storage((3, 4), (12, 1), 2),
    "rows a little apart": Storage((3, 4), (7, 1), 2),
    "columns apart": Storage((3, 4), (8, 2), 2),
    "rows in another order": Storage((4, 3), (1, 4), 2),
    "one row": Storage((1, 4), (100, 1), 2),
    "again and again": Storage((3, 4), (0, 1), 2),
    "other type": Storage((3, 4), (4, 1), 4),
    "nothing": Storage((0, 4), (4, 1), 2),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("made", "other"), [*itertools.product(STORAGES, STORAGES)])
def test_every_distance(made, other, in_place):
    """What is said of a distance is what comparing byte by byte says."""
    one, two = STORAGES[made], STORAGES[other]
    conflict = Conflict(one, two, in_place, one.itemsize == two.itemsize)
    low, high = conflict.near
    theirs = touched(two, 1000)
    for apart in range(-80, 81):
        shared = bool(touched(one, 1000 + apart) & theirs)
        assert not shared or low < apart < high
        exactly = apart == 0 and one.layout == two.layout and one.itemsize == two.itemsize
        assert conflict.clash(apart) == (shared and not (in_place and exactly)), apart


def test_types_of_one_size_are_not_the_same():
    stored = STORAGES["rows"]
    assert Conflict(stored, stored, in_place=True, same_type=False).clash(0)
    assert not Conflict(stored, stored, in_place=True).clash(0)


def test_few_distances_are_kept():
    conflict = Conflict(*[STORAGES["rows apart"]] * 2, in_place=False)
    for apart in range(-500, 500):
        conflict.clash(apart)
    info = conflict.clash.cache_info()
    assert info.currsize == info.maxsize <= 64
