"""What the tests of operators share."""

import pytest
import torch
from torch._dynamo.utils import counters

from graphfuse.engine import KernelEngine
from graphfuse.functional import problem
from graphfuse.torch.fusion.compiled import forget


@pytest.fixture
def nothing_compiled():
    """Nor is anything reported."""
    torch.compiler.reset()
    forget()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def kernels(monkeypatch, plan_on):
    """Of each graph that is planned from now on, for the emulator, by its name: whether each part is a kernel."""
    plan, found = problem.plan.__wrapped__, {}

    def planned(name, *others):
        made = plan(name, *others)
        found[name] = [isinstance(part.engine, KernelEngine) for part in made.plan.parts]
        return made

    plan_on("emulator")
    monkeypatch.setattr(problem, "plan", planned)
    return found
