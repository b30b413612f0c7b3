"""Threads that call very often, and what is left of calls."""

import pytest

from support.many_calls import Calls, by_threads, growth

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def calls():
    return Calls.of("cuda", 1024)


def test_sixteen_threads(calls):
    """10,000 calls each, of functions, graphs and modules that they share, with row counts and addresses at random."""
    by_threads(calls, threads=16, each=10_000)


def test_a_hundred_thousand_calls_leave_memory_as_it_was(calls):
    host, device = growth(calls, warm=10_000, count=100_000)
    assert host < 4 << 20 and device == 0
