"""Weights for each head and biases: results and gradients against float64, which engines take them, what is refused."""

import pytest
import torch

from graphfuse import GraphfuseError, VariantPackError, VariantPackTypeError, create_handle, heur_mode
from graphfuse import torch as training
from graphfuse.functional import problem
from support.training_calls import EPS, close, norm

pytestmark = pytest.mark.torch

SHAPES = {
    "tokens": (5, 3, 64),
    "batch": (2, 4, 3, 64),
    "one token": (1, 3, 64),
    "no tokens": (0, 3, 64),
    "alone": (3, 64),
}


def values(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def case(shape, dtype=torch.float32, weight=True, bias=True, scales=None):
    """x, and weight and bias of its heads."""
    kind = scales or dtype
    made = [values(shape, 0, dtype), weight and values(shape[-2:], 1, kind), bias and values(shape[-2:], 2, kind)]
    return [t if isinstance(t, torch.Tensor) else None for t in made]


def exact(x, weight, bias):
    y = norm(x, weight)
    return y if bias is None else y + bias


def check(x, weight, bias, function=None, reference=exact):
    """Results and gradients against torch's own in float64."""
    given = [t for t in (x, weight, bias) if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = (function or (lambda x, w, b: training.rms_norm(x, w, EPS, b)))(x, weight, bias)
    want = reference(*wide)
    outer = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert y.dtype is x.dtype
    close(y, want)
    got = torch.autograd.grad(y, given, outer.to(y.dtype))
    expected = torch.autograd.grad(want, [t for t in wide if t is not None], outer.to(y.dtype).double())
    for a, b, t in zip(got, expected, given, strict=True):
        assert a.dtype is t.dtype and a.shape == t.shape
        close(a, b)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_for_each_head(shape, dtype, bias):
    check(*case(shape, dtype, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_of_their_own(dtype):
    check(*case((5, 3, 64), torch.bfloat16, scales=torch.float32))
    x, weight, _ = case((5, 3, 64), dtype)
    check(x, weight, values((3, 64), 3, torch.float16))


def test_bias_without_weight():
    check(values((5, 64), 0), None, values((64,), 1))


@pytest.mark.parametrize("asked", ["x", "weight", "bias"])
def test_one_gradient_alone(asked):
    given = dict(zip(("x", "weight", "bias"), case((5, 3, 64)), strict=True))
    all_of = torch.autograd.grad(
        training.rms_norm(given["x"], given["weight"], EPS, given["bias"]).sum(), [*given.values()]
    )
    plain = {n: t if n == asked else t.detach() for n, t in given.items()}
    (one,) = torch.autograd.grad(training.rms_norm(plain["x"], plain["weight"], EPS, plain["bias"]).sum(), plain[asked])
    assert torch.equal(one, dict(zip(given, all_of, strict=True))[asked])


OTHERS = {
    "silu": (lambda x, w, b: training.rms_norm_silu(x, w, EPS), lambda x, w, b: torch.nn.functional.silu(norm(x, w))),
    "gemma": (lambda x, w, b: training.gemma_rms_norm(x, w, EPS), lambda x, w, b: norm(x, w + 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_for_each_head_of_other_operators(name):
    function, reference = OTHERS[name]
    check(*case((5, 3, 64), bias=False), function, reference)


def test_a_residual_sum():
    x, weight, bias = case((5, 3, 64))
    residual = values((5, 3, 64), 4)
    check(x, weight, bias, lambda x, w, b: training.add_rms_norm(x, residual.detach(), w, EPS, b)[0],
          lambda x, w, b: exact(x + residual.detach().double(), w, b))  # fmt: skip
    y, total = training.add_rms_norm(x, residual, weight, EPS, bias)
    a, b = torch.autograd.grad(y.sum() + (2 * total).sum(), [x, residual])
    assert torch.equal(a, b) and torch.equal(total, x + residual)


def test_compiled():
    given = case((5, 3, 64))
    fast = torch.compile(lambda x, w, b: training.rms_norm(x, w, EPS, b), fullgraph=True, backend="aot_eager")
    check(*given, function=fast)
    assert torch.equal(fast(*given), training.rms_norm(given[0], given[1], EPS, given[2]))


def test_gradcheck():
    given = case((2, 3, 8), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w, b: training.rms_norm(x, w, EPS, b), given)


REFUSED = {
    "weight of other heads": ({"weight": torch.ones(2, 64)}, VariantPackError, r"\(64,\) or \(3, 64\), as x has shape"),
    "weight of each row": ({"weight": torch.ones(5, 3, 64)}, VariantPackError, r"accepted: \(64,\) or \(3, 64\)"),
    "bias unlike weight": ({"bias": torch.ones(64)}, VariantPackError, r"bias has shape \(64,\); accepted: \(3, 64\)"),
    "bias without weight": (
        {"weight": None, "bias": torch.ones(3, 64)},
        VariantPackError,
        r"bias has shape \(3, 64\); accepted: \(64,\)",
    ),
    "bias that is no tensor": ({"bias": 1.0}, VariantPackTypeError, "bias must be a torch tensor, got float"),
    "bias of another type": ({"bias": torch.ones(3, 64).int()}, VariantPackTypeError, "bias is of torch.int32"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(change, error, message):
    given = {"x": torch.ones(5, 3, 64), "weight": torch.ones(3, 64), "bias": torch.ones(3, 64)} | change
    for x in (given["x"], given["x"].requires_grad_()):
        with pytest.raises(error, match=message) as caught:
            training.rms_norm(x, given["weight"], EPS, given["bias"])
        assert isinstance(caught.value, GraphfuseError)


@pytest.fixture
def engines(monkeypatch):
    """The engines of the graphs of calls from now on, by name, as planned for the emulator."""
    found, plan = {}, problem.plan.__wrapped__

    def both(name, variant, layouts, device, generation):
        graph = problem.build_graph(name, variant, dict(layouts), create_handle("emulator")).graph
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
        found[name] = graph.get_engine_and_knobs_at_index(0)[0]
        return plan(name, variant, layouts, device, generation)

    monkeypatch.setattr(problem, "plan", both)
    return found


def test_which_engines_take_them(engines):
    """One kernel forward, and one for a gradient of x, or of the weight alone: its sums over few rows of a head are
    those of columns that lie apart."""
    for name, bias in (("rms_norm_bias", True), ("rms_norm", False)):
        x, weight, bias = case((23, 3, 64), bias=bias)
        plain = [None if t is None else t.detach() for t in (x, weight, bias)]
        training.rms_norm(x, plain[1], EPS, plain[2]).sum().backward()
        assert engines[f"{name}_training"] == engines[f"{name}_backward"] == "rows"
        training.rms_norm(plain[0], weight, EPS, plain[2]).sum().backward()
        assert engines[f"{name}_backward"] == "rows"
    x, bias = values((23, 64), 0), values((64,), 1)
    torch.autograd.grad(training.rms_norm(x, values((64,), 2), EPS, bias).sum(), (x, bias))
    assert engines["rms_norm_bias_backward"] == "rows"


@pytest.mark.emulate
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_on_the_emulator(dtype, bias, plan_on):
    plan_on("emulator")
    x, weight, bias = case((29, 3, 72), dtype, bias=bias)
    check(x, *(None if t is None else t.detach().requires_grad_() for t in (weight, bias)))
