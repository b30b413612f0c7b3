"""Which axes of rows a kernel has is told by strides: it is one kernel for one token, head or batch and for many."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, data_type, heur_mode, pygraph
from graphfuse.base.enums import norm_forward_phase
from graphfuse.planning.plan import Part
from support import graphs, oracle
from support.graphs import FLOAT, FP4

COLUMNS, EPS = 64, 1e-5
KNOBS = {"threads_per_row": 8, "threads": 128, "chunks": 1, "eviction": 0, "ahead": 0}
BACKWARD_KNOBS = {"threads_per_row": 8, "threads": 128, "stages": 2, "ctas_per_sm": 1, "ctas": 4, "delay": 0}


def packed(*extents: int) -> list[int]:
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.insert(0, strides[0] * max(extent, 1))
    return strides


def forward(dim: list[int], x: list[int], y: list[int], dtype: data_type = FLOAT) -> pygraph:
    """The training phase, whose inverse RMS is one a row."""
    g = graphs.new(device="emulator")
    weight = g.tensor([1] * (len(dim) - 1) + [COLUMNS], name="weight")
    given = g.tensor(dim, x, dtype, name="x")
    out, inverse = g.rmsnorm(given, weight, EPS, norm_forward_phase=norm_forward_phase.TRAINING)
    inverse.set_output().set_name("inverse").set_dim([*dim[:-1], 1]).set_stride(packed(*dim[:-1], 1))
    out.set_output().set_name("y").set_data_type(dtype).set_dim(dim).set_stride(y)
    return g


def backward(dim: list[int], x: list[int], y: list[int]) -> pygraph:
    g = graphs.new(device="emulator")
    weight = g.tensor([1] * (len(dim) - 1) + [COLUMNS], name="weight")
    inverse = g.tensor([*dim[:-1], 1], packed(*dim[:-1], 1), FLOAT, name="inverse")
    grad, given = g.tensor(dim, y, name="grad"), g.tensor(dim, x, name="x")
    dx, dscale, _ = g.rmsnorm_backward(grad, given, weight, inverse, has_dbias=False)
    dx.set_output().set_name("dx").set_dim(dim).set_stride(y)
    dscale.set_output().set_name("dscale")
    return g


def part(g: pygraph) -> Part:
    g.validate()
    g.build_operation_graph()
    backward = any(n.op_name == "rmsnorm_backward" for n in g._planner.graph.nodes)
    plan = g.create_execution_plan("rows", BACKWARD_KNOBS if backward else KNOBS)
    return g._planner.at(plan).parts[0]


def source(g: pygraph) -> str:
    made = part(g)
    return made.engine.source(made.facts, made.knobs)


# By what varies: for a number, dim and the strides of x and of y, and how many axes of rows the kernel has.
LAYOUTS = {
    "tokens": (lambda n: ([n, COLUMNS], [COLUMNS, 1], [COLUMNS, 1]), 1),
    "tokens apart": (lambda n: ([n, COLUMNS], [72, 1], [COLUMNS, 1]), 1),
    "tokens of heads": (lambda n: ([n, 4, COLUMNS], packed(n, 4, COLUMNS), packed(n, 4, COLUMNS)), 1),
    "tokens of heads in packed QKV": (lambda n: ([n, 4, COLUMNS], packed(n, 6, COLUMNS), packed(n, 4, COLUMNS)), 2),
    "heads in packed QKV": (lambda n: ([5, n, COLUMNS], packed(5, 20, COLUMNS), packed(5, n, COLUMNS)), 2),
    "batches in a longer cache": (lambda n: ([n, 3, COLUMNS], packed(n, 16, COLUMNS), packed(n, 3, COLUMNS)), 2),
    "steps in a longer cache": (lambda n: ([2, n, COLUMNS], packed(2, 20, COLUMNS), packed(2, n, COLUMNS)), 2),
    "batches of packed steps": (lambda n: ([n, 3, 4, COLUMNS], packed(n, 3, 4, COLUMNS), packed(n, 3, 4, COLUMNS)), 1),
    "steps of one batch": (lambda n: ([1, n, COLUMNS], packed(1, n, COLUMNS), packed(1, n, COLUMNS)), 1),
    "steps before batches": (lambda n: ([3, n, COLUMNS], [COLUMNS, 3 * COLUMNS, 1], packed(3, n, COLUMNS)), 2),
}


@pytest.mark.parametrize("graph", [forward, backward])
@pytest.mark.parametrize(("layout", "axes"), LAYOUTS.values(), ids=LAYOUTS)
def test_one_kernel_for_any_extent(layout, axes, graph):
    numbers = (1, 2, 3, 7, 0)
    sources = {n: source(graph(*layout(n))) for n in numbers}
    assert {n for n in numbers if sources[n] != sources[7]} == set()
    assert ("axis1" in sources[7], "axis2" in sources[7]) == (axes > 1, axes > 2)


# Strides of axes of extent 1 that no row has, as they are written where nobody reads them.
FORMAL = {
    "ones": ([6, COLUMNS, 1, 1], [COLUMNS, 1, 1, 1]),
    "channels last": ([6, COLUMNS, 1, 1], [COLUMNS, 1, COLUMNS, COLUMNS]),
    "batch of ones": ([1, 6, COLUMNS], [1, COLUMNS, 1]),
    "of a row": ([1, 6, COLUMNS], [COLUMNS - 1, COLUMNS, 1]),
}


@pytest.mark.parametrize(("dim", "stride"), FORMAL.values(), ids=FORMAL)
def test_axes_that_are_only_there_for_form_cost_nothing(dim, stride):
    g = graphs.new(device="emulator")
    weight = g.tensor([extent if extent == COLUMNS else 1 for extent in dim], name="weight")
    y = g.rmsnorm(g.tensor(dim, stride, name="x"), weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    y.set_output().set_name("y").set_dim(dim).set_stride(stride)
    assert part(g).facts.row_extents == (6,)


def test_any_number_of_axes_of_extent_1_is_accepted():
    """As many axes as a tensor has, none of which joins another; of more than one row each, four are accepted."""
    dim, stride = [1, 1, 1, 1, 1, 3, COLUMNS], [COLUMNS * k for k in (720, 97, 41, 19, 7, 2)] + [1]
    assert len(part(forward(dim, stride, packed(*dim))).facts.row_extents) > 4
    dim, stride = [2] * 5 + [3, COLUMNS], [COLUMNS * k for k in (720, 240, 80, 26, 8, 2)] + [1]
    with pytest.raises(GraphNotSupportedError, match="6 axes with strides of their own; accepted: 4"):
        forward(dim, stride, packed(*dim)).build([heur_mode.OPENSOURCE])


@pytest.mark.emulate
def test_values_of_heads_in_packed_memory():
    """Heads of tokens between those of others; one token has the bits that it has among others."""
    memory = torch.randn(3, 6, COLUMNS, generator=graphs.generator("cpu", 0))
    weight, made = torch.linspace(0.5, 1.5, COLUMNS), {}
    for tokens in (1, 3):
        x = memory[:tokens, 1:5]
        y, inverse = torch.zeros(tokens, 4, COLUMNS), torch.zeros(tokens, 4, 1)
        g = forward([tokens, 4, COLUMNS], list(x.stride()), list(y.stride()))
        graphs.run(g, {"x": x, "weight": weight.view(1, 1, -1), "y": y, "inverse": inverse}, [heur_mode.OPENSOURCE])
        want, want_inverse = oracle.rmsnorm(x, weight, EPS)
        torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(inverse.double(), want_inverse, rtol=2e-5, atol=1e-6)
        made[tokens] = y
    assert torch.equal(made[1][0], made[3][0])


def test_an_fp4_row_of_one_may_declare_an_odd_stride():
    """Two elements share a byte, so that rows lie an even number of them apart; one row lies nowhere."""
    for tokens, stride in ((1, 65), (3, 66)):
        g = graphs.new(device="emulator")
        x = g.tensor([tokens, COLUMNS], name="x")
        y = g.rmsnorm(x, epsilon=EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y, scale = g.block_scale_quantize(y)
        scale.set_output().set_data_type(data_type.FP8_E4M3)
        y.set_output().set_data_type(FP4).set_dim([tokens, COLUMNS]).set_stride([stride, 1])
        assert part(g).engine.name == "rows"
