"""Captures for timing, without a GPU."""

import contextlib
from unittest import mock

import pytest
import torch

from graphfuse.runtime import timing

pytestmark = pytest.mark.torch


def test_a_capture_leaves_other_threads_alone(monkeypatch):
    modes = []

    def graph(made, stream, capture_error_mode="global"):
        modes.append(capture_error_mode)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch, "cuda", mock.MagicMock(graph=graph))
    monkeypatch.setattr(timing, "_replay", lambda graph, replays: 1.0)
    calls = []
    assert timing.capture([lambda: calls.append(1)]).calls == timing.LEAST_CALLS
    assert modes == ["thread_local"] and len(calls) == 1 + timing.LEAST_CALLS
