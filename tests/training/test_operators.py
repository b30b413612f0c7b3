"""The operators as torch sees them: opcheck, torch.compile forward and backward over row counts, export, fake tensors,
and what is refused."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import graphfuse
from graphfuse import functional
from graphfuse import torch as training
from support.training_calls import EPS, OPERATORS, WITHOUT_WEIGHT, operator_checks, results, tensors

pytestmark = pytest.mark.torch

ROWS = (5, 7, 3, 129, 2)  # the first one unlike other extents, which torch would take for the same
# Inductor tries the C++ compiler out and compiles a header before its first kernel: in one process.
# Inductor is given the same graph, and takes seconds: one operator of each kind.
IN_INDUCTOR = ("rms_norm", "add_layer_norm_bias", "rms_norm_silu_gate")


@pytest.mark.some(12)
@pytest.mark.parametrize("weight", [None, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name, weight):
    if weight is None or name in WITHOUT_WEIGHT:
        operator_checks(name, weight)


def around(name):
    """The operator in the middle of others."""

    def function(given):
        return tuple(y.sin() for y in OPERATORS[name].run({n: t * 2 for n, t in given.items()}))

    return function


def leaves(name, shape, seed=0):
    return tensors(name, shape, torch.float32, seed=seed)


def with_backends(name):
    kept = pytest.mark.xdist_group("inductor") if name in IN_INDUCTOR else pytest.mark.thorough
    yield from ((name, "aot_eager", False), (name, "aot_eager", True))
    yield pytest.param(name, "inductor", False, marks=kept)


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "backend", "marked"), [case for name in OPERATORS for case in with_backends(name)])
def test_one_graph_for_all_row_counts(name, backend, marked):
    """torch makes a graph of its own of 0 and 1, unless rows are marked as unknown."""
    torch._dynamo.reset()
    function = around(name)
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for n, rows in enumerate((*ROWS, *(1, 0) * marked)):
        got, want = leaves(name, (rows, 4, 64), n), leaves(name, (rows, 4, 64), n)
        for t in got.values():
            if marked and t.dim() > 1:
                mark_unbacked(t, 0)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            made = fast(got)
        exact = function(want)
        for a, b in zip(made, exact, strict=True):
            torch.testing.assert_close(a, b)
        sum(y.square().sum() for y in made).backward()
        sum(y.square().sum() for y in exact).backward()
        for argument in want:
            torch.testing.assert_close(got[argument].grad, want[argument].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "asked"), [(n, a) for n, o in OPERATORS.items() for a in ("x", o.tensors[-1])])
def test_one_gradient_compiled(name, asked, backend):
    """What is not asked for is not made, and nothing else comes out."""
    torch._dynamo.reset()
    given = {n: t.requires_grad_(n == asked) for n, t in tensors(name, grad=False).items()}
    found = []
    for function in (torch.compile(around(name), fullgraph=True, backend=backend), around(name)):
        found += torch.autograd.grad(function(given)[0].square().sum(), given[asked])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def compiled(function, arguments):
    """The nodes of graphfuse in the forward and the backward graph."""
    found = {}

    def keep(which):
        def compiler(graph, inputs):
            found[which] = [str(n.target) for n in graph.graph.nodes if "graphfuse" in str(n.target)]
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), inference_compiler=keep("alone"))
    y = torch.compile(function, fullgraph=True, backend=backend)(arguments)
    if any(t.requires_grad for t in results(y)):
        sum(t.sum() for t in results(y)).backward()
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_compiled(name):
    """One operator where no gradient is asked for, one forward and one backward where one is."""
    want = {"forward": [f"graphfuse.{name}_training.default"], "backward": [f"graphfuse.{name}_backward.default"]}
    assert compiled(around(name), leaves(name, (5, 64))) == want
    assert compiled(around(name), tensors(name, grad=False)) == {"alone": [f"graphfuse.{name}.default"]}
    with torch.no_grad():
        assert compiled(around(name), leaves(name, (5, 64))) == {"alone": [f"graphfuse.{name}.default"]}


def test_modules_compile():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.silu = training.RMSNorm(64), training.RMSNormSiLU((4, 16))
            self.added = training.AddRMSNorm(64, eps=1e-6)

        def forward(self, x, residual):
            y, total = self.added(self.norm(x), residual)
            return self.silu(y.unflatten(-1, (4, 16))).flatten(-2) + total

    torch._dynamo.reset()
    block = Block()
    fast = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, rows in enumerate((5, 8, 3)):
        x, residual = torch.randn(rows, 64, requires_grad=True), torch.randn(rows, 64, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = fast(x, residual)
        want = block(x, residual)
        torch.testing.assert_close(got, want)
        asked = (x, residual, *block.parameters())
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), asked) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(
        training.RMSNorm(64), (torch.randn(5, 64),), dynamic_shapes=({0: rows},), strict=strict
    )
    assert "graphfuse.rms_norm.default" in str(program.graph)
    x = torch.randn(9, 64)
    torch.testing.assert_close(program.module()(x), torch.nn.functional.rms_norm(x, (64,)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_trace(grad):
    """torch.jit.trace hears of the operator, whose memory it would take for a constant."""
    module = training.RMSNorm(64)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, torch.randn(5, 64), check_trace=False)
        assert "graphfuse::rms_norm" in str(traced.graph)
        x = torch.randn(9, 64)
        got, want = traced(x), module(x)
    assert torch.equal(got, want)
    if grad:
        found = (torch.autograd.grad(y.square().sum(), [*module.parameters()])[0] for y in (got, want))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_tensors(name):
    """Shapes and types of results and gradients as of real tensors, and errors."""
    given = tensors(name, (4, 64), {"x": torch.bfloat16, "residual": torch.float32, "gate": torch.float16})
    want = OPERATORS[name].run(given)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in given.items()}
        got = OPERATORS[name].run(fakes)
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.requires_grad) == (b.shape, b.dtype, b.stride(), True)
        sum(y.sum().float() for y in got).backward()
        for n, t in given.items():
            assert (fakes[n].grad.shape, fakes[n].grad.dtype) == (t.shape, t.dtype)
        with pytest.raises(graphfuse.VariantPackError, match=r"weight has shape \(63,\)"):
            OPERATORS[name].run(fakes | {"weight": fakes["weight"][1:]})


def test_modes_see_the_operators():
    """What listens to torch's dispatcher, as selective checkpointing does, hears of each step."""

    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names, given = [], leaves("rms_norm", (4, 64))
    with Heard():
        (y,) = OPERATORS["rms_norm"].run(given)
        y.sum().backward()
        with torch.no_grad():
            OPERATORS["rms_norm"].run(given)
    steps = [n for n in names if n.startswith("graphfuse")]
    assert steps == [f"graphfuse.rms_norm{s}.default" for s in ("_training", "_backward", "")]
    with FlopCounterMode(display=False):
        OPERATORS["rms_norm"].run(given)


