"""Random functions of torch under regions: bit for bit what eager mode makes where nothing is reduced, and within a
bound of float64 elsewhere, forward and backward, for fixed extents and for those that vary."""

import pytest
import torch

import graphfuse.torch  # noqa: F401  registers the backend
from graphfuse.torch.analysis import cost
from graphfuse.torch.regions import selection
from support.compared import differences
from support.random_functions import random_function

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

SEEDS = range(300)
taken = []
"""Numbers of steps of regions that were taken, by the last functions."""


def regions_alone(module, inputs):
    """A backend that replaces regions, and nothing before them, and runs what that makes."""
    verdicts, _ = selection.replace_in(module, False)
    taken.extend(len(region.program.steps) for region, why in verdicts if not why)
    return module.forward


WAYS = {
    "regions": {"backend": regions_alone},
    "all": {"backend": "graphfuse", "options": {"then": "eager"}},
    "aot": {"backend": "graphfuse", "options": {"then": "aot_eager"}},
}


def compared(seed, way, dynamic, gradients):
    """Differences of a function, compiled in a way."""
    torch.compiler.reset()
    found = random_function(seed)
    extents = [found.extents]
    if dynamic and 1 not in found.extents and found.is_of_rows:
        extents.append((found.extents[0] + 1, found.extents[1] + 3))
    compiled = torch.compile(found.function(), dynamic=dynamic, **WAYS[way])
    said = differences(found, compiled, gradients, extents, strides=way != "aot")
    return [f"{line}\n{found.source}" for line in said]


@pytest.mark.some(40, 100)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_function(seed):
    way = "all" if seed % 10 == 8 else "aot" if seed % 10 == 9 else "regions"
    assert not compared(seed, way, dynamic=seed % 4 > 1, gradients=seed % 2 == 1)


@pytest.mark.thorough
@pytest.mark.emulate
@pytest.mark.parametrize("seed", SEEDS)
def test_a_function_by_kernels(seed, plan_on):
    """Forward and backward, for fixed extents and for those that vary."""
    plan_on("emulator")
    for dynamic in (False, True):
        assert not compared(seed, "regions", dynamic=dynamic, gradients=True)


def test_regions_are_taken(monkeypatch):
    """Most functions have one, of several steps."""
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    taken.clear()
    for seed in SEEDS[:15]:
        compared(seed, "regions", dynamic=False, gradients=False)
    assert len(taken) > 8 and max(taken) > 8


@pytest.mark.further
@pytest.mark.parametrize("seed", SEEDS[:20])
def test_by_bytes(seed, monkeypatch):
    """Those that are as good as inductor."""
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    function = random_function(seed)

    def by_bytes(module, inputs):
        selection.replace_in(module, True)
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(function.function(), backend=by_bytes, dynamic=False)
    assert not differences(function, compiled, True, [function.extents])
