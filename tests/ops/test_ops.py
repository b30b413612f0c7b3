"""What the op table says of pointwise ops agrees with what their scalar forms and references do."""

import re

import pytest
import torch

from graphfuse import reduction_mode
from graphfuse.ops import OPS, REDUCTIONS, Cost
from graphfuse.rows.program import FUSED, cost_of
from graphfuse.rows.steps import Chain, Step

POINTWISE = [op for op in OPS.values() if op.pointwise]


@pytest.mark.parametrize("op", POINTWISE, ids=lambda op: op.name)
def test_the_cost_is_that_of_the_scalar_form(op):
    calls = re.search(r"\w\(|/", op.cuda)
    operators = re.findall(r"[-+*?]", op.cuda)
    assert op.cost is (Cost.FUNCTION if calls else Cost.ARITHMETIC if operators else Cost.COPY)
    assert op.cost is Cost.FUNCTION or len(operators) <= 2


def test_every_step_has_a_cost():
    for name in [*FUSED, *(op.name for op in POINTWISE)]:
        assert isinstance(cost_of(Step(name, (("input", Chain(0)),))), Cost)
    assert not FUSED.keys() & OPS.keys()


@pytest.mark.parametrize("op", [op for op in POINTWISE if len(op.inputs) == 2], ids=lambda op: op.name)
def test_operands_of_a_commutative_op_may_be_swapped(op):
    a, b = torch.tensor([1.5, -2.0, 0.25, 0.0, -0.0]), torch.tensor([-0.5, 3.0, 4.0, -0.0, 1.0])
    attributes = {a.name: a.default for a in op.attributes}
    left, right = (
        op.reference(torch, {op.inputs[0].name: x, op.inputs[1].name: y}, attributes)["output"]
        for x, y in ((a, b), (b, a))
    )
    # A scale is one operand's role, though the product is the same.
    assert torch.equal(left, right) == (op.commutative or op.name == "scale")


def test_what_is_made_of_a_sigmoid_says_how_exact_it_is():
    assert {op.name for op in POINTWISE if op.note.startswith("sigmoid of x")} == {
        op.name for op in POINTWISE if "gf::sigmoid" in op.cuda
    }


def test_only_pointwise_ops_have_a_scalar_form_to_tell_of():
    for op in OPS.values():
        assert op.pointwise or (op.cost is None and not op.note and not op.commutative)


def test_a_fold_joins_what_is_there_with_an_array_of_more():
    assert REDUCTIONS[reduction_mode.AMAX].fold.format(to="m", values="v") == "gf::max(m, gf::max_magnitude(v))"
    assert REDUCTIONS[reduction_mode.MAX].fold.format(to="m", values="v") == "gf::max(m, gf::largest(v))"
    assert {mode for mode, how in REDUCTIONS.items() if how.fold} == {reduction_mode.AMAX, reduction_mode.MAX}