@pytest.mark.parametrize("grad", [False, True])
def test_values_that_are_not_what_lies_in_memory(grad):
    """Torch keeps the sign of an imaginary part, and zeros, as a mark of the tensor."""
    run = torch.ops.graphfuse.rms_norm.default
    x, weight = torch.randn(2, 4, 64), torch.ones(64).requires_grad_(grad)
    weights = weight.detach()
    for of in (torch.complex(*x).conj().imag, torch._neg_view(x), torch._efficientzerotensor((4, 64))):
        want = torch.nn.functional.rms_norm(of, (64,), eps=EPS)
        for call in (training.rms_norm, run, lambda x, w, eps: functional.rmsnorm(x, weights, eps)):
            call(torch.empty_strided(of.shape, of.stride()).fill_(1), weight, EPS)  # alike but for that
            torch.testing.assert_close(call(of, weight, EPS).detach(), want)


REFUSED = {
    "x of integers": ({"x": torch.ones(4, 64, dtype=torch.int32)}, "x is of torch.int32; accepted: bfloat16"),
    "x is a number": ({"x": 3}, "x must be a torch tensor, got int"),
    "weight of another size": ({"weight": torch.ones(63)}, r"weight has shape \(63,\); accepted: \(64,\)"),
    "weight is a list": ({"weight": [1.0]}, "weight must be a torch tensor, got list"),
    "residual of another shape": ({"residual": torch.ones(3, 64)}, r"residual has shape \(3, 64\); accepted: \(4, 64"),
    "gate of another shape": ({"gate": torch.ones(64)}, r"gate has shape \(64,\); accepted: \(4, 64"),
    "gate of FP8": ({"gate": torch.ones(4, 64).to(torch.float8_e4m3fn)}, "gate is of torch.float8_e4m3fn; accepted"),
    "no columns": ({"x": torch.ones(4, 0)}, r"x has shape \(4, 0\); accepted: one dimension or more"),
    "meta": ({"x": torch.ones(4, 64, device="meta")}, "is on cpu, x is on meta; one device is accepted"),
    "sparse": ({"x": torch.ones(4, 64).to_sparse()}, "x is a tensor of layout"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", OPERATORS)
def test_refused(name, case, grad):
    change, message = REFUSED[case]
    if {*change} <= {*OPERATORS[name].tensors}:
        with pytest.raises(graphfuse.VariantPackError, match=message):
            OPERATORS[name].run(tensors(name, (4, 64), grad=grad) | change)


@pytest.mark.parametrize("grad", [False, True])
def test_an_eps_that_is_no_number(grad):
    with pytest.raises(graphfuse.VariantPackError, match="'eps'.*str is not a number"):
        OPERATORS["rms_norm"].run(tensors("rms_norm", grad=grad), eps="a")


def test_an_eps_that_asks_for_a_gradient():
    eps = torch.tensor(EPS, requires_grad=True)
    with pytest.raises(graphfuse.VariantPackTypeError, match="eps is a tensor that requires a gradient; accepted: a n"):
        OPERATORS["rms_norm"].run(tensors("rms_norm"), eps=eps)


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_are_refused_where_they_are_asked_for(name):
    given = leaves(name, (4, 64))
    y = OPERATORS[name].run(given)[0]
    first = torch.autograd.grad(y.sum(), [*given.values()], create_graph=True)
    plain = torch.autograd.grad(OPERATORS[name].run(given)[0].sum(), [*given.values()])
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
    with pytest.raises(graphfuse.GraphNotSupportedError, match=f"graphfuse::{name}: its gradient has no derivative"):
        first[0].square().sum().backward()


def test_other_ways_of_differentiating_are_refused():
    x, weight = torch.randn(3, 4, 64), torch.randn(64)

    def f(x):
        return training.rms_norm(x, weight)

    for run in (
        lambda: torch.func.grad(lambda x: f(x).sum())(x),
        lambda: torch.func.vjp(f, x)[1](x),
        lambda: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    ):
        with pytest.raises(
            graphfuse.GraphNotSupportedError, match="graphfuse::rms_norm is differentiated by torch.func"
        ):
            run()
    with pytest.raises(graphfuse.GraphNotSupportedError, match="graphfuse::rms_norm has no forward-mode derivative"):
        torch.func.jvp(f, (x,), (x,))
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            with pytest.raises(graphfuse.GraphNotSupportedError, match="no forward-mode derivative"):
                f(forward_ad.make_dual(leaf, x))
            torch.testing.assert_close(f(x), torch.nn.functional.rms_norm(x, (64,), weight))  # which has no tangent


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    """By torch's own loop over the operator."""
    x, weight = torch.randn(3, 4, 64, requires_grad=True), torch.randn(3, 64)
    got = torch.func.vmap(lambda x, w: training.rms_norm(x, w, EPS))(x, weight)
    want = training.rms_norm(x, eps=EPS) * weight[:, None]
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), x) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
