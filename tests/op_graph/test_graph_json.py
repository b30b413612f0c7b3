"""Graphs as JSON: what is read is what was written, and nothing but graphs is read."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphfuseError, GraphStateError, GraphTypeError, SerializedError, data_type, pygraph
from support import edits, graphs, whole
from support.graphs import BF16, FP4, HALF, Norm


def same(g: pygraph) -> pygraph:
    g.validate()
    again = pygraph.from_json(g.to_json())
    assert repr(again.frozen) == repr(g.frozen) and again.key() == g.key()  # a NaN is not equal to itself
    assert again.to_json() == g.to_json()
    return again


@given(graphs.drawn(), st.sampled_from(("float32", "declared")))
def test_any_graph(drawn, rounding):
    same(drawn.build(prefix="a name\n", intermediate_rounding=rounding, intermediate_data_type=BF16))


@given(whole.drawn())
def test_any_whole_graph(drawn):
    """With products, whose attributes are tuples and enumerations."""
    same(drawn.build())


CASES = {
    "norm": Norm(),
    "training, bias": Norm(training=True, bias=HALF, output_stride=72),
    "scalars": Norm(eps=None, factor="value", beta=0.1 + 0.2, alignment=2),
    "blocks": Norm(output=FP4, blocks=True),
    "implicit blocks": Norm(output=FP4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norms(case):
    same(case.graph())


def test_a_virtual_result_that_is_quantized_keeps_the_type_of_its_elements():
    """It carries float32, and what it is rounded to is an attribute of its node alone."""
    g = graphs.new()
    y, scales = g.block_scale_quantize(g.tensor([4, 64], name="x"), block_size=32)
    scales.set_output().set_data_type(data_type.FP8_E8M0)
    g.relu(y.set_data_type(data_type.FP8_E5M2)).set_output()
    g.validate()
    assert {t.dtype for t in g.frozen.tensors if t.virtual} == {data_type.FLOAT}
    assert same(g).frozen.nodes[0].attributes == g.frozen.nodes[0].attributes


@pytest.mark.parametrize("value", [0.1, -0.0, float("inf"), float("-inf"), 1e-45])
def test_numbers_are_exact(value):
    g = graphs.new(name='quo"te ünï \ud800')
    g.add(g.tensor([2, 2]), g.tensor_scalar(value, name="c")).set_output()
    (found,) = (t.value for t in same(g).frozen.tensors if t.name == "c")
    assert found.hex() == value.hex()


def test_attributes_and_a_nan_too():
    g = graphs.new()
    g.relu(g.tensor([2, 2]), upper_clip=float("inf"), lower_clip=-1.0).set_output()
    g.add(g.tensor([2, 2]), float("nan")).set_output()
    same(g)


@given(graphs.drawn())
def test_frozen_graphs_are_equal(drawn):
    g = drawn.build()
    g.validate()
    assert pygraph.from_json(g.to_json()).frozen == g.frozen


def test_slices_and_permutations():
    g = graphs.new()
    x = g.tensor([4, 6], name="x")
    g.slice(g.transpose(x, [1, 0]), [slice(0, 4), slice(1, 3)]).set_output()
    same(g)


def test_what_is_read_can_be_changed_and_run():
    g = graphs.new()
    g.relu(g.tensor([3], name="x"), name="n").set_output().set_name("y")
    g.validate()
    again = pygraph.from_json(g.to_json(), graphfuse.create_handle("cpu"))
    y = again.query_tensor_attributes_of_uid(again.frozen.outputs[0].uid)
    again.neg(y).set_output().set_name("z")
    import torch

    x, out, z = torch.tensor([-1.0, 2.0, 3.0]), torch.empty(3), torch.empty(3)
    graphs.run(again, {"x": x, "y": out, "z": z})
    assert out.tolist() == [0, 2, 3] and (-z).tolist() == [0, 2, 3]


def test_the_graph_must_be_validated():
    g = graphs.new()
    with pytest.raises(GraphStateError, match="call validate"):
        g.to_json()
    with pytest.raises(GraphTypeError, match="from_json: give a str or bytes, got int"):
        pygraph.from_json(3)


def written() -> dict:
    g = graphs.new()
    y = g.relu(g.add(g.tensor([2, 4], name="x"), 1.5, name="plus"), name="last")
    y.set_output().set_name("y")
    g.validate()
    return json.loads(g.to_json())


WRONG = {
    "version": (lambda d: d.update(version=3), "version is 3; accepted: 1 or 2"),
    "no nodes": (lambda d: d.pop("nodes"), "the graph has no nodes"),
    "name": (lambda d: d.update(name=3), "name is 3; accepted: a text"),
    "rounding": (lambda d: d.update(intermediate_rounding="up"), "intermediate_rounding is 'up'; accepted: float32"),
    "type": (lambda d: d["tensors"][0].update(data_type="F"), "tensor 0: data_type is 'F'; accepted: a name of data_"),
    "kind": (lambda d: d["tensors"][0].update(virtual=1), "tensor 0: virtual is 1; accepted: true or false"),
    "dim": (lambda d: d["tensors"][0].update(dim=[2, 4.0]), "tensor 0: dim is .2, 4.0.; accepted: a list of integers"),
    "shape": (lambda d: d["tensors"][-1].update(dim=[9, 4]), "output has dim .9, 4., but the node makes .2, 4."),
    "uid": (lambda d: d["tensors"][-1].update(uid=d["tensors"][0]["uid"]), "uids must differ"),
    "op": (lambda d: d["nodes"][0].update(op="__init__"), "node 0: op is '__init__'; accepted: an operation"),
    "port": (lambda d: d["nodes"][0]["inputs"].update(self=0), "node 0: an input is 'self'; accepted: "),
    "attribute": (lambda d: d["nodes"][1]["attributes"].update(name="x"), "node 1: an attribute is 'name'; accepted"),
    "place": (lambda d: d["nodes"][0]["inputs"].update(a=99), "node 0: a is 99; accepted: a tensor's place, 0 to 3"),
    "circle": (lambda d: d["nodes"][0]["inputs"].update(a=3), "node 0: a is tensor 3, which is made after it"),
    "twice": (lambda d: d["nodes"][1]["outputs"].update(output=2), "tensor 2 is written by nodes 0 and 1"),
    "order": (lambda d: d["nodes"].reverse(), "node 0: its outputs are not in the order of the nodes"),
    "value": (lambda d: d["nodes"][1]["attributes"].update(lower_clip={"enum": "a.b"}), "node 1: lower_clip is "),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(edit, message):
    data = written()
    edit(data)
    with pytest.raises(GraphfuseError, match=message):
        pygraph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text", ["", "[]", "NaN", "[" * 100_000, '{"version":' + "9" * 5000 + "}", b"\xff\xfe\x00", '{"version": Infinity}']
)
def test_other_texts_are_refused(text):
    with pytest.raises(SerializedError):
        pygraph.from_json(text)


@settings(max_examples=300)
@given(st.data())
def test_edited_graphs_are_graphs_or_refused(data):
    base = written() if data.draw(st.booleans()) else json.loads(QUANTIZED)
    edited = data.draw(edits.edits(base))
    try:
        found = pygraph.from_json(json.dumps(edited))
    except GraphfuseError:
        return
    same(found)


def _quantized() -> str:
    g = Norm(training=True, blocks=True, output=FP4).graph()
    g.validate()
    return g.to_json()


QUANTIZED = _quantized()
