"""Memory that is shared by what is not in use at once."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from graphfuse.planning import workspace
from graphfuse.planning.workspace import Block

SIZES = st.one_of(st.sampled_from([0, 1, 255, 256, 257, 4096]), st.integers(0, 10**6))


@st.composite
def blocks(draw):
    ends = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
    return [Block(*draw(ends), draw(SIZES)) for _ in range(draw(st.integers(0, 12)))]


def padded(n):
    return (n + 255) // 256 * 256


@given(blocks(), st.sampled_from([0, 1, 256, 1000]))
def test_blocks_in_use_at_once_never_overlap(blocks, floor):
    offsets, end = workspace.place(blocks, floor)
    assert len(offsets) == len(blocks) and all(at % 256 == 0 and at >= floor for at in offsets)
    ranges = [(at, at + b.nbytes, {*range(b.first, b.last + 1)}) for b, at in zip(blocks, offsets, strict=True)]
    for (low, high, steps), (other_low, other_high, other_steps) in itertools.combinations(ranges, 2):
        empty = low == high or other_low == other_high
        assert not steps & other_steps or empty or high <= other_low or other_high <= low
    assert end == max((high for _, high, _ in ranges), default=0) or end == floor


@given(blocks())
def test_size_is_between_what_is_in_use_at_once_and_the_sum(blocks):
    _, end = workspace.place(blocks)
    at_once = [sum(b.nbytes for b in blocks if b.first <= step <= b.last) for step in range(9)]
    assert max(at_once) <= end <= sum(padded(b.nbytes) for b in blocks)


def test_no_block_no_memory():
    assert workspace.place([]) == ((), 0) and workspace.place([], 300) == ((), 300)


def test_a_small_block_that_lives_on_does_not_stand_in_the_way():
    """In the order of steps the second block would lie behind the first, and the third behind the second."""
    blocks = [Block(0, 1, 1024), Block(1, 2, 256), Block(2, 3, 1536)]
    assert workspace.place(blocks) == ((0, 1536, 0), 1792)


def test_a_chain_takes_turns():
    """Largest first would put the last block behind both before it."""
    blocks = [Block(n, n + 1, 256 * (n + 1)) for n in range(3)]
    assert workspace.place(blocks)[1] == 256 * 5
