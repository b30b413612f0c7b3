"""The engines that others start from, the example's and the foreign package's: what they take is right, the rest is
declined."""

import importlib.util
from pathlib import Path

import pytest
import torch

import graphfuse
from graphfuse import data_type, heur_mode

ROOT = Path(__file__).resolve().parents[2]
BF16, DOUBLE, FLOAT = data_type.BFLOAT16, data_type.DOUBLE, data_type.FLOAT


def _module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).parent.name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["example", "foreign"])
def own(request):
    """(patterns, engines, device)"""
    if request.param == "example":
        made = _module("examples/own_pattern_and_engine.py")
        return [made.PATTERN], [made.ENGINE], "emulator"
    made = _module("tests/foreign_plugin/src/foreign_plugin/__init__.py")
    return [made.PATTERN], list(made.ENGINES), "cpu"


def memory(*order: int) -> torch.Tensor:
    """4 x 6 numbers, whose axes lie in memory in `order`."""
    values = torch.randn(
        [(4, 6)[axis] for axis in order], generator=torch.Generator().manual_seed(sum(order) + order[0])
    )
    return values.permute([order.index(axis) for axis in range(2)])


def ran(own, a, b, out, **graph) -> str:
    """The name of the plan that ran, whose result is checked against torch's."""
    patterns, engines, device = own
    types = {"io_data_type": FLOAT, "intermediate_data_type": FLOAT} | graph
    g = graphfuse.pygraph(handle=graphfuse.create_handle(device), **types)
    A = g.tensor_like(a, "a")
    B = g.tensor_like(b, "b") if isinstance(b, torch.Tensor) else b
    OUT = g.relu(g.add(A, B)).set_output().set_dim(out.shape).set_stride(out.stride())
    g.build([heur_mode.A], patterns=patterns, engines=engines)
    out.fill_(float("nan"))
    g.execute({A: a, OUT: out} | ({B: b} if isinstance(b, torch.Tensor) else {}))
    exact = torch.relu(a.double() + (b.double() if isinstance(b, torch.Tensor) else b))
    if g.intermediate_rounding == "declared":
        exact = torch.relu((a + b).bfloat16()).double()
    assert torch.equal(out.double(), exact.float().double())
    return g.get_plan_name_at_index(0)


def left(own, *tensors, **graph) -> bool:
    """True if another engine ran: the reference, or ours for pointwise nodes where kernels run."""
    name = ran(own, *tensors, **graph)
    return name == "reference" or own[2] == "emulator" and name.startswith("emulator: rows[")


def test_row_major_tensors_are_taken(own):
    assert "add_relu" in ran(own, memory(0, 1), memory(0, 1) + 1, memory(0, 1))


@pytest.mark.parametrize("own", ["foreign"], indirect=True)
def test_tensors_of_another_order_are_taken_where_that_is_declared(own):
    assert "add_relu" in ran(own, memory(1, 0), memory(1, 0) + 1, memory(1, 0))


def test_extents_of_one_tell_no_order(own):
    a = torch.randn(6).as_strided((1, 6), (1, 1))
    assert "add_relu" in ran(own, a, torch.randn(1, 6), torch.empty(1, 6))


@pytest.mark.parametrize("own", ["example"], indirect=True)
def test_tensors_of_another_order_are_not_taken_where_it_is_not(own):
    assert left(own, memory(1, 0), memory(1, 0) + 1, memory(1, 0))


DECLINED = {
    "an input of another order": lambda: (memory(1, 0), memory(0, 1), memory(0, 1)),
    "an output of another order": lambda: (memory(0, 1), memory(0, 1), memory(1, 0)),
    "a constant": lambda: (torch.randn(1, 1), 1.0, torch.empty(1, 1)),
    "a number passed by value": lambda: (memory(0, 1)[:1, :1].contiguous(), torch.tensor([[0.5]]), torch.empty(1, 1)),
    "gaps": lambda: (memory(0, 1)[:, ::2], memory(0, 1)[:, ::2], torch.empty(4, 3)),
    "broadcast": lambda: (memory(0, 1), torch.randn(1, 6), memory(0, 1)),
}


@pytest.mark.parametrize("what", DECLINED)
def test_others_are_left_to_other_engines(own, what):
    assert left(own, *DECLINED[what]())


@pytest.mark.parametrize(
    "asked",
    [{"compute_data_type": DOUBLE}, {"intermediate_data_type": BF16, "intermediate_rounding": "declared"}],
    ids=["double", "rounded between"],
)
def test_what_they_do_not_compute_is_left_to_other_engines(own, asked):
    assert left(own, memory(0, 1), memory(0, 1) * 3, memory(0, 1), **asked)
