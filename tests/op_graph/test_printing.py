"""str(graph) is Python that makes the graph again."""

import pytest
from hypothesis import given

import graphfuse
from support import graphs
from support.graphs import FP4, Norm


def again(g) -> graphfuse.pygraph:
    scope: dict = {}
    exec(str(g), scope)  # noqa: S102 - the point of the test
    return scope["graph"]


def same(g) -> None:
    copy = again(g)
    assert str(copy) == str(g)
    g.validate(), copy.validate()
    assert copy.key() == g.key()
    assert {(t.name, t.uid) for t in copy._ir.tensors} == {(t.name, t.uid) for t in g._ir.tensors}
    # Once inferred, everything is printed.
    assert again(g).name == g.name and str(again(g)) == str(g)


@given(graphs.drawn())
def test_any_graph(drawn):
    same(drawn.build(prefix="a name\n"))


CASES = {
    "norm": Norm(),
    "training, bias": Norm(training=True, bias=graphs.HALF, output_stride=72),
    "scalars": Norm(eps=None, factor="value", beta=0.1 + 0.2, alignment=2),
    "blocks": Norm(output=FP4, blocks=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("validated", [False, True])
def test_norms(case, validated):
    g = case.graph()
    if validated:
        g.validate()
    same(g)


@pytest.mark.parametrize(
    "name", ["class", "1st", "graph", "graphfuse", "ünï", 'quo"te', "__import__('os')", "_", "float"]
)
def test_hostile_names(name):
    g = graphs.new(name=name)
    x = g.tensor([2, 2], name=name, uid=17)
    g.relu(g.add(x, float("-inf"), name=name), upper_clip=float("inf"), lower_clip=-1.0).set_output().set_name(name)
    same(g)
    assert {t.get_name() for t in again(g).tensors} == {t.get_name() for t in g.tensors}


def test_rounding_order_and_a_missing_scale():
    g = graphs.new(intermediate_rounding="declared", intermediate_data_type=graphs.BF16)
    phase = graphfuse.norm_forward_phase.INFERENCE
    y = g.rmsnorm(g.tensor([4, 64]), epsilon=1e-5, norm_forward_phase=phase)[0]
    q, scale = g.block_scale_quantize(y, block_size=32)
    q.set_output().set_data_type(graphs.E5M2)
    scale.set_output().set_reordering_type(graphfuse.tensor_reordering.F8_128x4)
    g.reduction(y, graphfuse.reduction_mode.NORM2).set_output().set_dim([4, 1])
    same(g)


def test_nan_and_repeated_names():
    g = graphs.new()
    g.add(g.tensor([2], name="a"), g.tensor([2], name="a")).set_output().set_name("a")
    same(g)
    g = graphs.new()
    g.mul(g.tensor([2]), float("nan")).set_output()
    assert "nan" in str(g) and len(again(g).nodes) == 1
