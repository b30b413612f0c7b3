"""Regions piece by piece: what of aten translates, programs as text, the operator and its gradients, and what is left
to torch because a region would do otherwise."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from graphfuse.base.errors import GraphfuseError, GraphNotSupportedError, SerializedError, VariantPackError
from graphfuse.functional import problem
from graphfuse.ops import OPS
from graphfuse.torch.fusion import generated
from graphfuse.torch.regions import judged, operator
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from graphfuse.torch.regions.translate import TranslatedGraph
from support.traces import as_tuple, recorded

pytestmark = pytest.mark.torch
HALF, FULL, BINARY16 = torch.bfloat16, torch.float32, torch.float16
T, C = 4, 32

PROGRAM = Program(
    (RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "-n", "BFLOAT16")),
    (
        ProgramStep("reduction", {"input": "in0"}, {"mode": "ADD"}),
        ProgramStep("mul", {"a": "in0", "b": "@0"}),
        ProgramStep("mul", {"a": "@1", "b": "in1"}, {}, "BFLOAT16"),
    ),
    (Result(2, "nn", "BFLOAT16"), Result(0, "n-", "FLOAT")),
)


def rows(dtype=HALF, seed=0, shape=(T, C)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def found(function, *tensors, how="dynamo"):
    """The graph with regions in it, what it is called with, and the regions' verdicts."""
    module, given = recorded(function, tensors, how)
    verdicts, _ = judged.replace_in(module, False, ())
    return module, given, verdicts


# The table


CALLS = [(op.name, text) for op in OPS.values() for text in op.aten]


@pytest.mark.parametrize(("op", "text"), CALLS)
def test_what_ops_are_called_in_aten(op, text):
    name, *given = text.split()
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    parameters = {a.name for a in schema.arguments}
    targets = {port.name for port in OPS[op].inputs} | {a.name for a in OPS[op].attributes}
    assert given
    for one in given:
        parameter, _, target = one.replace("=", ":").partition(":")
        assert parameter in parameters
        assert "=" in one or target in targets


# Operations, each behind a sum that makes it part of a region


def summed(x):
    return x + x.float().sum(-1, keepdim=True).to(x.dtype)


