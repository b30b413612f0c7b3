"""Cross entropy in graphs that are compiled: as a region, against torch's function; what is left."""

import pytest
import torch
from torch.nn import functional as F

import graphfuse.torch as gft
from graphfuse.torch import compile_report
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.compile_backend.losses import RowLosses
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
    "capped": lambda x, t: F.cross_entropy(capped(x.view(2, -1, CLASSES)).float().view(-1, CLASSES), t),
    "capped, each row's": lambda x, t: F.cross_entropy(
        capped(x.view(2, 3, 2, CLASSES)).flatten(0, 2), t, reduction="none"
    ),
    "rows of a part": lambda x, t: F.cross_entropy(x.view(2, -1, CLASSES)[:, :-1].reshape(-1, CLASSES), t[2:]),
    "targets shifted, as transformers does": lambda x, t: F.cross_entropy(capped(x), F.pad(t, (0, 1), value=-100)[1:]),
    "scaled": lambda x, t: F.cross_entropy(x * 0.5, t, label_smoothing=0.2),
    "a softmax's logarithm": lambda x, t: F.nll_loss(F.log_softmax(x * 0.5, -1, dtype=torch.float32), t),
    "a softmax's logarithm, each row's": lambda x, t: F.nll_loss(
        capped(x.view(2, 3, 2, CLASSES)).log_softmax(dim=3).flatten(0, 2), t, reduction="none"
    ),
    "the operator": lambda x, t: gft.cross_entropy(x * 0.5, t, z_loss=1e-2),
}
STEPS = {
    "capped": "div, tanh, mul, cross_entropy",
    "capped, each row's": "div, tanh, mul, cross_entropy",
    "targets shifted, as transformers does": "div, tanh, mul, cross_entropy",
    "scaled": "mul, cross_entropy",
    "a softmax's logarithm": "mul, cross_entropy",
    "a softmax's logarithm, each row's": "div, tanh, mul, cross_entropy",
    "the operator": "mul, cross_entropy",
}
"""Of regions that have others than that of the loss."""


def steps_of(name, dtype):
    cast = ", cast to BFLOAT16" if name == "each row's" and dtype is torch.bfloat16 else ""
    return STEPS.get(name, "cross_entropy") + cast


def capped(x):
    return 30 * torch.tanh(x / 30)


def made(function, x, *others):
    """Loss and gradient."""
    x = x.clone().requires_grad_()
    loss = function(x, *others)
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
    assert (entry.became, entry.why) == ("region", steps_of(name, dtype))
    check_as_exact(got, function, *tensors)


def check_as_exact(got, function, x, t):
    """That loss and gradient are no further from those of float64 than eager's, but for roundings."""
    for one, exact, other in zip(got, made(function, x.double(), t), made(function, x, t), strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        error, bound = ((t.double() - exact).abs().nan_to_num() for t in (one, other))
        assert (error <= 2 * bound.max() + 2e-6 * exact.nan_to_num().abs().max()).all()


def shifted(x, t):
    return F.cross_entropy(x[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1))


def through_its_base(x, t):
    x = x * 1
    y = x[:, :-1].float().reshape(-1, CLASSES)
    x.mul_(2)
    return F.cross_entropy(y, t[:, 1:].reshape(-1)) + x.sum()


def of_another_type(x, t):
    return F.cross_entropy((x.detach().half() * 1).view(torch.bfloat16).view(-1, CLASSES), t.view(-1)) + x.sum()


def weighted(x, t):
    losses = F.cross_entropy(x.view(-1, CLASSES), t.view(-1), reduction="none")
    return (x * losses.view(t.shape)[..., None]).sum(-1)


def beyond(x, t):
    loss = F.cross_entropy(x.view(-1, CLASSES) * 0.5, t.view(-1), ignore_index=2**40)
    return (x * loss).softmax(-1).amax(-1)


ODD = {
    "one that varies is ignored": (
        lambda x, t, k: F.cross_entropy(x.view(-1, CLASSES) * 0.5, t.view(-1), ignore_index=k),
        [(2, 3, 1), (2, 3, 2), (2, 3, 4)],
    ),
    "no token is left": (shifted, [(2, 6), (3, 7), (4, 1)]),
    "a batch of one": (
        lambda x, t: F.cross_entropy(capped(x).view(-1, CLASSES) * 0.5, t.view(-1)),
        [(1, 5), (2, 5)],
    ),
    "its base is changed": (through_its_base, [(2, 6)]),
    "the view of another type": (of_another_type, [(2, 6)]),
    "a weight of each row": (weighted, [(1, 4), (2, 4)]),
    "no number of a class is ignored": (beyond, [(2, 6)]),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ODD)
def test_odd_ones(name, dynamic):
    function, calls = ODD[name]
    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, dynamic=dynamic)
    source = torch.Generator().manual_seed(4)
    for batch, tokens, *others in calls:
        x = torch.randn(batch, tokens, CLASSES, generator=source).to(torch.bfloat16)
        t = torch.randint(0, 8, (batch, tokens), generator=source)
        for one, other in zip(made(run, x, t, *others), made(function, x, t, *others), strict=True):
            assert one.dtype is other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3, equal_nan=True)


