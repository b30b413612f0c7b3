"""Prepared calls: the same bits as their functions, for tensors like accepted ones alone."""

import pytest
import torch

from graphfuse.functional import layernorm, rmsnorm
from graphfuse.functional.prepared import PreparedCall, prepare
from graphfuse.runtime.fastcall import DECLINED

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 6, 32


def given(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(ROWS, COLUMNS).to(dtype), "weight": torch.randn(COLUMNS).to(dtype)}


def norms(x: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor, made: torch.Tensor) -> list:
    """RMSNorm into memory behind a row that is not used, then a layer norm of all rows but the first of that."""
    between = memory.as_strided(x.shape, x.stride(), COLUMNS)
    return [
        (rmsnorm, (x, weight, 1e-3, between)),
        (layernorm, (between[1:], weight, None, 0.5, made)),
    ]


def new(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"made": x.new_empty(ROWS - 1, COLUMNS), "memory": x.new_empty((ROWS + 1) * COLUMNS)}


def run(calls: list) -> None:
    for function, arguments in calls:
        function(*arguments)


def prepared(of: dict[str, torch.Tensor]) -> PreparedCall:
    tensors = new(of["x"])
    run(calls := norms(*of.values(), tensors["memory"], tensors["made"]))
    found = prepare(of, tensors, calls)
    found.accept(*of.values())
    return found


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_the_bits_of_the_functions(device, plan_on):
    plan_on(device)
    found = prepared(given())
    for seed in range(3):
        of = given(seed=seed)
        tensors = new(of["x"])
        run(norms(*of.values(), tensors["memory"], tensors["made"]))
        assert torch.equal(found(*of.values()), tensors["made"])


def test_each_call_returns_a_tensor_of_its_own():
    found, of = prepared(given()), given()
    first = found(*of.values())
    kept = first.clone()
    assert found(*given(seed=1).values()).data_ptr() != first.data_ptr() and torch.equal(first, kept)


OTHERS = {
    "type": lambda x, weight: (x.bfloat16(), weight),
    "rows": lambda x, weight: (x[1:], weight),
    "strides": lambda x, weight: (x.t().contiguous().t(), weight),
    "address": lambda x, weight: (torch.cat([x.flatten(), x[0]])[1 : x.numel() + 1].view_as(x), weight),
    "class": lambda x, weight: (torch.nn.Parameter(x, requires_grad=False), weight),
    "gradients": lambda x, weight: (x, weight.clone().requires_grad_()),
    "conjugate": lambda x, weight: (torch._neg_view(x), weight),
    "twice": lambda x, weight: (x, x),
    "none": lambda x, weight: (x, None),
    "number": lambda x, weight: (1.0, weight),
    "nested": lambda x, weight: (torch.nested.nested_tensor([x]), weight),
    "meta": lambda x, weight: (x.to("meta"), weight),
    "too few": lambda x, weight: (x,),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_values_are_declined(other):
    found = prepared(given())
    assert found(*OTHERS[other](*given().values())) is DECLINED


def test_gradients_and_autocast_are_declined():
    of = given()
    of["weight"].requires_grad_()
    with torch.no_grad():
        found = prepared(of)
        assert found(*of.values()) is not DECLINED
        with torch.autocast("cpu"):
            assert found(*of.values()) is DECLINED
    assert found(*of.values()) is DECLINED
    found.accept(*given().values())
    assert found(*given().values()) is not DECLINED and found(*of.values()) is DECLINED


def test_tensors_are_accepted_in_several_forms():
    found = prepared(given())
    want = found(*given().values())
    with torch.inference_mode():
        others = [*given().values()]
        assert found(*others) is DECLINED
        found.accept(*others)
        assert torch.equal(found(*others), want)
    assert torch.equal(found(*given().values()), want)


def test_copies_and_tensors_that_overlap_are_not_prepared():
    of = given()
    tensors = new(of["x"])
    copied = norms(of["x"].clone(), of["weight"], tensors["memory"], tensors["made"])
    inside = {"x": of["x"], "weight": of["x"][0]}
    for tensors_of, calls in ((of, copied), (inside, norms(*inside.values(), tensors["memory"], tensors["made"]))):
        run(calls)
        found = prepare(tensors_of, tensors, calls)
        found.accept(*tensors_of.values())
        assert found(*tensors_of.values()) is DECLINED


def test_tensors_in_one_storage():
    def flat(seed: int = 0) -> dict[str, torch.Tensor]:
        both = torch.cat([t.flatten() for t in given(seed=seed).values()])
        return {"x": both[:-COLUMNS].view(ROWS, COLUMNS), "weight": both[-COLUMNS:]}

    found, of = prepared(flat()), prepared(given())
    for seed in range(3):
        want = of(*given(seed=seed).values())
        assert torch.equal(found(*flat(seed).values()), want) and torch.equal(found(*given(seed=seed).values()), want)


def test_other_layouts_and_addresses_are_not_accepted():
    weights = given()["weight"].repeat_interleave(2)[::2], given()["weight"][:1].expand(COLUMNS), torch.ones(COLUMNS, 1)
    found = prepared(given())
    for weight in (*weights, weights[0].bfloat16(), torch._neg_view(given()["weight"])):
        found.accept(given()["x"], weight)
        assert found(given()["x"], weight) is DECLINED
    off = torch.cat([given()["x"].flatten(), torch.zeros(COLUMNS)])[1 : 1 + ROWS * COLUMNS].view(ROWS, COLUMNS)
    tensors = new(off)
    run(calls := norms(off, given()["weight"], tensors["memory"], tensors["made"]))
    assert prepare({"x": off, "weight": calls[0][1][1]}, tensors, calls)(*given().values()) is DECLINED


def test_a_form_is_accepted_once():
    found, of = prepared(given()), given()
    for _ in range(20):
        found.accept(*of.values())
    with torch.inference_mode():
        found.accept(*given().values())
        assert found(*given().values()) is not DECLINED