OPERATIONS = {
    "add": lambda x, r: x + r,
    "add alpha one": lambda x, r: torch.add(x, r, alpha=1),
    "sub": lambda x, r: x - 2 * r,
    "rsub": lambda x, r: 1 - x,
    "mul": lambda x, r: torch.mul(input=x, other=r),
    "div": lambda x, r: x / (r.abs() + 1),
    "maximum": lambda x, r: torch.maximum(x, r),
    "minimum": lambda x, r: torch.min(x, r),
    "limits": lambda x, r: x.clamp(-0.3, 0.4),
    "one limit": lambda x, r: x.clamp(min=0.1),
    "limits out of order": lambda x, r: x.clamp(1, -1),
    "hardtanh": lambda x, r: F.hardtanh(x, -0.5, 0.5),
    "relu6": lambda x, r: F.relu6(x),
    "abs, neg": lambda x, r: -x.abs(),
    "reciprocal": lambda x, r: (x.abs() + 1).reciprocal(),
    "sqrt": lambda x, r: x.abs().sqrt(),
    "rsqrt": lambda x, r: torch.rsqrt(x.abs() + 1),
    "exp": lambda x, r: (x * 0.1).exp(),
    "log": lambda x, r: (x.abs() + 1).log(),
    "relu": lambda x, r: F.relu(x),
    "leaky_relu": lambda x, r: F.leaky_relu(x, 0.2),
    "sigmoid": lambda x, r: x.sigmoid(),
    "tanh": lambda x, r: x.tanh(),
    "silu": lambda x, r: F.silu(x),
    "gelu": lambda x, r: F.gelu(x),
    "gelu by tanh": lambda x, r: F.gelu(x, approximate="tanh"),
    "powers": lambda x, r: x**2 + x**3 + (x.abs() + 1) ** -0.5 + x.abs() ** 0.5 + (x.abs() + 1) ** -1,
    "where": lambda x, r: torch.where(r > 0.1, x, r),
    "where with numbers": lambda x, r: torch.where(r != 0, x, -1.0) + torch.where(x <= r, 0.5, x),
    "masked_fill": lambda x, r: x.masked_fill(r > 0, -2.0),
    "truth values": lambda x, r: (x > 0).to(x.dtype) * x + torch.where((x > 0) * (r < 0), x, r),
    "to truth values": lambda x, r: F.relu(x).to(torch.bool).to(x.dtype) + x,
    "half": lambda x, r: x.to(BINARY16),
    "no dropout": lambda x, r: F.dropout(x, 0.0, True) * 2,
    "views": lambda x, r: x[None].squeeze(0).view(1, T, C).reshape(T, C) * 2,
    "sum": lambda x, r: x.sum(-1),
    "mean": lambda x, r: x.mean(-1, keepdim=True),
    "sum in float32": lambda x, r: x.sum(-1, dtype=FULL),
    "amax": lambda x, r: x.amax(-1),
    "amin": lambda x, r: x.amin(-1, keepdim=True),
    "norms": lambda x, r: (
        x.norm(dim=-1) + torch.linalg.vector_norm(x, 1, -1) + torch.linalg.vector_norm(x, math.inf, -1)
    ),
    "variance": lambda x, r: x.float().var(-1) + x.float().var(-1, correction=0),
    "variance and mean": lambda x, r: torch.var_mean(x.float(), -1),
    "softmax": lambda x, r: torch.softmax(x * 0.1, -1),
    "softmax to float32": lambda x, r: torch.softmax(x * 0.1, -1, dtype=FULL),
    "log_softmax": lambda x, r: F.log_softmax(x.float(), -1),
    "logsumexp": lambda x, r: torch.logsumexp(x.float(), -1),
    "layer norm": lambda x, r: F.layer_norm(x, (C,), r[0], r[1], 1e-3),
    "RMS norm": lambda x, r: F.rms_norm(x, (C,), r[0]),
    "normalize": lambda x, r: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dtype):
    function = OPERATIONS[name]
    whole = lambda x, r: function(summed(x), r)  # noqa: E731
    module, given, verdicts = found(whole, rows(dtype), rows(dtype, 1))
    assert verdicts and not any(why for _, why in verdicts)
    calls = [n for n in module.graph.nodes if n.op.startswith("call") and not generated.is_free(n)]
    assert {n.target for n in calls} == {region}
    close(module(*given), whole(rows(dtype), rows(dtype, 1)))