@pytest.mark.emulate
@pytest.mark.parametrize("name", ["capped", "scaled"])
def test_one_kernel_each_way_on_the_emulator(name, kernels):
    function, tensors = FUNCTIONS[name], given(torch.bfloat16)
    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    for one, other in zip(made(run, *tensors), made(function, *tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)
    assert kernels == {"region_training": [True], "region_backward": [True]}


@pytest.mark.parametrize("name", ["logits in float32", "logits of samples", "capped"])
def test_logits_are_read_as_they_were_before_a_cast(name):
    function = FUNCTIONS[name]
    graph, tensors = recorded(function, given(torch.bfloat16), "dynamo")
    compiled_graphs.replace_in(graph, declines=False)
    (call,) = graph.graph.find_nodes(op="call_function", target=torch.ops.graphfuse.region.default)
    assert [t.meta["example_value"].dtype for t in call.args[0]] == [torch.bfloat16, torch.int64]
    torch.testing.assert_close(graph(*tensors)[0], function(*given(torch.bfloat16)), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "the operator"])
def test_where_inductor_is_as_good_it_is_as_it_was(name, dynamic):
    """On a CPU. Of a loss in no region of a graph that has others, torch's own is made again."""
    function, (x, t) = FUNCTIONS[name], given(torch.bfloat16)
    entries, called = [], []

    def backend(graph, _):
        before = [node.target for node in graph.graph.nodes]
        entries.extend(compiled_graphs.replace_in(graph, declines=True))
        assert [node.target for node in graph.graph.nodes] == before
        RowLosses(graph).restore()
        graph.graph.lint()
        graph.recompile()
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    run = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    check_as_exact(made(run, x, t), function, x, t)
    assert called.count(F.cross_entropy) == 1
    own = {torch.ops.graphfuse.cross_entropy_loss.default, torch.ops.aten.sum.default, torch.ops.aten.ne.Scalar}
    assert own.isdisjoint(called)
    steps = steps_of(name, torch.bfloat16)
    assert [entry.why for entry in entries] == [f"{steps}: it is on no GPU, and inductor is as fast"]


def read_elsewhere(logps, t):
    return F.nll_loss(logps, t) + logps.exp().mean()


LEFT = {
    "weights of classes": lambda x, t: F.cross_entropy(x, t.clamp(min=0), weight=x[0]),
    "probabilities of classes": lambda x, t: F.cross_entropy(x, x.softmax(1)),
    "classes second of three": lambda x, t: F.cross_entropy(x[..., None], t[:, None]),
    "float64": lambda x, t: F.cross_entropy(x.double(), t),
    "a logarithm that is read elsewhere": lambda x, t: read_elsewhere(F.log_softmax(x, -1), t),
    "a softmax's logarithm along rows": lambda x, t: F.nll_loss(F.log_softmax(x, 0), t),
    "no softmax's logarithm": lambda x, t: F.nll_loss(x * 2, t),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    graph, tensors = recorded(LEFT[name], given(), "dynamo")
    compiled_graphs.replace_in(graph, declines=False)
    assert any(node.target in (F.cross_entropy, F.nll_loss) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*tensors)[0], LEFT[name](*given()), equal_nan=True)
