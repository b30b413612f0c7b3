"""Which engines take the graphs: planned, and some run, on the emulator, which asks the engines as a GPU does."""

import pytest
import torch

from graphfuse import create_handle, engines, heur_mode
from graphfuse.functional import problem
from support.training_calls import ONE_KERNEL, OPERATORS, WITHOUT_WEIGHT, check, gradients, grads, tensors

TYPES = [torch.bfloat16, torch.float16, torch.float32]
WEIGHTS = [None, torch.float32, False]


@pytest.fixture
def graphs(monkeypatch):
    """The graphs of calls from now on, by name, drawn for the emulator too and planned there."""
    found, plan = {}, problem.plan.__wrapped__

    def both(name, variant, layouts, device, generation):
        graph = problem.draw(name, variant, dict(layouts), create_handle("emulator")).graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
        found[name] = graph.get_engine_and_knobs_at_index(0)[0]
        return plan(name, variant, layouts, device, generation)

    monkeypatch.setattr(problem, "plan", both)
    return found


BACKWARD = next((e.name for e in engines.ALL if e.name == "rmsnorm_backward"), "reference")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "weight"), [(n, w) for n in ONE_KERNEL for w in WEIGHTS if w is not False or n in WITHOUT_WEIGHT]
)
def test_one_kernel_each_way(name, weight, dtype, graphs):
    given = tensors(name, (21 + WEIGHTS.index(weight), 2, 136), dtype, weight)  # a problem that no other test has
    made = OPERATORS[name].run(given)
    gradients(made, given, grads(made))
    with torch.no_grad():
        OPERATORS[name].run(given)
    assert graphs == {name: "rmsnorm", f"{name}_training": "rmsnorm", f"{name}_backward": BACKWARD}


@pytest.mark.parametrize("shape", [(31, 1), (31, 3420), (1, 88), (88,), (2, 3, 5, 7, 88), (0, 88)], ids=str)
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel_for_any_shape(name, shape, graphs):
    given = tensors(name, shape)
    made = OPERATORS[name].run(given)
    gradients(made, given, grads(made))
    assert graphs == {f"{name}_training": "rmsnorm", f"{name}_backward": BACKWARD}


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ONE_KERNEL])
def test_a_layer_norm_is_one_kernel_forward(name, graphs):
    given = tensors(name, (23, 2, 136))  # a problem that no other test has
    OPERATORS[name].run(given)
    with torch.no_grad():
        OPERATORS[name].run(given)
    assert graphs == {name: "rmsnorm", f"{name}_training": "rmsnorm"}


@pytest.mark.emulate
@pytest.mark.parametrize("hidden", [72, 111])
@pytest.mark.parametrize("dtype", TYPES[::2], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_on_the_emulator(name, dtype, hidden, monkeypatch):
    """Results and gradients that the generated kernels make."""
    used = []
    monkeypatch.setattr(problem, "create_handle", lambda device: used.append(device) or create_handle("emulator"))
    check(name, tensors(name, (29, hidden), dtype))  # no other test has so many rows, and what is planned is kept
    assert used == ["cpu"] * 2