def close(got, want):
    for one, other in zip(as_tuple(got), as_tuple(want), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        exact = 2e-2 if other.dtype.itemsize < 4 else 1e-5
        torch.testing.assert_close(one, other, rtol=exact, atol=exact, equal_nan=True)


REFUSED = {
    "float64": (lambda x: x.double().sum(-1), "makes torch.float64"),
    "integers": (lambda x: x.int() + 1, "makes torch.int32"),
    "a step of a sum": (lambda x: torch.add(x, x, alpha=2), "no op of the table is add.Tensor"),
    "rounded down": (lambda x: torch.div(x, 3, rounding_mode="floor"), "no op of the table is div.Tensor_mode"),
    "detached": (lambda x: x.detach(), "no op of the table is detach.default"),
    "truth values added": (lambda x: (x > 0) + (x < 1), "add.Tensor of truth values"),
    "other powers": (lambda x: x**1.5, "a power of 1.5; accepted: 2, 3, 0.5, -0.5, -1"),
    "another dimension": (
        lambda x: x.sum(0),
        "sum.dim_IntList reduces dimensions (0,); accepted: one, that of other reductions",
    ),
    "all dimensions": (
        lambda x: x.mean((0, 1)),
        "mean.dim reduces dimensions (0, 1); accepted: one, that of other reductions",
    ),
    "elements rounded first": (lambda x: (x * 2).float().sum(-1, dtype=HALF), "sum.dim_IntList of torch.float32 to"),
    "transposed": (lambda x: (x * 2).t(), "no op of the table is t.default"),
    "what is repeated": (
        lambda x: x.float().mean(-1, keepdim=True).expand(T, C).sum(-1),
        "sum.dim_IntList reduces what is repeated",
    ),
    "NaN as a limit": (lambda x: x.clamp(min=math.nan), "clamp.default between nan and None; accepted: numbers"),
    "elements that move": (lambda x: (x * 2).view(-1, 2), "a view that moves elements"),
    "joined dimensions": (lambda x: (x[None] * 2).softmax(1), "_softmax.default reduces dimensions (1,); accepted:"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_translate(what):
    function, why = REFUSED[what]
    module, _ = recorded(function, (rows(),), "dynamo")
    translation = TranslatedGraph()
    for node in module.graph.nodes:
        translation.add(node)
    assert any(said.startswith(why) or why in said for said in translation.why.values()), translation.why


# Numbers and types as torch has them


def compared(function, *tensors, exact=True):
    module, given, verdicts = found(function, *tensors)
    assert verdicts and not any(why for _, why in verdicts)
    for one, other in zip(as_tuple(module(*given)), as_tuple(function(*tensors)), strict=True):
        assert one.dtype is other.dtype
        if exact:
            assert torch.equal(torch.nan_to_num(one.float(), 7.0), torch.nan_to_num(other.float(), 7.0))
        else:
            torch.testing.assert_close(one, other, equal_nan=True)


def test_numbers_are_rounded_where_they_are_compared():
    tenth = torch.full((T, C), 0.1).to(HALF)
    compared(lambda x: ((x == 0.1).float(), (x > 0.1).float(), x.sum(-1)), tenth)


def test_tensors_without_dimensions_are_of_the_others_type():
    number = torch.tensor(0.1)
    tenth = torch.full((T, C), 0.1).to(HALF)
    compared(lambda x, s: ((x >= s).float(), torch.maximum(x, s), torch.where(x > 1, x, s), x.amax(-1)), tenth, number)
    compared(lambda x, s: (x + s, s - x, x * s, s * x, x / s, x.amax(-1)), rows(), torch.tensor(0.3))


def test_a_cube_rounds_the_square():
    compared(lambda x: (x**3, x.amax(-1)), rows())


def test_truth_values_are_zero_or_one():
    x = F.relu(rows(FULL))
    compared(lambda x: ((x > 0.1) * (x < 0.5), x.to(torch.bool), x.to(torch.bool).float() * 2, x.amax(-1)), x)


@pytest.mark.parametrize("function", ["amax", "softmax", "logsumexp", "relu", "gelu", "silu", "clamp", "norm"])
def test_values_that_are_no_numbers(function):
    x = rows(FULL)
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, -math.inf
    functions = {
        "amax": lambda x: (x * 2).amax(-1),
        "softmax": lambda x: torch.softmax(x * 2, -1),
        "logsumexp": lambda x: torch.logsumexp(x * 2, -1),
        "relu": lambda x: (F.relu(x), x.amax(-1)),
        "gelu": lambda x: (F.gelu(x[:2]), x[:2].amax(-1)),
        "silu": lambda x: (F.silu(x), x.amax(-1)),
        "clamp": lambda x: (x.clamp(-1, 1), F.relu6(x), x.amax(-1)),
        "norm": lambda x: F.normalize(x, dim=-1),
    }
    compared(functions[function], x, exact=False)


def test_masked_rows():
    compared(lambda x, m: torch.softmax(x.masked_fill(m, -math.inf), -1), rows(FULL), torch.ones(T, C) > 0, exact=False)


def test_fp8_is_what_torch_casts_to():
    x = rows() * 300
    x[0, :3] = torch.tensor([math.nan, math.inf, 464.0])
    compared(lambda x: (x.to(torch.float8_e4m3fn), x.float().amax(-1)), x)


def test_the_gradient_of_fp8_is_left_to_torch():
    function = lambda x: x.abs().amax(-1, keepdim=True).to(torch.float8_e4m3fn)  # noqa: E731
    *_, verdicts = found(function, rows().requires_grad_())
    assert all("float8" not in judged.title(region) for region, _ in verdicts)


# Gradients


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
    ],
)
def test_gradients_where_values_are_equal(function):
    """Of rows of zeros, and ties."""
    x = rows(FULL).round()
    x[0] = 0
    taken = []

    def backend(module, inputs):
        verdicts, _ = judged.replace_in(module, False, ())
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


def test_rows_that_are_none():
    module, given, verdicts = found(lambda x: torch.softmax(x * 2, -1) + 1, torch.ones(0, C))
    assert verdicts and as_tuple(module(*given))[0].shape == (0, C)


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


def test_gradients_are_differentiated_once():
    x = rows(FULL).requires_grad_()
    w = rows(HALF, 1, (C,))
    (grad,) = torch.autograd.grad(region([x, w], PROGRAM.text)[0].float().sum(), x, create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="its gradient has no derivative"):
        grad.sum().backward()


# The operator


def own(x, w):
    return (x * x.sum(-1, keepdim=True) * w).to(HALF), x.sum(-1)


def test_the_operator():
    x, w = rows(FULL), rows(HALF, 1, (C,))
    for one, other in zip(region([x, w], PROGRAM.text), own(x, w), strict=True):
        torch.testing.assert_close(one, other)
    x.requires_grad_()
    w.requires_grad_()
    grads = [rows(HALF, 2), rows(FULL, 3, (T,))]
    got = torch.autograd.grad(region([x, w], PROGRAM.text), [x, w], grads)
    torch.testing.assert_close(got, torch.autograd.grad(own(x, w), [x, w], grads), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("way", [region, lambda given, text: [RegionOperator.of(text).run(*given)]])
def test_a_program_without_gradients(way):
    steps = (
        ProgramStep("reduction", {"input": "in0"}, {"mode": "AVG"}),
        ProgramStep("cmp_gt", {"input": "in0", "comparison": "@0"}),
    )
    text = Program((RegionInput("in0", "nn", "FLOAT"),), steps, (Result(1, "nn", "FLOAT"),)).text
    for x in (rows(FULL), rows(FULL).requires_grad_()):
        (mask,) = way([x], text)
        assert torch.equal(mask, (x > x.mean(-1, keepdim=True)).float()) and not mask.requires_grad


def test_gradients_without_a_rule_are_refused_where_they_are_asked_for():
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "FLOAT")
    steps = (
        ProgramStep("gelu_backward", {"loss": "in0", "input": "in1"}),
        ProgramStep("reduction", {"input": "@0"}, {"mode": "ADD"}),
    )
    text = Program(inputs, steps, (Result(1, "n-", "FLOAT"),)).text
    for call in (RegionOperator.of(text).run, lambda *given: region(given, text)[0]):
        assert call(rows(FULL), rows(FULL, 1)).shape == (T,)
        with pytest.raises(GraphNotSupportedError, match="the gradient of a gradient is not offered"):
            call(rows(FULL), rows(FULL, 1).requires_grad_())


def test_a_function_of_a_program():
    """It returns what the operator does, also where a mode sees the operator in its place, and for other tensors."""
    run = RegionOperator.of(PROGRAM.text).run
    grads = [rows(HALF, 2), rows(FULL, 3, (T,))]
    for _ in range(3):
        x, w = rows(FULL).requires_grad_(), rows(HALF, 1, (C,)).requires_grad_()
        found = []
        for made in (run(x, w), region([x, w], PROGRAM.text), observed(lambda: run(x, w))):
            found.append([*made, *torch.autograd.grad(made, [x, w], grads)])
        for one in found[1:]:
            assert all(map(torch.equal, found[0], one))
        assert run(x, w)[0].grad_fn.name() == "regionBackward"
        with torch.no_grad():
            for made in (run(x, w), region([x, w], PROGRAM.text), observed(lambda: run(x, w))):
                assert all(map(torch.equal, made, found[0]))
    with pytest.raises(VariantPackError, match=r"in1 has shape \(3,\); accepted: \(32,\)"):
        run(x, w[:3])
    y, total = run(x.detach().to("meta"), w.detach().to("meta"))
    assert y.is_meta and total.shape == (T,)


def observed(function):
    """What a function returns while a mode hears of what it calls: one operator of ours."""

    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    heard = []
    with Heard():
        made = function()
    assert len([name for name in heard if name.startswith("graphfuse.region")]) == 1
    return made


def test_results_that_nobody_uses():
    """Gradients by way of each of three results alone: what it does not depend on has none."""
    steps = (
        ProgramStep("reduction", {"input": "in1"}, {"mode": "ADD"}),
        ProgramStep("mul", {"a": "in0", "b": "in0"}),
        ProgramStep("mul", {"a": "@1", "b": "@0"}),
    )
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "nn", "FLOAT")
    text = Program(inputs, steps, (Result(0, "n-", "FLOAT"), Result(1, "nn", "FLOAT"), Result(2, "nn", "FLOAT"))).text

    def of_torch(x, y):
        return y.sum(-1), x * x, x * x * y.sum(-1, keepdim=True)

    for used in range(3):
        found = []
        for function in (RegionOperator.of(text).run, of_torch):
            x, y = rows(FULL).requires_grad_(), rows(FULL, 1).requires_grad_()
            found.append(torch.autograd.grad(function(x, y)[used].sum(), [x, y], allow_unused=True))
        for got, want in zip(*found, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want)


