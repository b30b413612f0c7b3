"""Gradients of regions: ties and zeros as torch has them, rounded values that are made again, who has none."""

import math

import pytest
import torch
from torch.nn import functional as F

from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.torch.regions import selection
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support.regions import FULL, HALF, PROGRAM, C, T, found, rows, summed
from support.traces import as_tuple

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.normalize(x, dim=-1),
        lambda x: (x - x.amax(-1, keepdim=True)).exp(),
        lambda x: summed(x).clamp(min=0),
        lambda x: summed(x).clamp(max=0),
        lambda x: F.relu6(summed(x)),
        lambda x: torch.maximum(summed(x), torch.zeros_like(x)),
        lambda x: F.leaky_relu(summed(x), 0.1),
        lambda x: torch.linalg.vector_norm(x * 2, math.inf, dim=-1),
        lambda x: (x * 2).abs().sum(-1),
        lambda x: x.norm(dim=-1, keepdim=True) * x,
        lambda x: x.std(-1, keepdim=True) * x,
        lambda x: torch.addcmul(summed(x), x, x, value=0.5),
        lambda x: torch.addcdiv(summed(x), x, x.abs() + 1),
        lambda x: torch.lerp(summed(x), x, 0.7) + torch.lerp(x, summed(x), x.sigmoid()),
    ],
)
def test_gradients_where_values_are_equal(function):
    """Of rows of zeros, and ties."""
    x = rows(FULL).round()
    x[0] = 0
    taken = []

    def backend(module, inputs):
        verdicts, _ = selection.replace_in(module, False)
        taken.extend(why for _, why in verdicts)
        return module.forward

    torch.compiler.reset()
    made = []
    for f in (function, torch.compile(function, backend=backend)):
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.linspace(-1, 1, out.numel()).view(out.shape))
        made.append(grad)
    torch.testing.assert_close(*made, equal_nan=True)


@pytest.mark.parametrize("engine", ["reference", pytest.param("emulator", marks=pytest.mark.emulate)])
@pytest.mark.parametrize("of", [torch.max, torch.min])
def test_the_element_that_torch_names_has_the_gradient(of, engine, plan_on):
    """The first of equal ones; NaN is beyond all others."""
    if engine == "emulator":
        plan_on("emulator")
    x = rows(FULL, shape=(6, C)).round()
    x[0], x[1, 3:], x[2, 5:8], x[3] = 0, math.inf, math.nan, -math.inf
    function = lambda x: x * of(x, -1, keepdim=True).values  # noqa: E731
    module, given, verdicts = found(function, x.requires_grad_())
    assert [why for _, why in verdicts] == [""]
    made = []
    for out, leaf in ((as_tuple(module(*given))[0], given[0]), (function(x), x)):
        made += [out, *torch.autograd.grad(out, leaf, torch.ones(out.shape))]
    torch.testing.assert_close(made[:2], made[2:], equal_nan=True)


def test_why_the_gradient_of_an_extreme_alone_is_left():
    _, _, verdicts = found(lambda x: (x * 2).max(-1).values, rows().requires_grad_())
    assert [why for _, why in verdicts] == [
        "nothing is reduced for its gradients: inductor makes them element by element"
    ]


MADE_AGAIN = {
    "a rounded maximum": (lambda x: x.amax(-1).to(HALF), 1e-6),
    "a maximum that is rounded and read": (lambda x: x / x.abs().amax(-1, keepdim=True).to(HALF), 2e-2),
    "softmax that is rounded behind": (lambda x: torch.softmax(x * 3, -1).to(HALF), 1e-6),
    "a maximum of quotients": (lambda x: (x / 3.0).amax(-1), 1e-6),
    "a maximum of rows of length 1": (lambda x: F.normalize(x, dim=-1).amax(-1), 1e-5),
    "a maximum along another axis": (lambda x: x * x.amax(0, keepdim=True).to(HALF), 2e-2),
}


@pytest.mark.parametrize("what", MADE_AGAIN)
def test_gradients_by_what_is_made_again(what):
    """A maximum has to be one of the values that it is of, and what is kept to be as it was before it was rounded."""
    function, atol = MADE_AGAIN[what]
    made = []
    x = torch.randn(100, C, generator=torch.Generator().manual_seed(3)).requires_grad_()
    module, given, verdicts = found(function, x)
    assert verdicts
    for result in (as_tuple(module(*given))[0], function(x)):
        outer = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
        made.append(torch.autograd.grad(result, x, outer)[0])
    torch.testing.assert_close(*made, rtol=5e-3, atol=atol)


def test_gradients_of_tensors_that_torch_negates_late():
    """And of those whose zeros are nowhere."""
    z = torch.randn(T, C, dtype=torch.complex64).requires_grad_()
    function = lambda x: torch.softmax(x * 2, -1)  # noqa: E731
    module, _, _ = found(function, torch.ones(T, C).requires_grad_())
    grads = []
    for f in (lambda x: as_tuple(module(x))[0], function):
        made = f(z.conj().imag)
        grads.append(torch.autograd.grad(made, z, torch.linspace(-1, 1, made.numel()).view(made.shape))[0])
    torch.testing.assert_close(*grads)
    x = torch.randn(T, C).requires_grad_()
    (grad,) = torch.autograd.grad(as_tuple(module(x))[0], x, torch._efficientzerotensor((T, C)))
    assert not grad.any()


