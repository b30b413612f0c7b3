"""Threads that call often, and what is left of calls, on the emulator: fewer than ``tests/gpu/test_many_calls.py``."""

import mmap

import pytest

from graphfuse.emulator.kernel import EmulatedLauncher
from support.many_calls import Calls, by_threads, growth

pytestmark = pytest.mark.emulate


@pytest.fixture
def calls(plan_on):
    plan_on("emulator")
    return Calls.of("cpu", 120, rows=200)


def test_threads(calls):
    by_threads(calls, threads=16, each=40, most=20)


def test_wrong_bits_are_found(calls, monkeypatch):
    """Once in a while a thread's arguments are another's."""
    launch, number = EmulatedLauncher.launch, iter(range(1_000_000))

    def sometimes(self, config, function, memory, extra):
        return 0 if next(number) % 50 == 49 else launch(self, config, function, memory, extra)

    monkeypatch.setattr(EmulatedLauncher, "launch", sometimes)
    with pytest.raises(AssertionError):
        by_threads(Calls.of("cpu", 136, rows=200), threads=4, each=40, most=20)


def test_calls_leave_memory_as_it_was(calls):
    host, _ = growth(calls, warm=600, count=600, most=20)
    assert host < 4 << 20


def test_what_is_kept_is_found(calls, monkeypatch):
    kept, function = [], Calls.function

    def leaking(self, x):
        fresh = mmap.mmap(-1, 1 << 20)  # memory that nobody had before
        fresh.write(b"x" * (1 << 20))
        kept.append(fresh)
        return function(self, x)

    monkeypatch.setattr(Calls, "function", leaking)
    host, _ = growth(calls, warm=200, count=400, most=20)
    assert host > 4 << 20
