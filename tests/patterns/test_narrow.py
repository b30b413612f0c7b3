"""What is cheaper of bfloat16 numbers where it is rounded to bfloat16: of all of them the same bits."""

import numpy as np
import pytest
import torch

from graphfuse import reduction_mode
from graphfuse.rows.program import QUOTIENT
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF, TORCH
from support.packed import EVERY, Packed


def planned(draw, dtype=BF16, apart: bool = False, read_as=None) -> Planned:
    """The negative of a function of all numbers of a type, rounded to it, and what is largest in each row. apart:
    whether a node of its own rounds."""
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    x = g.tensor([256, 256], data_type=read_as or dtype, name="x")
    y = draw(g, x).set_data_type(FLOAT if apart else dtype)
    y = g.identity(y).set_data_type(dtype) if apart else y
    g.neg(y).set_output().set_name("y").set_data_type(FLOAT)
    largest = g.reduction(y, mode=reduction_mode.MAX).set_dim([256, 1])
    largest.set_output().set_name("largest").set_data_type(FLOAT)
    pack = {"x": EVERY.view(TORCH[read_as or dtype]), "y": torch.empty(256, 256), "largest": torch.empty(256, 1)}
    return Planned(g, pack)


def hold(made: Planned, want: torch.Tensor) -> None:
    made.run()
    y, want = made.pack["y"], -want.float()
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))


@pytest.mark.emulate
@pytest.mark.parametrize("apart", [False, True])
def test_tanh_of_every_bfloat16_number(apart):
    made = planned(lambda g, x: g.tanh(x), apart=apart)
    assert "(gf::tanh_of_bf16(" in made.source
    hold(made, made.pack["x"].double().tanh().to(torch.bfloat16))


@pytest.mark.emulate
def test_gelu_of_every_bfloat16_number():
    made = planned(lambda g, x: g.gelu(x))
    assert "(gf::gelu_of_bf16(" in made.source
    x = made.pack["x"].double()
    want = (0.5 * x * torch.special.erfc(-(0.5**0.5) * x)).to(torch.bfloat16)
    want[x.isneginf()] = -0.0
    hold(made, want)


@pytest.mark.parametrize(
    "draw, types",
    [
        (lambda g, x: g.tanh(x), {"dtype": HALF}),
        (lambda g, x: g.tanh(x), {"read_as": HALF}),
        (lambda g, x: g.tanh(g.mul(x, 2.0)), {}),
        (lambda g, x: g.mul(g.tanh(x).set_data_type(FLOAT), 2.0), {}),
    ],
    ids=["of half", "half rounded to bfloat16", "of what is not rounded", "not rounded at once"],
)
def test_tanh_of_others_is_in_float32(draw, types):
    source = planned(draw, **types).source
    assert "(tanhf(" in source or "= tanhf(" in source
    assert "tanh_of_bf16(v" not in source and "tanh_of_bf16(l" not in source


@pytest.mark.emulate
@pytest.mark.parametrize("op", ["products", "sums", "differences"])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_two_elements_an_instruction(dtype, op):
    case = Packed(op, dtype, "emulator")
    made = Planned(case.graph, case.pack)
    assert f"gf::{op}<" in made.source
    made.run()
    case.hold()


@pytest.mark.parametrize(
    "draw",
    [
        lambda g, x, y: g.mul(x, g.sqrt(y)),
        lambda g, x, y: g.mul(x, 3.0).set_data_type(BF16),
        lambda g, x, y: g.mul(x, g.reduction(y, mode=reduction_mode.MAX).set_dim([8, 1]).set_data_type(BF16)),
        lambda g, x, y: g.identity(g.mul(x, y).set_data_type(FLOAT)),
        lambda g, x, y: g.identity(g.mul(x, y).set_data_type(HALF)),
    ],
    ids=["not rounded", "by a number", "by one of a row", "to float32", "to another type"],
)
def test_other_products_are_in_float32(draw):
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    x, y = (g.tensor([8, 64], data_type=BF16, name=name) for name in "xy")
    draw(g, x, y).set_output().set_name("out").set_data_type(BF16)
    g.reduction(x, mode=reduction_mode.MAX).set_dim([8, 1]).set_output().set_name("most").set_data_type(FLOAT)
    assert "gf::products" not in Planned(g, {}).source


