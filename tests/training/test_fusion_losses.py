"""Cross entropy in graphs that are compiled: the operator in its place, against torch's function; what is left."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report
from graphfuse.torch.compile_backend import compiled, losses
from graphfuse.torch.fusion import cost
from support.traces import recorded

pytestmark = pytest.mark.torch
ROWS, CLASSES = 12, 64


def given(dtype=torch.float32):
    """Logits, and targets, of which some are ignored in each function below."""
    source = torch.Generator().manual_seed(3)
    target = torch.randint(0, CLASSES, (ROWS,), generator=source)
    target[3], target[5] = -100, 3
    return torch.randn(ROWS, CLASSES, generator=source).to(dtype), target


FUNCTIONS = {
    "logits": lambda x, t: F.cross_entropy(x, t),
    "logits in float32": lambda x, t: F.cross_entropy(x.float(), t),
    "logits of samples": lambda x, t: F.cross_entropy(x.view(2, -1, CLASSES).float().view(-1, CLASSES), t.view(-1)),
    "smoothed, summed": lambda x, t: F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1),
    "each row's": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "a module": lambda x, t: torch.nn.CrossEntropyLoss(ignore_index=3)(x, t.clamp(min=0)),
    "nothing but ignored": lambda x, t: F.cross_entropy(x, t * 0, ignore_index=0),
}


def made(function, x, t):
    """Loss and gradient."""
    x = x.clone().requires_grad_()
    loss = function(x, t)
    return loss.detach(), torch.autograd.grad(loss.float().sum(), x)[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_torch(name, dtype, dynamic):
    function, tensors = FUNCTIONS[name], given(dtype)
    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, dynamic=dynamic, fullgraph=True)
    got = made(run, *tensors)
    (entry,) = compile_report().replaced
    assert entry.became == losses.NAME
    wide = made(function, tensors[0].double(), tensors[1])
    eager = made(function, *tensors)
    for one, exact, other in zip(got, wide, eager, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        error, bound = ((t.double() - exact).abs().nan_to_num() for t in (one, other))
        assert (error <= 2 * bound.max() + 2e-6 * exact.nan_to_num().abs().max()).all()


@pytest.mark.parametrize("how", ["dynamo", "aten"])
def test_logits_are_read_as_they_were_before_a_cast(how):
    graph, tensors = recorded(FUNCTIONS["logits in float32"], given(torch.bfloat16), how)
    found = losses.replace(graph, declines=False)
    if how == "aten":  # which has taken it apart
        assert not found
        return
    assert [why for _, why in found] == [""]
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.graphfuse.cross_entropy_loss.default]
    assert [node.args[0].op for node in calls] == ["placeholder"]
    torch.testing.assert_close(graph(*tensors)[0], F.cross_entropy(given(torch.bfloat16)[0].float(), tensors[-1]))


LEFT = {
    "weights of classes": lambda x, t: F.cross_entropy(x, t.clamp(min=0), weight=x[0]),
    "probabilities of classes": lambda x, t: F.cross_entropy(x, x.softmax(1)),
    "classes second of three": lambda x, t: F.cross_entropy(x[..., None], t[:, None]),
    "float64": lambda x, t: F.cross_entropy(x.double(), t),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    graph, _ = recorded(LEFT[name], given(), "dynamo")
    assert not losses.replace(graph, declines=False)


def test_what_inductor_computes_with_it(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")
    graph, _ = recorded(lambda x, t: F.cross_entropy(30 * torch.tanh(x / 30), t), given(), "dynamo")
    entries = compiled.replace_in(graph, declines=True)
    assert [e.why for e in entries if not e.is_replaced] == [
        "the operator would move 8 bytes an element more than inductor alone: mul before it"
    ]
