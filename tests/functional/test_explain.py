"""What calls would plan to, told without running them; and the warning where a call gets the reference engine."""

import warnings

import pytest
import torch

import graphfuse.torch as gt
from graphfuse import (
    GraphNotSupportedError,
    ReferenceEngineWarning,
    VariantPackError,
    VariantPackTypeError,
    functional,
)
from graphfuse.functional import problem
from graphfuse.runtime import torch_private

BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", "emulator"])
def device(request, plan_on):
    plan_on(request.param)
    return request.param


@pytest.fixture
def emulator(plan_on):
    plan_on("emulator")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, request):
    """Only planning: a build would compile."""
    if "warn" not in request.node.name:
        monkeypatch.setattr("graphfuse.planning.planner.Planner.build", None)


def x(*shape, **kind):
    return torch.full(shape or (6, 64), 2.0, dtype=BF16, **kind)


def test_a_function(device):
    given, residual, weight = x(), x(), x(64)
    found = functional.explain(functional.fused_add_rmsnorm, given, residual, weight, eps=1e-5)
    (region,) = found.regions
    assert (found.graph, found.device, region.engine) == (
        "fused_add_rmsnorm",
        device,
        {"cpu": "reference", "emulator": "rows"}[device],
    )
    assert (given == 2).all() and (residual == 2).all()
    moved = 4 * 6 * 64 * 2 + 64 * 2
    assert (found.after.total == moved) == (device == "emulator")


def test_defaults_and_options(emulator):
    found = functional.explain(functional.rmsnorm_fp4quant, x(), x(64), block_size=32, scale_format="ue8m0")
    assert {t.dtype for t in found.tensors if t.role == "output"} == {"FP4_E2M1", "FP8_E8M0"}
    with pytest.raises(VariantPackError, match="weight"):
        functional.explain(functional.rmsnorm, x(), x(63))
    with pytest.raises(VariantPackTypeError, match="enable_pdl is int"):
        functional.explain(functional.rmsnorm, x(), x(64), enable_pdl=1)
    with pytest.raises(TypeError, match="weight"):
        functional.explain(functional.rmsnorm, x())


def test_reasons_are_those_of_the_call(emulator):
    spread = x(64, 128)[:, ::2]
    found = functional.explain(functional.fused_add_rmsnorm, spread, x(64, 64), x(64))
    assert found.regions[0].engine == "reference" and "stride" in str(found)
    found = functional.explain(functional.rmsnorm, spread, x(64))
    assert found.graph == "rmsnorm of contiguous copies of input" and found.regions[0].engine == "rows"
    assert "stride" not in str(found)


def test_functions_of_torch(device):
    weight = x(64)
    for values, graph in (((x(), weight), "rms_norm"), ((x(requires_grad=True), weight), "rms_norm_training")):
        assert functional.explain(gt.rms_norm, *values).graph == graph
    assert functional.explain(gt.softmax, x()).graph == "differentiable_softmax"
    assert functional.explain(gt.add_rms_norm, x(), x(), weight, bias=weight).graph == "add_rms_norm_bias"
    target = torch.zeros(6, dtype=torch.int64)
    assert functional.explain(gt.cross_entropy, x(), target, label_smoothing=0.1).graph == "cross_entropy_loss"
    assert functional.explain(gt.CrossEntropyLoss(reduction="sum"), x(), target).graph == "cross_entropy_loss"


def test_modules_of_torch(device):
    module = gt.RMSNorm(64)
    assert functional.explain(module, x()).graph == "rms_norm_training"
    with torch.no_grad():
        assert functional.explain(module, x()).graph == "rms_norm"


def test_a_fast_path_does_not_run_instead(emulator, monkeypatch):
    monkeypatch.undo()
    norm = gt.RMSNorm(64).requires_grad_(False)
    for given in (x(), x()):
        norm(given)
        functional.rmsnorm(given, x(64), out=given)
    given = x()
    assert functional.explain(norm, given).graph == "rms_norm"
    functional.explain(functional.rmsnorm, given, x(64), out=given)
    assert (given == 2).all()


@pytest.mark.parametrize("other", [torch.nn.functional.rms_norm, torch.nn.RMSNorm(64), len, functional, 3])
def test_others_are_refused(other):
    with pytest.raises(VariantPackTypeError, match="is none of ours; accepted: functions of graphfuse.functional"):
        functional.explain(other, x())


def test_warns_once_of_the_reference_engine(emulator):
    problem.warned.clear()
    spread = x(10, 128)[:, ::2]
    with pytest.warns(ReferenceEngineWarning) as said:
        for rows in (3, 5, 7):
            functional.fused_add_rmsnorm(spread[:rows], x(rows, 64), x(64))
    (message,) = [str(w.message) for w in said]
    assert message.startswith("graphfuse: fused_add_rmsnorm runs on the reference engine, which is slow: add.0, ")
    assert "stride" in message and "graphfuse.functional.explain(" in message
    with pytest.warns(ReferenceEngineWarning, match="rms_norm_training runs on the reference engine"):
        gt.rms_norm(x().double().requires_grad_(), x(64).double())


@pytest.mark.parametrize("rows", [0, 3])
def test_no_warning_where_a_kernel_runs(emulator, rows):
    problem.warned.clear()
    problem.plan.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.rmsnorm(x(rows, 64), x(64))


def test_no_warning_where_there_are_no_kernels(monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", "cpu")
    problem.warned.clear()
    problem.plan.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.rmsnorm(x(3, 64), x(64))


def test_where_torch_does_not_show_which_operators_are_called(monkeypatch):
    monkeypatch.setattr(torch_private, "dispatched_to", lambda call: None)
    with pytest.raises(GraphNotSupportedError, match="accepted: functions of graphfuse.functional"):
        functional.explain(gt.softmax, x())
    assert functional.explain(functional.softmax, x()).regions
