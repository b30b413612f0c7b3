"""What no op of the table computes, taken apart as torch does for compilers: values and gradients are eager mode's, at
limits, too; what has others is left, and what inductor generates is known."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import recorded_result
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.regions.translate import TranslatedGraph
from support.regions import BINARY16, FULL, HALF, C, found, rows
from support.traces import BELOW, recorded

pytestmark = pytest.mark.torch

EACH = {"reduction": "none"}

# Functions of two tensors, of which the second is between 0 and 1.
LOSSES = {
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, **EACH),
    "weights of positives": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y.detach(), **EACH),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, **EACH),
    "smooth_l1_loss of a half": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5, **EACH),
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.5, **EACH),
    "mse_loss": lambda x, y: F.mse_loss(x, y, **EACH),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x / 4, y.detach() - 0.5, **EACH),
    "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, (y > 0.5).to(x.dtype) * 2 - 1, **EACH),
    "kl_div": lambda x, y: F.kl_div(x, y.detach(), **EACH),
    "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y, **EACH),
}
FUNCTIONS = {
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 1.0, 0.25),
    "log1p": lambda x: torch.log1p(x.abs()),
    "expm1": torch.expm1,
    "exp2": torch.exp2,
    "frac": torch.frac,
    "nan_to_num": torch.nan_to_num,
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    "logit": lambda x: torch.logit(x.sigmoid(), 0.125),
    "ndtr": torch.special.ndtr,
}
OF_TWO = {
    "logaddexp": torch.logaddexp,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "a step of a sum": lambda x, y: torch.add(x, y, alpha=2),
    "ldexp": lambda x, y: torch.ldexp(x, y.detach()),
}
ALL = {**LOSSES, **OF_TWO, **{name: lambda x, y, f=f: f(x) for name, f in FUNCTIONS.items()}}
ROWS = {
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "pairwise_distance": F.pairwise_distance,
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, x * y, **EACH),
    "multilabel_soft_margin_loss": lambda x, y: F.multilabel_soft_margin_loss(x, y, **EACH),
    "nansum": lambda x, y: x.nansum(-1),
    "renorm": lambda x, y: x.renorm(2, 0, 1.0),
}
ERROR = {FULL: 1e-5, HALF: 2.0**-6, BINARY16: 2.0**-9}
"""Beside eager mode, which rounds a difference before it is squared."""


def given(dtype):
    """Rows, of which one has what limits are at; numbers between 0 and 1, which are equal to it in places."""
    x, y = rows(FULL), rows(FULL, seed=1).sigmoid()
    limits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 30.0])
    x[1] = torch.cat([limits, -limits]).repeat_interleave(C // 16)
    y[1] = torch.tensor([0.0, 1.0]).repeat(C // 2)
    return x.to(dtype), y.to(dtype)


def as_rows(function):
    """The function of elements, and a sum of it: its gradients are reduced, too."""

    def of_rows(x, y):
        made = function(x, y)
        return made + made.float().mean(-1, keepdim=True).to(made.dtype)

    return of_rows


def is_region_alone(module):
    computed = [n for n in module.graph.nodes if n.op.startswith("call") and not inductor.is_free(n)]
    return sum("region" in str(n.target) for n in computed) == 1 and not any(map(inductor.is_reduction, computed))


@pytest.mark.parametrize("dtype", [FULL, HALF, BINARY16], ids=str)
@pytest.mark.parametrize("name", [*ALL, *ROWS])
def test_values(name, dtype):
    function = ROWS.get(name) or as_rows(ALL[name])
    tensors = given(dtype)
    module, arguments, verdicts = found(function, *tensors)
    (_, why), *others = verdicts
    assert not why and not others and is_region_alone(module)
    (made,), want = module(*arguments), function(*tensors)
    assert made.dtype is want.dtype
    torch.testing.assert_close(made, want, rtol=ERROR[dtype], atol=ERROR[dtype], equal_nan=True)


@pytest.mark.parametrize("name", [*ALL, "cosine_similarity", "renorm"])
def test_gradients_at_limits(name):
    function = ROWS.get(name) or as_rows(ALL[name])
    tensors = [t.requires_grad_() for t in given(FULL)]
    module, arguments, verdicts = found(function, *tensors)
    if (
        name == "cosine_similarity" and BELOW == "cmp_le"
    ):  # its parts clamp, without a gradient at the limit from 2.15 on
        assert not verdicts
        return
    assert [why for _, why in verdicts] == [""] and is_region_alone(module)
    (made,), want = module(*arguments), function(*tensors)
    g = rows(FULL, seed=2, shape=want.shape)
    got, wanted = (torch.autograd.grad(t, tensors, g, materialize_grads=True) for t in (made, want))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


OTHERS = {
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(y, y, **EACH),
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "sinc": lambda x, y: torch.sinc(x),
}
"""The gradients of their parts are NaN where theirs are numbers."""


def left(function, tensors):
    module, _ = recorded(function, tensors, "dynamo")
    translation = TranslatedGraph()
    for node in module.graph.nodes:
        translation.add(node)
    return [why for node, why in translation.why.items() if node.op.startswith("call")]


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_other_gradients_is_left_in_training(name):
    x, y = given(FULL)
    (why,) = left(OTHERS[name], (x.requires_grad_(), y.requires_grad_()))
    assert why.startswith("torch's decomposition of ") and why.endswith(" has other values or gradients")
    assert name in why and not left(OTHERS[name], given(FULL))


def test_why_names_what_is_in_the_way():
    (why,) = left(torch.copysign, given(FULL))
    assert why == "no op computes signbit.default of such arguments, which copysign calls"


def test_reports_name_what_was_taken_apart():
    module, _ = recorded(ROWS["cosine_similarity"], given(FULL), "dynamo")
    (entry,) = compiled_graphs.replace_in(module, declines=False)
    assert entry.became == "region" and entry.why.startswith("reduction, ")


# What inductor generates: functions of it, and whether they reduce.
GENERATED = {
    "smooth_l1_loss": (LOSSES["smooth_l1_loss"], False),
    "a sum of losses": (lambda x, y: F.smooth_l1_loss(x, y), True),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), True),
    "cosine_similarity": (ROWS["cosine_similarity"], True),
    "instance_norm": (lambda x, y: F.instance_norm(x[None]), True),
    "group_norm": (lambda x, y: F.group_norm(x, 4), True),
    "glu": (lambda x, y: F.glu(x), False),
    "tril": (lambda x, y: x.tril(), False),
    "cumsum": (lambda x, y: x.cumsum(-1), True),
    "outer": (lambda x, y: torch.einsum("ij,ij->ij", x, y), False),
}
CALLED = {
    "linear": lambda x, y: F.linear(x, y),
    "bilinear": lambda x, y: F.bilinear(x, y, x.new_ones(1, C, C)),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "sort": lambda x, y: x.sort()[0],
}


def computed(function):
    module, _ = recorded(function, given(FULL), "dynamo")
    nodes = (
        n
        for n in module.graph.nodes
        if n.op.startswith("call") and isinstance(recorded_result(n), torch.Tensor | tuple)
    )
    return [n for n in nodes if not inductor.is_free(n)][-1]


@pytest.mark.parametrize("name", GENERATED)
def test_what_inductor_generates_is_known(name):
    function, reduces = GENERATED[name]
    node = computed(function)
    assert inductor.is_generated(node) and inductor.is_reduction(node) == reduces


@pytest.mark.parametrize("name", CALLED)
def test_what_libraries_compute_is_known(name):
    assert not inductor.is_generated(computed(CALLED[name]))
