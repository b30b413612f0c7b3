"""Weights for each head and biases: values against float64, in one kernel, and what is refused."""

import functools

import pytest
import torch

from graphfuse import GraphfuseError, VariantPackError, VariantPackTypeError, create_handle, functional, heur_mode
from graphfuse.functional import problem
from support import oracle
from support.functional_calls import EPS, F8, F8_WIDE, check

pytestmark = pytest.mark.torch


def values(shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias):
    """By heads one by one, so that no broadcasting rule is taken for granted."""
    if weight.dim() == 1:
        y = oracle.rmsnorm(x, weight, EPS)[0]
        return y if bias is None else y + bias.double()
    heads = [oracle.rmsnorm(x[..., h, :], weight[h], EPS)[0] for h in range(weight.shape[0])]
    y = torch.stack(heads, dim=-2)
    return y if bias is None else y + torch.stack([bias[h].double() for h in range(weight.shape[0])])


SHAPES = {
    "tokens": (5, 3, 64),
    "batch": (2, 5, 3, 64),
    "one token": (1, 3, 64),
    "no tokens": (0, 3, 64),
    "alone": (3, 64),
}
KINDS = {
    "heads": (True, None),
    "heads and bias": (True, torch.bfloat16),
    "bias": (False, torch.bfloat16),
    "wide bias": (False, torch.float32),
}


def case(shape, kind, dtype=torch.bfloat16):
    heads, bias = KINDS[kind]
    of = shape[-2:] if heads else shape[-1:]
    return values(shape, 0, dtype), values(of, 1, dtype), None if bias is None else values(of, 2, bias)


@pytest.fixture
def engines(monkeypatch):
    """The engines of the graphs of calls from now on, as planned for the emulator."""
    found, plan = [], problem.plan.__wrapped__

    def both(name, variant, layouts, device, generation):
        graph = problem.build_graph(name, variant, dict(layouts), create_handle("emulator")).graph
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE])
        found.append(graph.get_engine_and_knobs_at_index(0)[0])
        return plan(name, variant, layouts, device, generation)

    monkeypatch.setattr(problem, "plan", functools.cache(both))
    for name in ("rmsnorm", "fused_add_rmsnorm", "qk_rmsnorm"):
        getattr(functional, name).problems.clear()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rmsnorm(shape, kind, dtype, engines):
    x, weight, bias = case(shape, kind, dtype)
    for _ in range(3):  # the long way, then the short one
        check({"out": functional.rmsnorm(x, weight, EPS, bias=bias)}, {"out": exact(x, weight, bias)})
    assert engines == ["rows"]


