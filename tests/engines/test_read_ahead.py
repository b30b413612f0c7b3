"""Where reading weights before the sum pays, and what threads of values of parts of rows take."""

import pytest

from graphfuse import heur_mode, norm_forward_phase, reduction_mode
from support import graphs
from support.graphs import BF16, FLOAT

MANY, FEW = 32768, 4096


def knobs(draw, rows: int):
    """The first choice for a function of bfloat16 rows of 4,096 columns."""
    g = graphs.new(device="emulator", intermediate_rounding="declared", intermediate_data_type=BF16)
    x = g.tensor([rows, 4096], data_type=BF16, name="x")
    draw(g, x).set_output().set_data_type(BF16)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    (part,) = g._planner.at(0).parts
    return part.knobs


def layer_norm(g, x):
    scale, bias = (g.tensor([1, 4096], data_type=BF16, name=name) for name in ("scale", "bias"))
    return g.layernorm(x, scale, bias, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]


def rms_norm(g, x):
    scale = g.tensor([1, 4096], data_type=BF16, name="scale")
    return g.rmsnorm(x, scale, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]


@pytest.mark.parametrize(
    ("draw", "rows", "ahead"),
    [
        (rms_norm, MANY, 1),
        (layer_norm, MANY, 1),
        (lambda g, x: g.gelu(layer_norm(g, x)), MANY, 0),
        (lambda g, x: g.gelu(layer_norm(g, x)), FEW, 1),
        (lambda g, x: g.neg(rms_norm(g, x)), MANY, 1),
    ],
    ids=["RMSNorm", "layer norm", "layer norm and GELU", "of few rows", "RMSNorm and little else"],
)
def test_registers_are_left_where_much_is_computed_of_many_rows(draw, rows, ahead):
    assert knobs(draw, rows).ahead == ahead


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_threads_have_two_chunks_of_rows_whose_parts_have_a_value_each(rows):
    def draw(g, x):
        y = g.reshape(rms_norm(g, x)).set_dim([rows, 32, 128]).set_data_type(BF16)
        most = g.reduction(y, mode=reduction_mode.AMAX).set_dim([rows, 32, 1]).set_data_type(FLOAT)
        return g.reshape(g.div(y, most).set_data_type(BF16)).set_dim([rows, 4096])

    assert knobs(draw, rows).chunks == 2 and knobs(rms_norm, rows).chunks == 1
