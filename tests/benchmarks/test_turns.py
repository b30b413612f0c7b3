"""Samples in turns, and their figures."""

import functools

import pytest

from graphfuse.benchmarks import turns


def taken(least: int, seconds: float = 0.0):
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = turns.take({name: functools.partial(sample, name) for name in "abc"}, least, seconds)
    return order, found


def test_each_round_begins_with_another_after_one_that_does_not_count():
    order, found = taken(4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [4.0, 9.0, 11.0, 13.0], "b": [5.0, 7.0, 12.0, 14.0], "c": [6.0, 8.0, 10.0, 15.0]}


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