def test_groups_of_a_row_are_heads_of_views(engines):
    x, weight, out = values((5, 192), 0), values((192,), 1), torch.empty(5, 192).bfloat16()
    functional.rmsnorm(x.unflatten(-1, (3, -1)), weight.unflatten(0, (3, -1)), EPS, out.unflatten(-1, (3, -1)))
    groups = [oracle.rmsnorm(x[:, g : g + 64], weight[g : g + 64], EPS)[0] for g in (0, 64, 128)]
    check({"out": out}, {"out": torch.cat(groups, dim=1)})
    assert engines == ["rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_fused_add_rmsnorm(kind, engines):
    x, weight, bias = case((5, 3, 64), kind)
    residual = values((5, 3, 64), 3)
    total = x.double() + residual.double()
    for out in (None, torch.empty(5, 3, 64)):
        given, added = x.clone(), residual.clone()
        functional.fused_add_rmsnorm(given, added, weight, EPS, out=out, bias=bias)
        made = {"out": given if out is None else out, "residual": added}
        check(made, {"out": exact(total, weight, bias), "residual": total})
    assert set(engines) == {"rows"}


@pytest.mark.parametrize("alike", [False, True], ids=["one kind", "both"])
def test_qk_rmsnorm(alike, engines):
    """Slices of a packed tensor, each head with weights of its own; or queries alone."""
    packed = values((7, 10, 64), 0)
    q, k = packed[:, :4], packed[:, 4:6]
    q_weight, k_weight = values((4, 64), 1), values((2, 64) if alike else (64,), 2)
    for _ in range(2):
        made = dict(zip("qk", functional.qk_rmsnorm(q, k, q_weight, k_weight, EPS), strict=True))
        check(made, {"q": exact(q, q_weight, None), "k": exact(k, k_weight, None)})
    assert engines == [("rows", "rows")]


@pytest.mark.parametrize("kind", [F8, F8_WIDE, torch.float32], ids=str)
def test_types_and_strides(kind, engines):
    x, weight, bias = case((6, 3, 64), "heads and bias")
    x = torch.nn.functional.pad(x, (8, 8), value=7.0)[..., 8:-8][::2]
    weight, bias = weight.float(), bias.half()
    out = torch.empty(3, 3, 64, dtype=kind)
    assert functional.rmsnorm(x, weight, EPS, out, bias=bias) is out
    check({"out": out}, {"out": exact(x, weight, bias)})
    assert engines == ["rows"]


def test_weights_of_both_kinds_in_turns():
    """What is remembered of one kind does not stand for the other."""
    x = values((3, 3, 64), 0)
    for n in range(6):
        weight = values((3, 64) if n % 2 else (64,), n)
        bias = values(weight.shape, n + 10) if n % 3 else None
        check({"out": functional.rmsnorm(x, weight, EPS, bias=bias)}, {"out": exact(x, weight, bias)})


@pytest.mark.emulate
@pytest.mark.parametrize("shape", [(5, 3, 64), (1, 3, 64), (2, 5, 3, 72)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_the_emulator(shape, kind, plan_on):
    plan_on("emulator")
    x, weight, bias = case(shape, kind)
    check({"out": functional.rmsnorm(x, weight, EPS, bias=bias)}, {"out": exact(x, weight, bias)})


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_compiled(given):
    def function(x, weight, bias, out=None):
        return functional.rmsnorm(x, weight, EPS, out, bias=bias)

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    for kind in ("heads and bias", "bias", "heads"):
        x, weight, bias = case((5, 3, 64), kind)
        out = torch.empty(5, 3, 64) if given else None
        with torch.no_grad():
            made = fast(x, weight, bias, out)
        assert torch.equal(made, function(x, weight, bias, out))


X = values((5, 3, 64), 0)
ROWS, HEADS = torch.ones(64), torch.ones(3, 64)
REFUSED = {
    "heads": (
        {"weight": torch.ones(2, 64)},
        VariantPackError,
        r"weight has shape \(2, 64\); accepted: \(64,\) or \(3, 64\)",
    ),
    "of each row": ({"weight": torch.ones(5, 3, 64)}, VariantPackError, r"accepted: \(64,\) or \(3, 64\), as input"),
    "of a vector": (
        {"input": X[0, 0], "weight": HEADS},
        VariantPackError,
        r"weight has .*; accepted: \(64,\), as input",
    ),
    "bias of rows": ({"weight": HEADS, "bias": ROWS}, VariantPackError, r"bias has shape \(64,\); accepted: \(3, 64\)"),
    "bias of heads": ({"bias": HEADS}, VariantPackError, r"bias has shape \(3, 64\); accepted: \(64,\)"),
    "bias type": ({"bias": ROWS.double()}, VariantPackTypeError, "bias is of torch.float64; accepted: bfloat16"),
    "no tensor": ({"bias": 0.5}, VariantPackTypeError, "bias must be a torch tensor, got float"),
    "overlap": ({"bias": ROWS, "weight": ROWS, "out": ROWS.expand(5, 3, 64)}, VariantPackError, "out"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(change, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            functional.rmsnorm(**{"input": X, "weight": ROWS} | change)
        assert isinstance(caught.value, GraphfuseError)
        functional.rmsnorm(X, ROWS, bias=ROWS), functional.rmsnorm(X, HEADS, bias=HEADS)


def test_other_functions_have_weights_for_columns_alone():
    for call in (functional.gemma_rmsnorm, functional.fused_rmsnorm_silu, functional.rmsnorm_fp4quant):
        with pytest.raises(VariantPackError, match=r"weight has shape \(3, 64\); accepted: \(64,\)"):
            call(X, HEADS)
