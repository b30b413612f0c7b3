"""What is cheaper of numbers of 16 bits has the same bits on a GPU: of all of them. Integers of 8 bits, too."""

import pytest
import torch

from graphfuse import heur_mode, reduction_mode
from support import graphs
from support.graphs import BF16, FLOAT, HALF
from support.packed import EVERY, Packed
from support.small_integers import INT8, UINT8, Stored

pytestmark = pytest.mark.gpu

FUNCTIONS = {
    "tanh": (lambda g, x: g.tanh(x), torch.tanh),
    "gelu": (lambda g, x: g.gelu(x), lambda x: 0.5 * x * torch.special.erfc(-(0.5**0.5) * x)),
}


def run(g, pack):
    g.build([heur_mode.OPENSOURCE])
    workspace = torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    g.execute(pack, workspace)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_every_bfloat16_number(name):
    draw, exact = FUNCTIONS[name]
    g = graphs.new(device="cuda", intermediate_rounding="declared")
    x = g.tensor([256, 256], data_type=BF16, name="x")
    y = draw(g, x).set_output().set_name("y").set_data_type(BF16)
    largest = g.reduction(y, mode=reduction_mode.MAX).set_dim([256, 1])
    largest.set_output().set_name("largest").set_data_type(FLOAT)
    given = EVERY.view(torch.bfloat16).cuda()
    made = torch.empty_like(given)
    run(g, {"x": given, "y": made, "largest": torch.empty(256, 1, device="cuda")})
    want = exact(given.double()).to(torch.bfloat16)
    if name == "gelu":
        assert (made[given < -13.2].abs() < 5e-39).all() and not made[given < -13.2].isnan().any()
        want[given < -13.2] = made[given < -13.2]
    assert torch.equal(made.isnan(), want.isnan())
    assert torch.equal(made.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_integers_of_8_bits(dtype, spelled):
    case = Stored(dtype, "cuda", spelled)
    run(case.graph, case.pack)
    case.hold()


@pytest.mark.parametrize("op", ["products", "sums", "differences"])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_two_elements_an_instruction(dtype, op):
    case = Packed(op, dtype, "cuda")
    run(case.graph, case.pack)
    case.hold()