def test_a_maximum_of_rounded_values():
    """Backward computes them again, rounded as they were: else the maximum would be none of them."""
    function = lambda x: F.rms_norm(x, (C,)).amax(-1)  # noqa: E731
    module, given, _ = found(function, rows().requires_grad_())
    (made,) = as_tuple(module(*given))
    (grad,) = torch.autograd.grad(made.sum(), given[0])
    (want,) = torch.autograd.grad(function(given[0]).sum(), given[0])
    torch.testing.assert_close(grad, want, rtol=0.05, atol=0.05)


def test_only_what_has_gradients_requires_them():
    x, w = rows(FULL).requires_grad_(), rows(FULL, 1)
    text = Program(
        (RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "FLOAT")),
        (
            ProgramStep("reduction", {"input": "in0"}, {"mode": "ADD"}),
            ProgramStep("reduction", {"input": "in1"}, {"mode": "ADD"}),
            ProgramStep("cmp_gt", {"input": "in0", "comparison": "@1"}),
        ),
        (Result(0, "n-", "FLOAT"), Result(1, "n-", "FLOAT"), Result(2, "nn", "FLOAT")),
    ).text
    assert [t.requires_grad for t in region([x, w], text)] == [True, False, False]
    assert [t.requires_grad for t in region([w, x], text)] == [False, True, False]
    first, second, mask = region([x, w.clone().requires_grad_()], text)
    assert torch.autograd.grad(first.sum(), x)[0].eq(1).all()
    given = [x, w.clone().requires_grad_()]
    region(given, text)[1].sum().backward()
    assert given[0].grad is None and given[1].grad.eq(1).all()


@pytest.mark.parametrize(
    ("count", "others"), [(1, "all"), (1, "the norm's"), (1, "none"), (2, "all"), (2, "the norm's")]
)
def test_a_gradient_that_is_given_is_not_written_again(count, others):
    """That of a residual behind a norm is the result's, which no kernel copies."""
    function = lambda x, w, r: (F.rms_norm(x, (C,), w, 1e-6) + r, x.mean(-1))[:count]  # noqa: E731
    given = [rows().requires_grad_(others != "none"), rows(HALF, 1, (C,)), rows(HALF, 2).requires_grad_()]
    given[1].requires_grad_(others == "all")
    module, traced, verdicts = found(function, *given)
    assert [why for _, why in verdicts] == [""]
    of = RegionOperator.of(verdicts[0][0].program.text)
    assert len(of.graphs.as_given) == 1
    assert {f"d{name}" for name in of.graphs.as_given}.isdisjoint(a.name for a in of.graphs.backward.arguments)
    for used in (slice(0, 1), slice(count)):
        outer = [rows(HALF, 3), rows(HALF, 4, (T,))][:count][used]
        wanted = [t for t in given if t.requires_grad]
        made = torch.autograd.grad(as_tuple(module(*traced))[used], wanted, outer)
        assert made[-1].data_ptr() == outer[0].data_ptr()
        want = torch.autograd.grad(function(*given)[used], wanted, outer)
        torch.testing.assert_close(made, want, rtol=2e-2, atol=2e-2)


def test_gradients_are_differentiated_once():
    x = rows(FULL).requires_grad_()
    w = rows(HALF, 1, (C,))
    (grad,) = torch.autograd.grad(region([x, w], PROGRAM.text)[0].float().sum(), x, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="its gradient has no derivative"):
        grad.sum().backward()


def test_a_view_without_gradients():
    """Its readers have none, whoever made what it is a view of."""

    def function(x):
        y = x * x
        with torch.no_grad():
            view = y.view(y.shape)
        return view.norm(dim=-1, keepdim=True) + y.sum(-1, keepdim=True)

    grads = []
    for f in (function, torch.compile(function, backend="graphfuse", options={"then": "eager"})):
        x = rows(FULL).requires_grad_()
        grads += torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(*grads)


def test_an_output_that_has_no_gradient_is_read_by_that_of_another():
    """Here the mask as numbers, which is stored anyway."""
    program = Program(
        (RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "BOOLEAN")),
        (
            ProgramStep("identity", {"input": "in1"}, {}, "BFLOAT16"),
            ProgramStep("mul", {"a": "in0", "b": "@0"}),
            ProgramStep("reduction", {"input": "@1"}, {"mode": "ADD"}),
        ),
        (Result(0, "nn", "BFLOAT16"), Result(2, "n1", "FLOAT")),
    )
    of, x, mask = RegionOperator.of(program.text), rows(FULL).requires_grad_(), rows(FULL, 1) > 0
    assert of.graphs.kept == ("out0",)
    numbers, total = of.run(x, mask)
    assert torch.equal(numbers, mask.to(HALF)) and not numbers.requires_grad
    total.sum().backward()
    assert torch.equal(x.grad, mask.float())


@pytest.mark.parametrize("jumps", [torch.floor, torch.ceil])
def test_an_output_whose_gradients_are_zeros_requires_them(jumps):
    def function(x, y):
        q = jumps(y * 4)
        return F.softmax(x * q, -1), q

    torch.compiler.reset()
    run = torch.compile(function, backend="graphfuse", options={"then": "aot_eager", "decline": False})
    for f in (function, run):
        x, y = rows(FULL).requires_grad_(), rows(FULL, 1).requires_grad_()
        made, q = f(x, y)
        (made.sum() + q.sum()).backward()
        assert q.requires_grad and not y.grad.any() and x.grad is not None
