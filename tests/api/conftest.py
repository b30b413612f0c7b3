"""Counting what is planned and compiled."""

import pytest

from graphfuse.emulator import kernel
from graphfuse.planning.planner import Planner


@pytest.fixture
def work(monkeypatch):
    """What is planned and compiled from now on: work() tells how many graphs, and how many kernels."""
    planned, create = [], Planner.create
    monkeypatch.setattr(Planner, "create", lambda self, modes: planned.append(self.graph) or create(self, modes))
    compiled = kernel.load.cache_info().misses
    return lambda: (len(planned), kernel.load.cache_info().misses - compiled)