@pytest.mark.emulate
@pytest.mark.parametrize("dim, one", [((2, 40, 64), (2, 1, 64)), ((5, 37), (5, 1)), ((5, 64), (5, 1))], ids=str)
def test_a_product_with_one_number_of_each_row_is_not_of_pairs(dim, one):
    """Rows that lie across, and pieces of one element, have as many of them as of others."""
    source = graphs.generator("cpu", 3)
    x, r = (torch.randn(d, generator=source).bfloat16() for d in (dim, one))
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    a, b = (g.tensor([*t.shape], data_type=BF16, name=name) for name, t in (("x", x), ("r", r)))
    g.mul(a, b).set_output().set_name("y").set_data_type(BF16)
    g.reduction(a, mode=reduction_mode.MAX).set_dim([*one]).set_output().set_name("most").set_data_type(FLOAT)
    made = Planned(g, {"x": x, "r": r, "y": torch.empty_like(x), "most": torch.empty(one)})
    made.run()
    assert torch.equal(made.pack["y"], x * r)


@pytest.mark.emulate
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("read", ["written", "written and read", "read", "of float32", "of float32, read"])
def test_pairs_that_are_exchanged_and_rounded(read, interleaved):
    x = torch.randn(5, 64, generator=graphs.generator("cpu", 3)).bfloat16()
    g = graphs.new(device="emulator", intermediate_rounding="declared")
    a, wide = g.tensor([5, 64], data_type=BF16, name="x"), x.float()
    g.reduction(a, mode=reduction_mode.MAX).set_dim([5, 1]).set_output().set_name("most").set_data_type(FLOAT)
    given, pack = a, {"x": x, "most": torch.empty(5, 1)}
    if "float32" in read:
        given, wide = g.mul(a, 1.3).set_data_type(FLOAT), wide * 1.3
    turned = g.turn_pairs(given, interleaved=interleaved).set_data_type(BF16)
    first, second = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.split(32, -1)
    parts = -second, first
    want = {"turned": (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).bfloat16()}
    if "read" in read:
        g.mul(turned, 3.0).set_output().set_name("more").set_data_type(FLOAT)
        want["more"] = want["turned"].float() * 3.0
    if read in ("read", "of float32, read"):
        del want["turned"]
    else:
        turned.set_output().set_name("turned")
    pack |= {name: torch.empty_like(t) for name, t in want.items()}
    made = Planned(g, pack)
    made.run()
    assert all(torch.equal(made.pack[name], t) for name, t in want.items())


DIVISORS = {30.0: True, -0.1015625: True, 2.0**-14: True, 255 * 2.0**15: True, 255 * 2.0**16: False, 0.1: False}
"""Whether all that is bfloat16 is multiplied by the reciprocal in their place."""


@pytest.mark.emulate
@pytest.mark.parametrize("divisor", DIVISORS)
def test_every_bfloat16_number_over_a_known_one(divisor):
    made = planned(lambda g, x: g.div(x, divisor))
    assert (QUOTIENT not in {step.op_name for step in made.part.facts.program.steps}) == DIVISORS[divisor]
    hold(made, (made.pack["x"].float() / np.float32(divisor)).bfloat16())


def test_a_rounding_of_what_others_read_is_a_step():
    def draw(g, x):
        t = g.tanh(x).set_data_type(FLOAT)
        total = g.reduction(t, mode=reduction_mode.ADD).set_dim([256, 1]).set_data_type(FLOAT)
        return g.mul(g.identity(t).set_data_type(BF16), total)

    steps = planned(draw).part.facts.program.steps
    assert [(step.op_name, step.rounded) for step in steps][:1] == [("tanh", None)]
    assert ("identity", BF16) in {(step.op_name, step.rounded) for step in steps}
