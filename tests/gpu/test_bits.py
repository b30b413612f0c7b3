"""Results never depend on how many rows a batch has, on knobs, or on the run."""

import pytest
import torch

from graphfuse import build_plan_policy, heur_mode
from support import graphs
from support.graphs import BF16, E4M3, FLOAT, FP4, HALF, Norm

pytestmark = pytest.mark.gpu

COLUMNS = (1, 33, 64, 512, 1000, 7168, 16384, 65537)


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_row_is_the_same_in_every_batch(columns):
    def out(x):
        case = Norm(x.shape[0], columns, output=FLOAT, alignment=2)
        outputs = case.outputs("cuda")
        graphs.fused(case).execute({"x": x, "weight": weight} | outputs)
        return outputs["out"]

    pack = Norm(4097, columns).inputs("cuda")
    x, weight = pack["x"], pack["weight"]
    whole = out(x)
    assert torch.equal(out(x), whole)
    for count in (1, 255, 256):
        assert torch.equal(out(x[:count]), whole[:count])
    for row in (1, 17, 255, 256, 4096):
        assert torch.equal(out(x[row : row + 1]), whole[row : row + 1])
        assert torch.equal(out(x[row:]), whole[row:])


@pytest.mark.parametrize("columns", COLUMNS)
def test_bits_do_not_depend_on_alignment_or_strides(columns):
    """Narrower accesses sum in the same order."""
    plain = Norm(65, columns, output=FLOAT)
    pack, outputs = plain.inputs("cuda"), plain.outputs("cuda")
    graphs.fused(plain).execute(pack | outputs)
    for gap in (1, 4):
        apart = Norm(
            65, columns, output=FLOAT, input_stride=columns + gap, output_stride=columns + gap, offset=gap, alignment=2
        )
        shifted, others = apart.inputs("cuda"), apart.outputs("cuda")
        assert torch.equal(shifted["x"], pack["x"])
        graphs.fused(apart).execute(shifted | others)
        assert torch.equal(others["out"], outputs["out"])


CASES = {
    "bf16 512": Norm(4097, 512),
    "float 33": Norm(4097, 33, FLOAT, HALF, FLOAT, BF16, training=True),
    "fp8 1024": Norm(1561, 1024, output=E4M3),
    "nvfp4 48": Norm(4097, 48, output=FP4, blocks=True),
    "half 7168": Norm(300, 7168, HALF, HALF, HALF, beta=1.3),
    "bf16 16384": Norm(300, 16384, training=True),
    "one column": Norm(4097, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_knob_gives_the_same_bits(case):
    graph, pack = case.graph("cuda"), case.inputs("cuda")
    graph.validate()
    graph.build_operation_graph(engines=["rows"])
    graph.create_execution_plans([heur_mode.B])
    graph.build_plans(build_plan_policy.ALL)
    count, first = graph.get_execution_plan_count(), None
    assert count > 1
    for index in range(count):
        outputs = case.outputs("cuda")
        graph.execute_plan_at_index(pack | outputs, None, index)
        bits = {name: t.view(torch.uint8) for name, t in outputs.items()}
        first = bits if first is None else first
        for name in bits:
            assert torch.equal(bits[name], first[name]), f"{name} of {graph.get_plan_name_at_index(index)}"
