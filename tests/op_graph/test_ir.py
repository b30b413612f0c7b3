"""graph.key(): what it must not see (names, node order, uids) and what it must (all else); subgraphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import data_type, norm_forward_phase, reduction_mode
from graphfuse.op_graph.ir import Subgraph
from support import graphs
from support.graphs import BF16, E4M3, FLOAT, HALF, Norm


def key(g) -> str:
    g.validate()
    return g.key()


@given(st.data())
def test_key_ignores_names_order_and_uids(data):
    drawn = data.draw(graphs.drawn())
    order = data.draw(graphs.reorderings(drawn))
    one, other = drawn.build(), drawn.build(order, prefix="other ")
    for i, t in enumerate(other.tensors):
        t.set_uid(1000 + i)
    assert key(one) == key(other)


def test_key_of_twin_inputs_ignores_order():
    """Two leaves alike, told apart only by who reads them."""

    def make(first: int):
        g = graphs.new(io_data_type=FLOAT)
        a, b = g.tensor([4]), g.tensor([4])
        for t in (a, b)[:: 1 if first == 0 else -1]:
            g.relu(t).set_output()
        g.sub(a, b).set_output()
        return g

    assert key(make(0)) == key(make(1))


def test_key_tells_rings_of_different_length():
    """Locally the same everywhere: two rings of three against one of six."""

    def make(*rings):
        g = graphs.new(io_data_type=FLOAT)
        for size in rings:
            leaves = [g.tensor([4]) for _ in range(size)]
            for i in range(size):
                g.sub(leaves[i], leaves[(i + 1) % size]).set_output()
        return g

    assert key(make(3, 3)) != key(make(6))


def test_key_of_a_long_chain():
    g = graphs.new(io_data_type=FLOAT, intermediate_data_type=FLOAT)
    y = g.tensor([4])
    for _ in range(1500):
        y = g.relu(y)
    y.set_output()
    assert len(key(g)) == 64


@given(st.data())
def test_key_sees_an_operand(data):
    """Swapping the operands of sub is another computation (unless they are the same)."""
    drawn = data.draw(
        graphs.drawn().filter(lambda d: any(o.name == "sub" and len(set(o.operands)) == 2 for o in d.ops))
    )
    index = next(i for i, o in enumerate(drawn.ops) if o.name == "sub" and len(set(o.operands)) == 2)
    op = drawn.ops[index]
    swapped = drawn.ops[:index] + (graphs.Op("sub", op.operands[::-1], op.attributes),) + drawn.ops[index + 1 :]
    other = graphs.Drawn(drawn.leaves, swapped, drawn.outputs)
    # Leaves of one shape are interchangeable in a key: only values that differ in more tell.
    leaves = [v for v in op.operands if v < 0]
    if len(leaves) == 2:
        return
    assert key(drawn.build()) != key(other.build())


def chain(g, x):
    return g.swish(g.add(x, g.tensor([1, 16], name="b")))


BASE = {
    "dim": lambda t: t["x"].set_dim([6, 16]),
    "stride": lambda t: t["x"].set_stride([32, 1]),
    "data type": lambda t: t["x"].set_data_type(HALF),
    "alignment": lambda t: t["x"].set_byte_alignment(2),
    "by value": lambda t: t["s"].set_is_pass_by_value(True),
    "constant": lambda t: setattr(t["c"], "value", 3.0),
    "output": lambda t: t["y"].set_output(),
    "output type": lambda t: t["out"].set_data_type(E4M3),
    "output stride": lambda t: t["out"].set_stride([20, 1]),
    "virtual type": lambda t: t["y"].set_data_type(BF16),
}


def base(beta=1.0, compute=FLOAT, op="mul", phase=norm_forward_phase.INFERENCE):
    g = graphs.new(intermediate_rounding="declared")
    x, w = g.tensor([4, 16], name="x"), g.tensor([1, 16], name="w")
    s, c = g.tensor([1, 1], name="s"), g.tensor_scalar(2.0, name="c")
    y = g.rmsnorm(x, w, 1e-5, norm_forward_phase=phase)[0].set_name("y")
    z = g.swish(y, swish_beta=beta, compute_data_type=compute)
    getattr(g, op)(g.mul(z, s), c).set_output().set_name("out")
    return g, {t.get_name(): t for t in g.tensors}


@pytest.mark.parametrize("change", BASE.values(), ids=BASE)
def test_key_sees_every_property_of_a_tensor(change):
    g, tensors = base()
    before = key(g)
    change(tensors)
    assert key(g) != before


@pytest.mark.parametrize("other", [{"beta": 2.0}, {"compute": data_type.DOUBLE}, {"op": "add"}], ids=str)
def test_key_sees_every_property_of_a_node(other):
    assert key(base()[0]) != key(base(**other)[0])
    assert key(base()[0]) == key(base()[0])


def test_key_tells_one_tensor_from_two_alike():
    def graph(twice):
        g = graphs.new()
        a, b = g.tensor([4]), g.tensor([4])
        g.add(a, a if twice else b).set_output()
        return g

    assert key(graph(True)) != key(graph(False))


def test_key_sees_how_a_reduction_reduces():
    def graph(mode, dim):
        g = graphs.new()
        g.reduction(g.tensor([4, 16]), mode).set_output().set_dim(dim)
        return key(g)

    keys = {graph(mode, dim) for mode in reduction_mode for dim in ([1, 1], [4, 1], [1, 16])}
    assert len(keys) == 3 * len(reduction_mode)


def test_key_sees_the_phase():
    assert key(Norm(training=True).graph()) != key(Norm().graph())


@given(graphs.drawn(), st.data())
def test_subgraph_boundary(drawn, data):
    """Inputs come from outside, outputs are what the caller or a node outside reads."""
    g = drawn.build()
    g.validate()
    ir = g._ir
    ids = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(ir.nodes))), min_size=1))))
    part = Subgraph(ir, ids)
    made = {t for i in ids for _, t in ir.nodes[i].outputs}
    read = {t for i in ids for _, t in ir.nodes[i].inputs}
    outside = {t for i in set(range(len(ir.nodes))) - set(ids) for _, t in ir.nodes[i].inputs}
    assert set(part.inputs) == read - made
    assert set(part.outputs) == {t for t in made if t in outside or not ir.tensors[t].virtual}


@given(graphs.drawn())
def test_above_and_below_say_the_same(drawn):
    g = drawn.build()
    g.validate()
    ir = g._ir
    nodes = range(len(ir.nodes))
    written = [{t for _, t in node.outputs} for node in ir.nodes]
    follow = [written[i].union(*(written[j] for j in ir.below(written[i]))) for i in nodes]
    for t in range(len(ir.tensors)):
        behind = ir.above([t])
        assert behind == {i for i in nodes if t in follow[i]}
        assert not ir.needs([t], ())
        for first in nodes:
            assert ir.needs([t], {first}) == (first in behind)
