"""Matching is structural: names and order never matter, nothing anyone else reads is swallowed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import norm_forward_phase, reduction_mode
from graphfuse.base.errors import PluginError
from graphfuse.contract import match
from graphfuse.contract.engine import No
from graphfuse.contract.match import Declined, Match, Pattern, Region
from graphfuse.op_graph.ir import Subgraph, packed_stride
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.computing import MOST_NORMS
from graphfuse.patterns.rows import PATTERN
from support import graphs
from support.graphs import BF16, FP4, Norm

INFERENCE = norm_forward_phase.INFERENCE


def ir(g):
    g.validate()
    return lower(g._ir)


def names(region) -> list[str]:
    return sorted(node.name for node in region.subgraph.nodes)


def found(pattern, g) -> list[list[str]]:
    return sorted(names(r) for r in match.find(pattern, ir(g)))


def echo(name, template):
    """A pattern whose facts are the match itself."""
    return Pattern(name, template, lambda m: m)


ADD_RELU = echo("add_relu", lambda g: {"out": g.relu(g.add(g.capture("a"), g.capture("b")))})


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("extra", ["", "output", "consumer"])
def test_a_read_intermediate_is_never_swallowed(extra, swapped):
    g = graphs.new()
    a, b = g.tensor([4], name="a"), g.tensor([4], name="b")
    total = g.add(*((b, a) if swapped else (a, b)))
    g.relu(total).set_output()
    if extra == "output":
        total.set_output()
    if extra == "consumer":
        g.tanh(total).set_output()
    assert found(ADD_RELU, g) == ([] if extra else [["add.0", "relu.0"]])


def test_a_named_intermediate_may_be_read_elsewhere():
    def template(g):
        total = g.add(g.capture("a"), g.capture("b"))
        return {"out": g.relu(total), "total": total}

    g = graphs.new()
    total = g.add(g.tensor([4]), g.tensor([4]))
    g.relu(total).set_output(), g.tanh(total).set_output()
    (region,) = match.find(echo("both", template), ir(g))
    assert names(region) == ["add.0", "relu.0"]
    assert set(region.facts.tensors) == {"a", "b", "out", "total"}


@pytest.mark.parametrize(
    ("op", "commutes"), [("add", True), ("mul", True), ("max", True), ("min", True), ("sub", False), ("scale", False)]
)
def test_operands_swap_where_the_op_commutes(op, commutes):
    pattern = echo("p", lambda g: {"out": getattr(g, op)(g.tanh(g.capture("a")), g.capture("b"))})
    for order in (0, 1):
        g = graphs.new()
        operands = [g.tanh(g.tensor([4])), g.tensor([4])]
        getattr(g, op)(*(operands[::-1] if order else operands)).set_output()
        assert len(found(pattern, g)) == (1 if commutes or not order else 0)


def test_one_capture_is_one_tensor():
    def template(g):
        a = g.capture("a")
        return {"out": g.add(a, g.tanh(a))}

    for same in (True, False):
        g = graphs.new()
        x, y = g.tensor([4]), g.tensor([4])
        g.add(g.tanh(x if same else y), x).set_output()
        assert len(found(echo("p", template), g)) == same


def test_attributes_of_the_template_must_be_equal():
    pattern = echo("leaky", lambda g: {"out": g.relu(g.capture("a"), negative_slope=0.5)})
    g = graphs.new()
    g.relu(g.tensor([4]), negative_slope=0.5).set_output()
    g.relu(g.tensor([4]), negative_slope=0.25).set_output()
    assert found(pattern, g) == [["relu.0"]]


def test_an_optional_capture_and_an_unused_port():
    with_bias = echo(
        "b", lambda g: {"out": g.rmsnorm(g.capture("x"), g.capture("w"), g.capture("e"), g.capture("b"))[0]}
    )
    without = echo("n", lambda g: {"out": g.rmsnorm(g.capture("x"), g.capture("w"), g.capture("e"))[0]})
    optional = echo(
        "o",
        lambda g: {"out": g.rmsnorm(g.capture("x"), g.capture("w"), g.capture("e"), g.capture("b", optional=True))[0]},
    )
    for bias in (None, BF16):
        g = Norm(bias=bias, beta=None).graph()
        assert [len(found(p, g)) for p in (with_bias, without, optional)] == [bool(bias), not bias, 1]


@pytest.mark.parametrize(
    "case", [Norm(), Norm(bias=BF16), Norm(training=True), Norm(factor="value"), Norm(output=FP4, blocks=True)], ids=str
)
def test_rmsnorm_silu_takes_the_whole_graph(case):
    region = next(match.find(PATTERN, ir(case.graph())))
    assert len(region.subgraph.node_ids) == len(region.subgraph.graph.nodes)
    facts = region.facts
    assert (facts.rows, facts.columns) == (case.rows, case.columns)
    names = [v.name for v in facts.program.inputs]
    assert names == ["x", "weight", *(["bias"] if case.bias else [])]
    stores = {s.view.name: s for s in facts.program.stores}
    assert set(stores) == {"out", *(["inverse_rms"] if case.training else [])}
    assert stores["out"].block_size == (16 if case.blocks else 0)
    steps = [s.op_name for s in facts.program.steps]
    normal = ["mul", "row_sum", "fma", "rsqrt", "mul", "fma" if case.bias else "mul"]
    assert steps == [*normal, "swish", *["mul"] * (case.factor is not None)]


def test_the_inverse_rms_of_training_is_kept_and_read():
    """A training norm whose inverse RMS is an output and read again: the match emits both."""
    g = Norm(training=True).graph()
    inverse = next(t for t in g.tensors if t.get_name() == "inverse_rms")
    g.mul(inverse, inverse).set_output().set_name("square")
    region = next(match.find(PATTERN, ir(g)))
    assert names(region) == ["mul.0", "rmsnorm.0", "swish.0"]
    assert {s.view.name for s in region.facts.program.stores} == {"inverse_rms", "square", "out"}


def followed(g, y, how):
    if how == "two consumers":
        g.tanh(y).set_output()
        return g.relu(y)
    if how == "output inside":
        return g.relu(y.set_output())
    if how == "big operand":
        return g.add(y, g.tensor([12, 64]))
    if how == "joined":
        return g.mul(y, y)
    return g.relu(y)


@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ("plain", ["relu.0", "rmsnorm.0", "swish.0"]),
        ("two consumers", ["relu.0", "rmsnorm.0", "swish.0", "tanh.0"]),
        ("output inside", ["relu.0", "rmsnorm.0", "swish.0"]),
        ("big operand", ["add.0", "rmsnorm.0", "swish.0"]),
        ("joined", ["mul.0", "rmsnorm.0", "swish.0"]),
    ],
)
def test_all_that_follows_on_the_same_rows_is_taken(how, taken):
    g = graphs.new()
    y = g.rmsnorm(g.tensor([12, 64]), g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0]
    followed(g, g.swish(y), how).set_output()
    assert found(PATTERN, g)[-1] == ["rmsnorm.0"]  # alone, if engines take no more
    assert names(next(match.find(PATTERN, ir(g)))) == taken


def test_nodes_that_follow_one_another_in_two_ways_are_taken():
    """tanh(norm) + a one-element tensor that is made from the norm, too."""
    g = graphs.new()
    y = g.rmsnorm(g.tensor([1, 1]), g.tensor([1, 1]), 1e-5, norm_forward_phase=INFERENCE)[0]
    g.add(g.tanh(y), g.sigmoid(y)).set_output()
    assert names(next(match.find(PATTERN, ir(g)))) == ["add.0", "rmsnorm.0", "sigmoid.0", "tanh.0"]


def test_the_prologue_is_taken_with_what_it_gives_others():
    g = graphs.new()
    x, residual = g.tensor([12, 64]), g.tensor([12, 64])
    total = g.add(x, residual).set_output().set_name("sum")
    weight = g.add(g.tensor([1, 64]), 1.0)
    g.rmsnorm(total, weight, 1e-5, norm_forward_phase=INFERENCE)[0].set_output().set_name("y")
    region = next(match.find(PATTERN, ir(g)))
    assert names(region) == ["add.0", "add.1", "rmsnorm.0"]
    assert {s.view.name for s in region.facts.program.stores} == {"sum", "y"}


def test_a_norm_with_two_outputs_beside_another():
    g = graphs.new()
    x, w = g.tensor([12, 64]), g.tensor([1, 64])
    training = norm_forward_phase.TRAINING
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=training)
    inverse.set_output()
    z, inverse = g.rmsnorm(y, w, 1e-5, norm_forward_phase=training)
    z.set_output(), inverse.set_output()
    assert found(PATTERN, g) == [["rmsnorm.0"], ["rmsnorm.0", "rmsnorm.1"], ["rmsnorm.1"]]


def test_what_stands_between_two_norms_belongs_to_the_first():
    g = graphs.new()
    w = g.tensor([1, 64])
    first = g.rmsnorm(g.tensor([12, 64]), w, 1e-5, norm_forward_phase=INFERENCE)[0]
    between = g.add(g.swish(first), g.tensor([12, 64]))
    g.rmsnorm(between, w, 1e-5, norm_forward_phase=INFERENCE)[0].set_output()
    both, *regions = found(PATTERN, g)
    assert both == ["add.0", "rmsnorm.0", "rmsnorm.1", "swish.0"]
    assert ["add.0", "rmsnorm.0", "swish.0"] in regions and ["rmsnorm.1"] in regions
    assert all(region == ["rmsnorm.1"] for region in regions if "rmsnorm.1" in region)


def chain(norms: int):
    g = graphs.new()
    y = g.tensor([12, 64])
    for _ in range(norms):
        y = g.swish(g.rmsnorm(y, g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0])
    y.set_output()
    return g


def test_norms_one_after_another_are_one_match_up_to_a_number():
    for norms in (2, MOST_NORMS):
        assert max(map(len, found(PATTERN, chain(norms)))) == 2 * norms
    counts = [sum("rmsnorm" in name for name in region) for region in found(PATTERN, chain(3 * MOST_NORMS))]
    assert max(counts) == MOST_NORMS and min(counts) == 1


OTHER_AXES = {
    "other columns": lambda g, y: g.rmsnorm(y, g.tensor([1, 8, 64]), 1e-5, norm_forward_phase=INFERENCE)[0],
    "sums over rows": lambda g, y: g.rmsnorm_backward(
        y, g.tensor([12, 8, 64]), g.tensor([1, 1, 64]), g.tensor([12, 8, 1]), has_dbias=False
    )[0],
}


@pytest.mark.parametrize("other", OTHER_AXES.values(), ids=OTHER_AXES)
def test_norms_of_other_rows_are_other_matches(other):
    g = graphs.new()
    y = g.rmsnorm(g.tensor([12, 8, 64]), g.tensor([1, 1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0]
    other(g, y).set_output()
    assert {len([n for n in region if "rmsnorm" in n]) for region in found(PATTERN, g)} == {1}


def test_a_node_that_another_way_leads_around_is_left_out():
    """What needs the match and is needed by a node of it would wait for itself."""
    g = graphs.new()
    y = g.rmsnorm(g.tensor([12, 64]), g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0]
    total = g.reduction(y, mode=reduction_mode.ADD)  # of all rows: not of the match
    g.mul(g.swish(y), total).set_output()
    assert names(next(match.find(PATTERN, ir(g)))) == ["rmsnorm.0", "swish.0"]


@given(st.data())
def test_order_and_names_of_nodes_do_not_matter(data):
    drawn = data.draw(graphs.drawn())
    order = data.draw(graphs.reorderings(drawn))

    def shape(g):
        graph = ir(g)
        return sorted(
            (p.name, sorted(int(n.name[4:]) for n in r.subgraph.nodes))
            for p in (PATTERN, ADD_RELU)
            for r in match.find(p, graph)
        )

    assert shape(drawn.build()) == shape(drawn.build(order))


@given(graphs.drawn())
def test_what_a_match_makes_and_others_read_is_in_its_facts(drawn):
    graph = ir(drawn.build())
    for region in match.find(PATTERN, graph):
        if isinstance(region, Declined):
            continue
        stores = region.facts.program.stores
        kept = {v.tensor for s in stores for v in (s.view, s.block_scale) if v}
        assert set(region.subgraph.outputs) <= kept


def test_a_pattern_of_two_joined_norms():
    """A template may have several nodes of one op; each stands for a different node."""

    def template(g):
        first = g.rmsnorm(g.capture("a"), g.capture("wa"), g.capture("ea"))[0]
        second = g.rmsnorm(g.capture("b"), g.capture("wb"), g.capture("eb"))[0]
        return {"out": g.add(first, second)}

    g = graphs.new()
    w = g.tensor([1, 8])
    a, b = (g.rmsnorm(g.tensor([4, 8]), w, 1e-5, norm_forward_phase=INFERENCE)[0] for _ in range(2))
    g.add(a, b).set_output()
    g.add(a2 := g.rmsnorm(g.tensor([4, 8]), w, 1e-5, norm_forward_phase=INFERENCE)[0], a2).set_output()
    assert found(echo("two", template), g) == [["add.0", "rmsnorm.0", "rmsnorm.1"]]


def test_facts_that_say_no_decline_the_match():
    pattern = Pattern("never", ADD_RELU.template, lambda m: No("not today"))
    g = graphs.new()
    g.relu(g.add(g.tensor([4]), g.tensor([4]))).set_output()
    (declined,) = match.find(pattern, ir(g))
    assert isinstance(declined, Declined) and str(declined.why) == "not today"


def test_an_exception_in_facts_is_a_bug_and_propagates():
    def facts(m: Match):
        raise ZeroDivisionError

    g = graphs.new()
    g.relu(g.add(g.tensor([4]), g.tensor([4]))).set_output()
    with pytest.raises(ZeroDivisionError):
        list(match.find(Pattern("broken", ADD_RELU.template, facts), ir(g)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (lambda g: {"a": g.capture("a")}, "'p'.*must return node outputs by name"),
        (lambda g: None, "'p'.*must return node outputs by name, got None"),
        (lambda g: g.relu(g.capture("a")), "'p'.*must return node outputs by name"),
        (
            lambda g: {"y": g.relu(a := g.capture("a")), "z": g.tanh(a)},
            r"'p': one returned node must depend on all others; \['y', 'z'\] do not",
        ),
        (lambda g: {"out": g.relu("a")}, "relu: input must be a capture"),
    ],
)
def test_wrong_templates(template, message):
    g = graphs.new()
    g.relu(g.tensor([4])).set_output()
    with pytest.raises((PluginError, TypeError), match=message):
        list(match.find(echo("p", template), ir(g)))


def test_facts_must_be_hashable():
    g = graphs.new()
    g.relu(g.add(g.tensor([4]), g.tensor([4]))).set_output()
    with pytest.raises(PluginError, match="'list'.*frozen dataclass"):
        list(match.find(Pattern("list", ADD_RELU.template, lambda m: []), ir(g)))


def test_an_anchor_need_not_be_returned_first():
    pattern = echo("p", lambda g: {"y": (y := g.relu(g.capture("a"))), "z": g.tanh(y)})
    g = graphs.new()
    y = g.relu(g.tensor([4])).set_output()
    g.tanh(y).set_output()
    assert found(pattern, g) == [["relu.0", "tanh.0"]]


def test_equal_operands_are_not_tried_twice():
    """A chain of x + x has 2^n orders of operands that are all the same."""

    def template(g):
        y = g.capture("x")
        for _ in range(40):
            y = g.add(y, y)
        return {"out": g.relu(y)}

    g = graphs.new()
    y = g.tensor([4])
    for _ in range(40):
        y = g.add(y, y)
    g.tanh(y).set_output()
    assert found(echo("p", template), g) == []


def test_an_operand_made_of_the_inverse_rms_is_taken():
    """One row in the training phase: the inverse RMS has one element and comes from the match itself."""
    g = graphs.new()
    x, w = g.tensor([1, 64]), g.tensor([1, 64])
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    g.mul(g.swish(y), g.relu(inverse)).set_output()
    region = next(match.find(PATTERN, ir(g)))
    assert names(region) == ["mul.0", "relu.0", "rmsnorm.0", "swish.0"]


VIEWS = [
    # dim, stride, extents of the scale, extents of row axes, input's row strides and column stride
    ([12, 64], [64, 1], [1, 64], (12,), (64,), 1),
    ([2, 3, 8], [24, 8, 1], [1, 1, 8], (6,), (8,), 1),
    ([6, 8, 1, 1], [8, 1, 1, 1], [1, 8, 1, 1], (6,), (8,), 1),
    ([2, 8, 3, 5], [120, 1, 40, 8], [1, 8, 1, 1], (30,), (8,), 1),
    ([3, 4, 8], [32, 8, 1], [1, 4, 8], (3,), (32,), 1),
    ([1, 8], [8, 1], [1, 8], (1,), (8,), 1),
    ([1, 8], [9, 1], [1, 8], (1,), (9,), 1),
    ([5, 0, 8], [8, 8, 1], [1, 1, 8], (0,), None, 1),
    ([1, 8], [1, 1], [1, 8], (1,), (0,), 1),  # a stride shorter than the row says nothing about rows
    ([6, 1], [1, 1], [1, 1], (6,), (1,), 1),  # one column: every element is a row
]


@pytest.mark.parametrize(("dim", "stride", "scale", "extents", "strides", "column_stride"), VIEWS)
def test_how_a_tensor_is_seen_as_rows(dim, stride, scale, extents, strides, column_stride):
    g = graphs.new()
    y = g.rmsnorm(g.tensor(dim, stride), g.tensor(scale), 1e-5, norm_forward_phase=INFERENCE)[0]
    y.set_output().set_dim(dim).set_stride(stride if 0 not in dim else packed_stride(dim))
    region = next(match.find(PATTERN, ir(g)))
    facts, x = region.facts, region.facts.program.inputs[0]
    assert facts.row_extents == extents
    assert strides is None or (x.row_strides, x.column_stride) == (strides, column_stride)
    assert facts.rows * facts.columns == math.prod(dim)


def test_row_axes_join_only_where_every_tensor_allows_it():
    """Heads of a packed tensor: rows of the input lie apart, those of the output do not."""
    g = graphs.new()
    x = g.tensor([5, 4, 64], [3 * 4 * 64, 64, 1])
    g.rmsnorm(x, g.tensor([1, 1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0].set_output()
    facts = next(match.find(PATTERN, ir(g))).facts
    assert facts.row_extents == (5, 4)
    assert facts.program.inputs[0].row_strides == (768, 64)
    assert facts.program.stores[0].view.row_strides == (256, 64)


def test_columns_that_are_no_run_are_declined_with_a_reason():
    g = graphs.new()
    g.rmsnorm(g.tensor([3, 4, 8], [64, 16, 1], name="x"), g.tensor([1, 4, 8]), 1e-5, norm_forward_phase=INFERENCE)[
        0
    ].set_output()
    declined = next(match.find(PATTERN, ir(g)))
    assert isinstance(declined, Declined) and "'x'" in str(declined.why) and isinstance(declined.subgraph, Subgraph)


def test_regions_are_not_declined_for_nothing():
    region = next(match.find(PATTERN, ir(Norm().graph())))
    assert isinstance(region, Region) and region.pattern == "rows"