SUM = Program(
    (RegionInput("in0", "nn", "BFLOAT16"), RegionInput("in1", "nn", "BFLOAT16"), RegionInput("in2", "nn", "FLOAT")),
    (
        ProgramStep("add", {"a": "in0", "b": "in1"}, {}, "BFLOAT16"),
        ProgramStep("add", {"a": "@0", "b": "in2"}),
        ProgramStep("mul", {"a": "@1", "b": "@1"}),
        ProgramStep("reduction", {"input": "@2"}, {"mode": "AVG"}),
    ),
    (Result(0, "nn", "BFLOAT16"), Result(1, "nn", "FLOAT"), Result(3, "n-", "FLOAT")),
)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_terms_of_a_sum_have_one_gradient(used, monkeypatch):
    """It is written once for each type; where it is that of a result, it is not written at all."""
    asked, entry = [], operator.entry
    monkeypatch.setattr(operator, "entry", lambda f, dispatched: counted(f, entry(f, dispatched), asked))
    run = RegionOperator(RegionGraphs(SUM)).run

    def of_torch(x, y, z):
        total = x + y
        return total, total + z, (total + z).square().mean(-1)

    for needed in ((0, 1, 2), (1,), (2,), (0, 2)):
        found = []
        for function in (run, of_torch):
            given = [rows(HALF), rows(HALF, 1), rows(FULL, 2)]
            wanted = [given[n].requires_grad_() for n in needed]
            results = function(*given)
            made = [results[n] for n in used if results[n].requires_grad]
            if made:
                outer = [rows(t.dtype, 3, t.shape) for t in made]
                found.append(torch.autograd.grad(made, wanted, outer, materialize_grads=True))
        for got, want in zip(*found, strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert all(sum(flags) <= 2 for flags in asked) and bool(asked) == (used not in ((0,), (1,)))


def counted(f, function, asked):
    """A function that logs which gradients are asked for; its fast paths do not."""

    def call(*values):
        if f.options:
            asked.append(values[-len(f.options) :])
        return function(*values)

    call.last = lambda: None
    return call


def test_results_of_other_extents_than_what_they_are_made_of():
    """Gradients that are one number after the other, and not of one shape."""
    inputs = RegionInput("in0", "nn", "FLOAT"), RegionInput("in1", "n1", "FLOAT"), RegionInput("in2", "n-", "FLOAT")
    steps = (
        ProgramStep("add", {"a": "in1", "b": "in2"}),
        ProgramStep("add", {"a": "in0", "b": "@0"}),
    )
    text = Program(inputs, steps, (Result(0, "n-", "FLOAT"), Result(1, "nn", "FLOAT"))).text
    for used in ((0,), (1,), (0, 1)):
        found = []
        for function in (RegionOperator.of(text).run, lambda x, a, b: (a[:, 0] + b, x + a + b[:, None])):
            given = [
                rows(FULL).requires_grad_(),
                rows(FULL, 1, (T, 1)).requires_grad_(),
                rows(FULL, 2, (T,)).requires_grad_(),
            ]
            results = function(*given)
            made = [results[n] for n in used]
            outer = [rows(FULL, 3, t.shape) for t in made]
            found.append(torch.autograd.grad(made, given, outer, materialize_grads=True))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


def test_other_ways_of_differentiating_are_refused():
    x, w = rows(FULL), rows(HALF, 1, (C,))
    run = lambda x: RegionOperator.of(PROGRAM.text).run(x, w)[0].float()  # noqa: E731
    for call in (run, lambda x: region([x, w], PROGRAM.text)[0].float()):
        with pytest.raises(GraphNotSupportedError, match="graphfuse::region is differentiated by torch.func"):
            torch.func.grad(lambda x: call(x).sum())(x)
        with pytest.raises(GraphNotSupportedError, match="graphfuse::region has no forward-mode derivative"):
            torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("create_graph", [False, True])
def test_batches_of_gradients(create_graph):
    """As torch.autograd.functional.jacobian(vectorize=True) makes them, by a vmap that is not torch.func's."""
    for asked in ((True, True), (True, False), (False, True)):
        given = [rows(FULL).requires_grad_(asked[0]), rows(HALF, 1, (C,)).requires_grad_(asked[1])]
        made = [t for t in RegionOperator.of(PROGRAM.text).run(*given) if t.requires_grad]
        inputs, outer = [t for t in given if t.requires_grad], [rows(t.dtype, 2, (3, *t.shape)) for t in made]
        want = [torch.autograd.grad(made, inputs, one, retain_graph=True) for one in zip(*outer, strict=True)]
        got = torch.autograd.grad(made, inputs, outer, is_grads_batched=True, create_graph=create_graph)
        assert all(torch.equal(g, torch.stack(each)) for g, each in zip(got, zip(*want, strict=True), strict=True))


def test_vmap():
    x, w = rows(FULL, shape=(3, T, C)).requires_grad_(), rows(HALF, 1, (3, C))
    run = RegionOperator.of(PROGRAM.text).run
    for call in (run, lambda x, w: region([x, w], PROGRAM.text)):
        for given, dims in (((x, w), 0), ((x.movedim(0, 1), w[0]), (1, None)), ((x, w[0]), (0, None))):
            got = torch.func.vmap(lambda x, w: call(x, w)[0], dims)(*given)
            want = torch.stack([own(x[n], w[n] if given[1] is w else w[0])[0] for n in range(3)])
            torch.testing.assert_close(got, want)
            for a, b in zip(*(torch.autograd.grad(y.float().sin().sum(), x) for y in (got, want)), strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)
    with pytest.raises(VariantPackError, match="mapped over 0 samples"):
        torch.func.vmap(lambda x: run(x, w[0])[1])(x[:0])


@pytest.mark.parametrize("gradients", [False, True])
def test_opcheck(gradients):
    tensors = [rows(FULL).requires_grad_(gradients), rows(HALF, 1, (C,)).requires_grad_(gradients)]
    torch.library.opcheck(region, (tensors, PROGRAM.text), rtol=0.02, atol=0.05)


def test_fake_tensors_of_any_number_of_rows():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(rows(FULL), symbolic_context=context)
    w = mode.from_tensor(rows(HALF, 1, (C,)), static_shapes=True)
    y, total = region([x, w], PROGRAM.text)
    assert y.shape == x.shape and total.shape == x.shape[:1] and y.dtype is HALF
    assert not mode.shape_env.guards
    y, total = region([rows(FULL).to("meta"), rows(HALF, 1, (C,)).to("meta")], PROGRAM.text)
    assert y.is_meta and tuple(total.shape) == (T,)


@pytest.mark.emulate
def test_one_plan_for_a_class_of_row_counts(plan_on):
    plan_on("emulator")
    w, before = rows(HALF, 1, (C,)), problem.plan.cache_info().misses
    for count in (600, 640, 601):
        x = rows(FULL, count, (count, C))
        for one, other in zip(region([x, w], PROGRAM.text), own(x, w), strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    assert problem.plan.cache_info().misses - before == 1


# Programs as text


def test_a_program_is_its_text():
    assert Program.read(PROGRAM.text) == PROGRAM and Program.read(PROGRAM.text).text == PROGRAM.text
    infinite = Program(
        PROGRAM.inputs, (*PROGRAM.steps, ProgramStep("max", {"input0": "@1", "input1": -math.inf})), PROGRAM.outputs
    )
    assert Program.read(infinite.text) == infinite


DAMAGED = [
    ("", "JSONDecodeError"),
    ("[]", "TypeError"),
    ("{}", "KeyError: 'inputs'"),
    ('{"inputs":3,"steps":[],"outputs":[]}', "TypeError"),
    ('{"inputs":[],"steps":[],"outputs":[]}', "it has no inputs"),
    (PROGRAM.text[:-3], "JSONDecodeError"),
    (PROGRAM.text.replace('"in1"', '"x"'), "its inputs are ['in0', 'x']; accepted: in0, in1"),
    (PROGRAM.text.replace('"op":"mul"', '"op":"mull"'), "step 1: op 'mull', which the op table lacks"),
    (PROGRAM.text.replace('"@0"', '"@7"'), "step 1: mul reads '@7' as b, which nothing before it makes"),
    (PROGRAM.text.replace('"@1"', "true"), "step 2: mul reads True as a"),
    (PROGRAM.text.replace('"ADD"', '"ADDS"'), "step 0: reduction has mode 'ADDS'; accepted: ADD, "),
    (PROGRAM.text.replace('"nn"', '"nx"'), "in0 has axes 'nx'; accepted: 2 of n, 1 and -"),
    (PROGRAM.text.replace('"axes":"nn"', '"axes":"-n"'), "accepted: what has all rows and columns"),
    (PROGRAM.text.replace('"step":2', '"step":9'), "its outputs are of steps [9, 0]; accepted: different ones of 3"),
    (PROGRAM.text.replace('"FLOAT"', '"FLOTE"'), "has data type 'FLOTE'"),
    (PROGRAM.text.replace('"dtype":"BFLOAT16","inputs"', '"dtype":"B16","inputs"'), "mul makes 'B16'"),
    (PROGRAM.text.replace('"input":', '"inputt":'), "step 0: reduction is given inputt; accepted: input, mode"),
    (PROGRAM.text.replace('"b":"@0"', '"a":"@0"'), "step 1: mul lacks b"),
    (PROGRAM.text.replace('"op"', '"oq"'), "TypeError"),
]


@pytest.mark.parametrize(("text", "why"), DAMAGED, ids=[why for _, why in DAMAGED])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_damaged_texts(text, why, device):
    with pytest.raises(SerializedError) as error:
        region([rows(FULL).to(device), rows(HALF, 1, (C,)).to(device)], text)
    assert why in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_do_not_fit(device):
    x, w = rows(FULL).to(device), rows(HALF, 1, (C,)).to(device)
    for given in ([], [x], [x, w, w], [x, w[:3]], [x.view(2, 2, C), w]):
        with pytest.raises(VariantPackError):
            region(given, PROGRAM.text)
    with pytest.raises(GraphfuseError, match="in0 is of torch.int32"):
        region([x.int(), w], PROGRAM.text)


def test_graphs_of_a_text_are_made_once():
    assert RegionGraphs.of(PROGRAM.text) is RegionGraphs.of(PROGRAM.text)


# Other processes


class OfRegion(torch.nn.Module):
    def forward(self, x, w):
        return region([x, w], PROGRAM.text)


def test_an_exported_program_in_another_process(tmp_path):
    x, w = rows(FULL, shape=(6, C)), rows(HALF, 1, (C,))
    varies = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(OfRegion(), (x, w), dynamic_shapes=(varies, None))
    path, given, results = (tmp_path / name for name in ("program.pt2", "given.pt", "results.pt"))
    torch.export.save(program, path)
    x = rows(FULL, 2, (9, C))
    torch.save((x, w), given)
    text = f"""
import torch
import graphfuse.torch
program = torch.export.load({str(path)!r})
torch.save(program.module()(*torch.load({str(given)!r})), {str(results)!r})
"""
    subprocess.run([sys.executable, "-c", text], check=True)
    for one, other in zip(torch.load(results), own(x, w), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_differentiated(strict):
    run = RegionOperator.of(PROGRAM.text).run

    class OfFunction(torch.nn.Module):
        def forward(self, x, w):
            return run(x, w)

    x, w = rows(FULL), rows(HALF, 1, (C,))
    call = torch.export.export(OfFunction(), (x, w), strict=strict).module()
    grads = [
        torch.autograd.grad(f(leaf, w)[0].sum(), leaf)[0] for f in (call, own) for leaf in [rows(FULL).requires_grad_()]
    ]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.05)
    with pytest.raises(GraphNotSupportedError, match="is differentiated by torch.func"):
        torch.func.grad(lambda x: call(x, w)[1].sum())(x)
    with pytest.raises(GraphNotSupportedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: call(x, w)[1], (x,), (x,))


@pytest.mark.further
def test_a_second_process_with_what_inductor_kept(tmp_path):
    text = f"""
import torch
import graphfuse.torch
from torch._dynamo.utils import counters
from torch.nn import functional as F
function = lambda x, w: F.gelu(F.rms_norm(x, ({C},), w, 1e-6))
x, w = torch.linspace(-1, 1, 4 * {C}).view(4, {C}), torch.ones({C})
compiled = torch.compile(function, backend="graphfuse", options={{"decline": False}})
torch.testing.assert_close(compiled(x, w), function(x, w))
assert "region" in str(graphfuse.torch.compile_report()) or graphfuse.torch.compile_report().replaced
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        hits.append(done.stdout.split())
    assert hits[0] == ["0", "0"] and "1" in hits[1]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_extents_that_nothing_is_known_of():
    function = lambda x: torch.softmax(x[torch.nonzero(x[:, 0] > 0)[:, 0]] * 2, -1)  # noqa: E731
    taken = []

    def backend(module, inputs):
        taken.extend(why for _, why in judged.replace_in(module, False, ())[0])
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for seed in (1, 2):
        x = rows(FULL, seed, (9, C))
        torch.testing.assert_close(compiled(x), function(x))
    assert taken == [""]


@pytest.mark.parametrize("columns", [16, 32])
def test_numbers_of_extents_that_vary(columns):
    def function(x, n):
        return torch.softmax(x * x.shape[-1] ** -0.5, -1) * n + x.sum(-1, keepdim=True) * x.shape[0] ** -0.5

    torch.compiler.reset()
    compiled = torch.compile(function, backend="graphfuse", options={"then": "eager"}, dynamic=True)
    for count, n in ((3, 0.5), (5, 2), (7, 0.25)):
        x = rows(FULL, 0, (count, columns))
        torch.testing.assert_close(compiled(x, n), function(x, n))


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
