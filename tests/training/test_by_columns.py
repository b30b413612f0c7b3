"""The steps of a norm whose columns are split: kernels run them, and one rank with all columns has the norm."""

import pytest
import torch

from graphfuse.explain import fallback
from graphfuse.functional.declaration import RankColumns
from graphfuse.functional.explanation import explain
from graphfuse.torch.operators import norm_by_columns
from graphfuse.torch.operators.norm import Norm
from graphfuse.torch.operators.norm_by_columns import NormByColumns
from support.training_calls import EPS, layer_norm, norm

pytestmark = pytest.mark.torch

KINDS = {
    "rms_norm": {},
    "bias": {"bias": True},
    "gate": {"silu": True, "gate": True},
    "residual": {"residual": True},
    "gemma": {"zero_centred": True, "residual": True},
    "layer_norm": {"centred": True},
    "layer norm of a sum": {"centred": True, "residual": True, "bias": True},
}


def whole(kind, dtype):
    """Arguments forward and backward, of one rank with 64 columns."""
    of = Norm(**kind)
    x, weight = torch.randn(4, 64).to(dtype), torch.randn(64).to(dtype)
    given = {"x": x, "residual": x.flip(0), "gate": x.flip(1), "weight": weight, "bias": weight.flip(0), "eps": EPS}
    asked = {a.asked: True for a in of.gradients}
    return of, NormByColumns(of), given, given | {"dy": x.flip(0, 1), "dtotal": None} | asked


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_kernels(kind, plan_on, monkeypatch):
    """Also where no gradient of a weight is asked for, which would be a sum over rows."""
    of, by_columns, given, backward = whole(KINDS[kind], torch.bfloat16)
    part, asked = RankColumns(64, 128, lambda t: t * 2), []
    run = norm_by_columns._run

    def seen(step, given):
        asked.append((step, dict(given)))
        return run(step, given)

    monkeypatch.setattr(norm_by_columns, "_run", seen)
    name = f"of_a_test_{kind}".replace(" ", "_")
    made = by_columns.forward(name, given, part)
    backward |= {a.name: made[a.name] for a in of.statistics}
    without = {a.asked: a.asked in ("needs_dx", "needs_dresidual") for a in of.gradients}
    for more in ({}, without):
        by_columns.backward(f"{name}_backward", backward | more, part)
    plan_on("emulator")
    assert len(asked) == 6
    for step, given in asked:
        values = (given[n] for n in step.declaration.parameters)
        assert fallback(explain(step.function, *values)) is None, step.declaration.name


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_one_rank_with_all_columns(kind):
    of, by_columns, given, backward = whole(KINDS[kind], torch.float64)
    part = RankColumns(64, 64, lambda t: t)
    made = by_columns.forward(f"of_one_rank_{kind}", given, part)
    x, weight = (given[n].clone().requires_grad_() for n in ("x", "weight"))
    exact = {"rms_norm": norm, "layer_norm": layer_norm}[kind](x, weight)
    torch.testing.assert_close(made["y"], exact.detach())
    backward |= {a.name: made[a.name] for a in of.statistics}
    exact.backward(backward["dy"])
    for more in ({}, {"needs_dweight": False}):
        made = by_columns.backward(f"of_one_rank_{kind}_backward", backward | more, part)
        torch.testing.assert_close(made["dx"], x.grad)
        assert (made["dweight"] is None) == bool(more)
        if not more:
            torch.testing.assert_close(made["dweight"], weight.grad)
