"""Which engines take the graphs: planned, and some run, on the emulator, which asks the engines as a GPU does."""

import warnings

import pytest
import torch

import graphfuse.torch
from graphfuse import ReferenceEngineWarning, create_handle, heur_mode
from graphfuse.functional import problem
from support.training_calls import OPERATORS, WITHOUT_WEIGHT, check, gradients, grads, tensors

TYPES = [torch.bfloat16, torch.float16, torch.float32]
WEIGHTS = [None, torch.float32, False]


@pytest.fixture
def graphs(monkeypatch):
    """The graphs of calls from now on, by name, drawn for the emulator too and planned there."""
    found, plan = {}, problem.plan.__wrapped__

    def both(name, variant, layouts, device, generation):
        graph = problem.build_graph(name, variant, dict(layouts), create_handle("emulator")).graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
        found[name] = graph.get_engine_and_knobs_at_index(0)[0]
        return plan(name, variant, layouts, device, generation)

    monkeypatch.setattr(problem, "plan", both)
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "weight"), [(n, w) for n in OPERATORS for w in WEIGHTS if w is not False or n in WITHOUT_WEIGHT]
)
def test_one_kernel_each_way(name, weight, dtype, graphs):
    given = tensors(name, (21 + WEIGHTS.index(weight), 2, 136), dtype, weight)  # a problem that no other test has
    made = OPERATORS[name].run(given)
    gradients(made, given, grads(made))
    with torch.no_grad():
        OPERATORS[name].run(given)
    assert graphs == {name: "rows", f"{name}_training": "rows", f"{name}_backward": "rows"}


@pytest.mark.parametrize("shape", [(31, 1), (31, 3420), (1, 88), (88,), (2, 3, 5, 7, 88), (0, 88)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_one_kernel_for_any_shape(name, shape, graphs):
    given = tensors(name, shape)
    made = OPERATORS[name].run(given)
    gradients(made, given, grads(made))
    assert graphs == {f"{name}_training": "rows", f"{name}_backward": "rows"}


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


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["layer norm with bias", "rms norm with bias", "adaptive"])
def test_a_sample_alone_has_the_bits_that_it_has_in_a_batch(name, plan_on):
    """Its sums over samples are none, so that not all of its backward is a reduction's: what is, a kernel computes."""
    plan_on("emulator")
    torch.manual_seed(0)
    x, dy, weight, bias = (torch.randn(shape) for shape in ((3, 4, 32), (3, 4, 32), (4, 32), (4, 32)))
    function = {
        "layer norm with bias": lambda x: graphfuse.torch.layer_norm(x, weight, bias, 1e-6),
        "rms norm with bias": lambda x: graphfuse.torch.rms_norm(x, weight, 1e-6, bias),
        "adaptive": lambda x: graphfuse.torch.ada_layer_norm(x, scale, shift),
    }[name]
    scale, shift = (t[:, None].clone().requires_grad_() for t in (weight, bias))  # of each sample
    weight.requires_grad_(), bias.requires_grad_()
    if name == "adaptive":
        x, dy = x.transpose(0, 1), dy.transpose(0, 1)

    def gradient(part):
        leaf = x[part].clone().requires_grad_()
        function(leaf).backward(dy[part].clone())
        return leaf.grad

    one = (slice(None), slice(2, 3)) if name == "adaptive" else slice(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReferenceEngineWarning)  # of what is no reduction's
        assert torch.equal(gradient(one), gradient(slice(None))[one])
