"""``torch.compile(backend="graphfuse")`` on small models: what is replaced and what is left, values and gradients,
recompiles and options."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from graphfuse.base.errors import SettingError
from graphfuse.torch import compile_report, fuse
from graphfuse.torch.compile_backend import compiled_graphs
from support.compiled import EPS, HIDDEN, became, rows

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]


def compile_with(function, then="aot_eager", **options):
    return torch.compile(function, backend="graphfuse", fullgraph=True, options={"then": then, **options})


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = Norm(), Norm()
        self.first, self.second = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))

    def forward(self, x):
        x = x + self.first(self.before(x))
        return x + self.second(self.between(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = torch.nn.ModuleList(Layer() for _ in range(2)), torch.nn.LayerNorm(HIDDEN)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


class Wrapped(Model):
    def forward(*args, **named):
        return Model.forward(*args, **named)


SITES = ["region"] * 5


# Values


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_training(then):
    own, x = model(), rows(2)
    given = x.clone().requires_grad_()
    wanted = own(given)
    wanted.square().sum().backward()
    want = {n: p.grad for n, p in own.named_parameters()}
    mine, mine_x = model(), x.clone().requires_grad_()
    got = compile_with(mine, then)(mine_x)
    got.square().sum().backward()
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine_x.grad, given.grad, rtol=1e-4, atol=1e-5)
    for n, p in mine.named_parameters():
        torch.testing.assert_close(p.grad, want[n], rtol=1e-4, atol=1e-4)
    assert became() == SITES
    assert compile_report().graphs[-1].model == "graph 0, for training"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode):
    own, x = model(torch.bfloat16), rows(2, torch.bfloat16)
    with mode():
        got = compile_with(own)(x)
        torch.testing.assert_close(got, own(x), rtol=0.02, atol=0.02)
    assert not got.requires_grad
    assert became() == SITES
    assert compile_report().graphs[-1].model == "graph 0, for inference"


@pytest.mark.parametrize("around", [True, False])
def test_autocast(around):
    """Around the call, and in the function."""
    own, x = model(), rows(2).requires_grad_()

    def within(x):
        with torch.autocast("cpu", torch.bfloat16):
            return own(x)

    function = own if around else within
    run = compile_with(function)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        want, got = function(x), run(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    (grad,) = torch.autograd.grad(want.sum() + want.square().sum(), x)
    (mine,) = torch.autograd.grad(got.sum() + got.square().sum(), x)
    torch.testing.assert_close(mine, grad, rtol=0.05, atol=0.05 * grad.abs().max().item())
    assert len(became()) == 5 and all(became())


@pytest.mark.parametrize("cls", [Model, Wrapped])
def test_the_report_names_modules_and_lines(cls):
    with torch.no_grad():
        compile_with(cls(), "eager")(rows(2))
    entries = compile_report().graphs[-1].entries
    assert [e.name for e in entries] == [
        "layers.0.before",
        "layers.0.between",
        "layers.1.before",
        "layers.1.between",
        "last",
    ]
    assert [e.kind for e in entries] == ["Norm"] * 4 + ["LayerNorm"]
    assert "graph 0, for inference: 5 of 5 sites replaced" in str(compile_report())
    compile_with(lambda x: F.rms_norm(x, (HIDDEN,)), "eager")(rows(2))
    (entry,) = compile_report().graphs[-1].entries
    assert entry.kind.startswith("test_backend.py:")


def test_the_report_is_bounded_and_ends_with_the_compiled_functions():
    for _ in range(compiled_graphs.KEPT + 2):
        compiled_graphs.add_report("", [])
    compile_with(torch.neg)(rows(2))
    assert len(compile_report().graphs) == compiled_graphs.KEPT
    torch.compiler.reset()
    assert compile_report().graphs == ()
    assert str(compile_report()) == "no graph was compiled"


# Modes within a function, and graphs within a graph


def test_a_sum_without_gradients_stays_apart():
    w = torch.linspace(0.5, 1.5, HIDDEN).requires_grad_()

    def function(x, r):
        with torch.no_grad():
            total = x + r
        return F.rms_norm(total, (HIDDEN,), w), total

    x, r = rows(2).requires_grad_(), rows(2, seed=2)
    y, total = compile_with(function)(x, r)
    assert became() == ["region"] and not total.requires_grad
    (got,) = torch.autograd.grad(y.square().sum(), w)
    (want,) = torch.autograd.grad(function(x, r)[0].square().sum(), w)
    torch.testing.assert_close(got, want)


def test_a_norm_whose_statistics_have_no_gradient_is_left():
    def function(x):
        with torch.no_grad():
            inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * inverse

    x = rows(2).requires_grad_()
    (got,) = torch.autograd.grad(compile_with(function)(x).square().sum(), x)
    (want,) = torch.autograd.grad(function(x).square().sum(), x)
    torch.testing.assert_close(got, want)
    (entry,) = compile_report().replaced
    assert entry.why == "mul, reduction, add, rsqrt"  # up to where the mode changes


def test_what_torch_func_differentiates_is_left():
    w = torch.linspace(0.5, 1.5, HIDDEN)
    function = torch.func.grad(lambda x: F.rms_norm(x, (HIDDEN,), w).square().sum())
    x = rows(2)
    torch.testing.assert_close(compile_with(lambda x: function(x))(x), function(x))
    assert all("torch.func" in e.why for e in compile_report().left) and not compile_report().replaced


def test_inner_values_with_hooks_or_changed_are_left():
    def hooked(x):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        inverse.register_hook(lambda g: g * 2)
        return x * inverse

    def changed(x):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        same = inverse.view_as(inverse)
        inverse.mul_(3)
        return x * same

    x = rows(2).requires_grad_()
    # Not in one graph: that of torch 2.10 ends at a hook.
    want, got = hooked(x), torch.compile(hooked, backend="graphfuse", options={"then": "aot_eager"})(x)
    grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        torch.testing.assert_close(compile_with(changed)(x), changed(x))
    # What is before it is a region.
    (entry,) = compile_report().replaced
    assert (entry.became, entry.why) == ("region", "mul, reduction, add")
    # 4 bytes are read, and a number is written for each of 32; the square is written and read again.
    assert entry.moved == "4.12 bytes an element, 12.4 by its operations one by one"
    assert f"region (mul, reduction, add; {entry.moved})" in str(compile_report())


def test_tensors_of_other_classes_are_left():
    x = TwoTensor(rows(2), rows(2, seed=2))
    function = lambda x: F.rms_norm(x, (HIDDEN,))  # noqa: E731
    got = compile_with(function)(x)
    torch.testing.assert_close(got.b, function(x.b))
    (entry,) = compile_report().left
    assert entry.why == "rms_norm: it computes with a TwoTensor"


def test_a_model_that_was_fused_before():
    own, x = model(torch.bfloat16), rows(2, torch.bfloat16)
    fuse(own)
    with torch.no_grad():
        torch.testing.assert_close(compile_with(own)(x), own(x), rtol=0.02, atol=0.02)
    assert {e.became for e in compile_report().replaced} <= {"region"}


def test_checkpoints():
    own, x = model(), rows(2).requires_grad_()

    def function(x):
        return own.last(checkpoint(own.layers[0], x, use_reentrant=False))

    (got,) = torch.autograd.grad(compile_with(function)(x).square().sum(), x)
    (want,) = torch.autograd.grad(function(x).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert became() == ["region"] * 3


def test_a_norm_whose_inverse_is_read_elsewhere_makes_it_too():
    def function(x):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * inverse, inverse

    graph, x = make_fx(function, tracing_mode="fake")(rows(2)), rows(2)
    (entry,) = compiled_graphs.replace_in(graph, declines=False)
    assert (entry.became, entry.why) == ("region", "mul, reduction, add, rsqrt")
    assert not any("rsqrt" in str(n.target) for n in graph.graph.nodes)
    for got, want in zip(graph(x), function(x), strict=True):
        torch.testing.assert_close(got, want)


# Recompiles


def graphs_of(backend, dynamic, marked, sizes, **options):
    """How many graphs Dynamo makes of calls with these numbers of rows."""
    torch.compiler.reset()
    counters.clear()
    run = torch.compile(model().layers[0], backend=backend, dynamic=dynamic, fullgraph=True, **options)
    for n in sizes:
        x = rows(n)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        run(x)
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "dynamic, marked, sizes",
    [(None, False, (2, 5, 7, 1)), (True, False, (2, 5)), (None, True, (2, 5)), (False, False, (2, 5, 2))],
)
def test_no_recompile_that_another_backend_has_not(dynamic, marked, sizes):
    others = graphs_of("aot_eager", dynamic, marked, sizes)
    assert graphs_of("graphfuse", dynamic, marked, sizes, options={"then": "aot_eager"}) == others
    assert all(len(graph.replaced) == 2 for graph in compile_report().graphs)


def test_rows_that_vary_have_the_same_values():
    own = model().layers[0]
    run = torch.compile(own, backend="graphfuse", dynamic=True, fullgraph=True, options={"then": "aot_eager"})
    for n in (4, 2, 6):
        torch.testing.assert_close(run(rows(n)), own(rows(n)))
    assert len(compile_report().graphs) == 1


# Options


@pytest.mark.parametrize(
    "kwargs, said",
    [
        ({"options": {"then": "nobody"}}, "option then is 'nobody'; accepted: "),
        ({"options": {"then": "graphfuse"}}, "option then is 'graphfuse'"),
        ({"options": {"then": "eager", "max_autotune": True}}, "option max_autotune with option then 'eager'"),
        ({"options": {"decline": "no"}}, "option decline is 'no'; accepted: True, False"),
        ({"options": {"max_autotuned": True}}, "max_autotuned"),
        ({"options": {"max_autotune": "yes"}}, "max_autotune"),
        ({"options": {"post_grad_custom_pre_pass": 3}}, "post_grad_custom_pre_pass is 3; accepted: "),
        ({"mode": "fastest"}, "fastest"),
    ],
)
def test_options_that_are_not_accepted(kwargs, said):
    with pytest.raises(BackendCompilerFailed) as error:
        torch.compile(model(), backend="graphfuse", **kwargs)(rows(2))
    assert isinstance(error.value.inner_exception, SettingError)
    assert said in str(error.value.inner_exception)
    assert compile_report().graphs == ()


def test_the_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    module, name = re.search(r'entry-points.torch_dynamo_backends\]\ngraphfuse = "([\w.]+):(\w+)"', text).groups()
    assert getattr(importlib.import_module(module), name) is torch._dynamo.lookup_backend("graphfuse")
    assert "graphfuse" in torch.compiler.list_backends()
