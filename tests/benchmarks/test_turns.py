"""Samples in turns, and their figures."""

import functools
import itertools
from collections import Counter

import pytest

from graphfuse.benchmarks.programs import turns


def taken(least: int, seconds: float = 0.0):
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = turns.take({name: functools.partial(sample, name) for name in "abc"}, least, seconds)
    return order, found


def test_each_round_has_its_order_after_one_that_does_not_count():
    order, found = taken(60)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 61 and order == taken(60)[0]
    orders = Counter(rounds[1:])
    assert {*orders} == {"".join(p) for p in itertools.permutations("abc")} and max(orders.values()) < 20
    for name in "abc":
        assert found[name] == [3.0 * n + r.index(name) + 1 for n, r in enumerate(rounds) if n]


def test_rounds_go_on_until_the_time_is_over():
    order, found = taken(2, 0.02)
    assert len(order) > 3 * 10 and {len(times) for times in found.values()} == {len(order) // 3 - 1}


def test_nobody_takes_no_samples():
    assert turns.take({}, 3) == {}


def test_figures():
    samples = [5.0, 1.0, 2.0, 3.0, 40.0]
    assert turns.extremes(samples) == {"median": 3.0, "low": 1.0, "high": 40.0}
    assert turns.quartiles(samples) == {"median": 3.0, "low": 2.0, "high": 5.0}


def test_a_ratio_is_of_each_round():
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert turns.ratio([1.5 * t for t in drifting], drifting) == pytest.approx(1.5)
    # Medians of both would make 4 / 2.
    assert turns.ratio([1.0, 4.0, 9.0], [1.0, 2.0, 9.0]) == 1.0
