"""What the tests of operators share."""

import pytest
import torch
from torch._dynamo.utils import counters

from graphfuse.contract.engine import KernelEngine
from graphfuse.functional import problem
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.compile_backend.compiled_graphs import clear_reports


@pytest.fixture
def nothing_compiled():
    """Nor is anything reported."""
    torch.compiler.reset()
    clear_reports()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def attention_calls(monkeypatch):
    """The arguments of attention, by name, in all graphs that are handed on."""
    found, replace = [], compiled_graphs.replace_in

    def replaced(module, *how):
        entries = replace(module, *how)
        for node in module.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
                found.append(dict(zip(names, node.args, strict=False)) | node.kwargs)
        return entries

    monkeypatch.setattr(compiled_graphs, "replace_in", replaced)
    return found


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
