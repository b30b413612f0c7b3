"""What is said to cuDNN's frontend, read back from its own graph; what is not said, and why.

Where the package cudnn is not installed the tests that need it are skipped; none needs libcudnn.
"""

import dataclasses
import itertools
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import attention_implementation, convolution_mode, data_type, norm_forward_phase, reduction_mode
from graphfuse.base.device import EMULATOR, for_arch
from graphfuse.contract.engine import No
from graphfuse.engines import cudnn as ours
from graphfuse.engines.cudnn import package, ranks, support
from graphfuse.op_graph.ir import Subgraph
from graphfuse.ops import OPS
from support import graphs, whole
from support.graphs import BF16, E4M3, FP4, HALF, Norm

INFERENCE, TRAINING = norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING
H200 = dataclasses.replace(for_arch("sm_90a"), here=True)


@pytest.fixture(scope="module")
def cudnn():
    found = package.load_without_library()
    if isinstance(found, No):
        pytest.skip(str(found))
    return found


def part(g, nodes=None) -> Subgraph:
    g.validate()
    return Subgraph(g._ir, tuple(range(len(g._ir.nodes))) if nodes is None else nodes)


# The package


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert str(package.load()) == "nvidia-cudnn-frontend is not installed: install graphfuse[cudnn]"


@pytest.mark.parametrize(("version", "said"), [("1.31.9", "1.31.9"), ("", "unknown"), ("one", "one")])
def test_an_old_package(monkeypatch, version, said):
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(__version__=version))
    assert str(package.load()) == f"the package cudnn is of version {said}; nvidia-cudnn-frontend 1.32 is needed"


def test_a_package_that_misses_another(monkeypatch, tmp_path):
    (tmp_path / "cudnn.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    assert "cannot be imported: it needs 'a_package_that_is_not_there'" in str(package.load())


def test_a_missing_library(cudnn):
    try:
        cudnn.backend_version()
    except RuntimeError:
        assert "nvidia-cudnn-frontend finds no libcudnn (" in str(package.load())
    else:
        assert package.load() is cudnn


def test_it_is_asked_for_last(monkeypatch):
    """A graph that is not said, and a device without CUDA, are the reason before a missing package is."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    g = graphs.new()
    g.relu(g.tensor([2, 2])).set_output()
    assert "not installed" in str(ours.why_not(part(g), H200))
    assert "cuDNN runs on CUDA devices, not on" in str(ours.why_not(part(g), EMULATOR))
    chip = for_arch("sm_90a")
    assert "not for sm_90a (H200), which is not here" in str(ours.why_not(part(g), chip))
    g = graphs.new()
    g.softmax(g.tensor([2, 2])).set_output()
    assert "node 'softmax.0' (softmax) is no operation of cuDNN's" in str(ours.why_not(part(g), H200))


# What is not said


def _read_as_stored(g):
    g.relu(g.relu(g.tensor([4, 8])).set_output().set_data_type(BF16).set_name("y")).set_output()


def _norm(g, *args, **kwargs):
    g.rmsnorm(g.tensor([4, 8]), *args, norm_forward_phase=INFERENCE, **kwargs)[0].set_output()


UNSAID = {
    "masks": (lambda g: g.cmp_gt(g.tensor([4]), 1.0).set_output(), "'cmp_gt.0'.* is no operation of cuDNN's"),
    "blocks": (
        lambda g: [t.set_output() for t in g.block_scale_quantize(g.tensor([4, 32]), block_size=32)],
        r"'block_scale_quantize.0'.* is no operation of cuDNN's, or one with other results",
    ),
    "turned": (
        lambda g: g.conv_fprop(
            g.tensor([1, 2, 4, 4]), g.tensor([2, 2, 3, 3]), convolution_mode=convolution_mode.CONVOLUTION
        ).set_output(),
        "'conv_fprop.0'.* convolution_mode is CONVOLUTION.*accepted: CROSS_CORRELATION",
    ),
    "no scale": (lambda g: _norm(g, epsilon=1e-5), "'rmsnorm.0'.* has no scale, which cuDNN requires"),
    "no axes": (lambda g: _norm(g, g.tensor([1, 1]), 1e-5), "has a scale of one element, which tells cuDNN no axes"),
    "epsilon": (
        lambda g: _norm(g, g.tensor([1, 8]), g.tensor([1, 1])),
        "reads epsilon from memory; cuDNN takes it by value",
    ),
    "no bias": (
        lambda g: g.layernorm(g.tensor([4, 8]), g.tensor([1, 8]), None, 1e-5, INFERENCE)[0].set_output(),
        "'layernorm.0'.* has no bias, which cuDNN requires",
    ),
    "one tensor twice": (
        lambda g: g.instancenorm(g.tensor([2, 3, 4, 4]), *[g.tensor([1, 3, 1, 1])] * 2, 1e-5, INFERENCE)[
            0
        ].set_output(),
        "'instancenorm.0'.* has one tensor as scale and bias, of which cuDNN binds one alone",
    ),
    "its own scale": (
        lambda g: g.rmsnorm(*[g.tensor([1, 8])] * 2, 1e-5, norm_forward_phase=INFERENCE)[0].set_output(),
        "'rmsnorm.0'.* has one tensor as input and scale, of which cuDNN binds one alone",
    ),
    "float32 products": (
        lambda g: g.matmul(g.tensor([4, 8]), g.tensor([8, 4])).set_output(),
        "'matmul.0'.* reads A as FLOAT, .*read as TF32; accepted: types of 16 bits or less. The reference",
    ),
    "empty": (lambda g: g.relu(g.tensor([0, 8], name="x")).set_output(), "tensor 'x'.* has no elements"),
    "alignment": (
        lambda g: g.relu(g.tensor([4, 8], name="x", byte_alignment=8)).set_output(),
        "tensor 'x'.* is aligned to 8 bytes; cuDNN requires 16",
    ),
    "axes": (
        lambda g: g.transpose(g.tensor([4, 8], name="x"), [1, 0]).set_output(),
        "'transpose.0'.* reads tensor 'x'.*, which cuDNN gets with 4 axes",
    ),
    "axes of another node": (
        lambda g: [
            g.conv_fprop(g.tensor(x, name=f"{len(x)}-D"), g.tensor(w)).set_output()
            for x, w in (([1, 2, 4, 4], [2, 2, 3, 3]), ([1, 2, 4, 4, 4], [2, 2, 3, 3, 3]))
        ],
        "'conv_fprop.0'.* reads tensor '4-D'.*, which cuDNN gets with 5 axes",
    ),
    "momentum": (
        lambda g: g.batchnorm(
            g.tensor([2, 3, 4, 4]), *[g.tensor([1, 3, 1, 1]) for _ in range(4)], 1e-5, g.tensor([1] * 4)
        )[0].set_output(),
        "'batchnorm.0'.* reads momentum from memory; cuDNN takes it by value",
    ),
    "no running statistics": (
        lambda g: g.batchnorm(g.tensor([2, 3, 4, 4]), *[g.tensor([1, 3, 1, 1]) for _ in range(2)], epsilon=1e-5)[
            0
        ].set_output(),
        "'batchnorm.0'.* has no in_running_mean, which cuDNN requires",
    ),
    "numbers of other types": (
        lambda g: g.mul(g.tensor([4]), g.tensor([1], data_type=BF16, is_pass_by_value=True, name="n")).set_output(),
        "tensor 'n'.* is passed by value as BFLOAT16; accepted: FLOAT, DOUBLE, HALF",
    ),
    "stored": (_read_as_stored, r"'relu.1'.* reads input as BFLOAT16, rounded from FLOAT; .*read unrounded"),
}


@pytest.mark.parametrize(("draw", "reason"), UNSAID.values(), ids=UNSAID)
def test_what_is_not_said(draw, reason):
    g = graphs.new()
    draw(g)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(support.unsupported(part(g)))


def test_declared_rounding_is_not_said():
    g = graphs.new(intermediate_data_type=HALF, intermediate_rounding="declared")
    y = g.matmul(*(g.tensor(dim, data_type=HALF) for dim in ([2, 4, 8], [2, 8, 4])), name="product")
    g.relu(y).set_output()
    assert "reads input as HALF, rounded from FLOAT" in str(support.unsupported(part(g)))
    assert support.unsupported(part(g, (0,))) is None, "as an output of its own it is rounded"


def test_packed_elements_are_not_said():
    """Each part that reads or writes FP4."""
    facts = part(Norm(columns=64, output=FP4, blocks=True).graph())
    quantizer = next(i for i, n in enumerate(facts.nodes) if n.op_name == "block_scale_quantize")
    assert support.unsupported(Subgraph(facts.graph, tuple(i for i in facts.node_ids if i != quantizer))) is None
    g = graphs.new()
    g.identity(g.tensor([4, 8], data_type=FP4, name="codes")).set_output()
    assert "tensor 'codes' (FP4_E2M1 [4, 8], stride [8, 1]) packs two elements a byte" in str(
        support.unsupported(part(g))
    )


def test_every_entry_is_an_op():
    assert set(support.OP_RULES) <= set(OPS)


# Ranks


@given(
    shapes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=3),
    gap=st.integers(0, 3),
    product=st.booleans(),
)
def test_wider_tensors_have_the_same_elements(shapes, gap, product):
    g, made = graphs.new(), []
    for shape in shapes:
        stride, reach = [], 1 + gap
        for extent in reversed(shape):
            stride.insert(0, reach)
            reach = reach * extent + gap
        made.append(g.relu(g.tensor(shape, stride)).set_output())
    if product:
        g.matmul(g.tensor([2, 3]), g.tensor([3, 2])).set_output()
    facts = part(g)
    wide = ranks.layouts(facts.graph, facts.nodes)
    assert len({len(dim) for dim, _ in wide.values()} | {len(stride) for _, stride in wide.values()}) == 1
    assert len(next(iter(wide.values()))[0]) == max(3 if product else 4, *map(len, shapes))
    for number, (dim, stride) in wide.items():
        t = facts.graph.tensors[number]
        assert [e for e in dim if e != 1] == [e for e in t.dim if e != 1]
        for one, other in zip(_places(t.dim, t.stride), _places(dim, stride), strict=True):
            assert one == other


def _places(dim, stride):
    return (int(np.dot(at, stride)) for at in itertools.product(*map(range, dim)))


def test_batches_stand_in_front_and_pixels_behind():
    g = graphs.new()
    g.bias(g.matmul(g.tensor([4, 8], name="a"), g.tensor([8, 2])), g.tensor([1, 2], name="b")).set_output()
    facts = part(g)
    wide = {facts.graph.tensors[t].name: layout for t, layout in ranks.layouts(facts.graph, facts.nodes).items()}
    assert wide["a"] == ((1, 4, 8), (32, 8, 1)) and wide["b"][0] == (1, 1, 2)
    facts = part(Norm(rows=4, columns=8, beta=None).graph())
    wide = {facts.graph.tensors[t].name: layout for t, layout in ranks.layouts(facts.graph, facts.nodes).items()}
    assert wide["x"] == ((4, 8, 1, 1), (8, 1, 1, 1)) and wide["weight"][0] == (1, 8, 1, 1)


# What is said


def read_back(cudnn, translation, g) -> None:
    """The nodes of a cuDNN graph as nodes of an empty graph of ours, under the same names and uids."""
    theirs, mine = translation.graph, {}
    numbers = {v.name: k for k, v in vars(data_type).items() if isinstance(v, data_type)}

    def tensor(t):
        if t.uid not in mine:
            dtype = data_type[numbers[t.get_data_type().name]]
            if t.uid in translation.constants:
                mine[t.uid] = g.tensor_scalar(translation.constants[t.uid], dtype, t.name)
                mine[t.uid].set_dim(t.dim).set_stride(t.stride)
            else:
                by_value = t.is_pass_by_value
                mine[t.uid] = g.tensor(t.dim, t.stride, dtype, is_pass_by_value=by_value, name=t.name)
        return mine[t.uid]

    for node in theirs.nodes:
        name = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
        name = f"{name.removesuffix('_bwd')}_backward" if name.endswith("_bwd") else name
        op = OPS[name]
        inputs = {k: tensor(t) for k, t in node.inputs.items()}
        if op.pointwise:
            inputs = dict(zip((p.name for p in op.inputs), inputs.values(), strict=True))
        known = {a.name: a for a in op.attributes}
        params = {k: v for k, v in node.params.items() if k in known or k in {p.name for p in op.inputs}}
        for k, v in params.items():
            if type(v).__name__ in ("norm_forward_phase", "reduction_mode", "reshape_mode", "diagonal_alignment"):
                params[k] = next(m for m in known[k].types[0] if m.name == v.name)
        compute = data_type[node.compute_data_type.name]
        made = getattr(g, name)(**inputs, **params, compute_data_type=compute, name=node.name)
        made = made if isinstance(made, list) else [made]
        outputs = list(node.outputs.values())
        for mine_t, t in zip([m for m in made if m is not None], outputs, strict=False):
            mine[t.uid] = mine_t.set_name(t.name).set_data_type(data_type[t.get_data_type().name])
            mine_t.set_dim(t.dim).set_stride(t.stride).set_output(not t.is_virtual)


def same(cudnn, g) -> ours.Translation:
    facts = part(g)
    why = support.unsupported(facts)
    assert why is None or "float32 would be read as TF32" in why.reason  # a matter of values
    translation = ours.translate(cudnn, facts)
    copy = graphs.new()
    read_back(cudnn, translation, copy)
    copy.validate()
    assert copy.key() == g.key()
    names = {n.name for n in translation.graph.nodes}
    assert names == {n.name for n in facts.nodes}
    return translation


@given(graph=whole.drawn(max_ops=10, norms=("rmsnorm",)))
def test_any_graph_is_read_back_as_it_was(cudnn, graph):
    g = graph.build()
    translation = same(cudnn, g)
    uids = {t.name: t.uid for t in g._ir.tensors}
    bound = {g._ir.tensors[t].name: uid for t, uid in translation.bound.items()}
    assert bound == {t.name: uids[t.name] for t in g._ir.bound}
    assert {t.uid for t in translation.graph.nodes[-1].outputs.values()} <= set(uids.values())


def _attributes(g):
    x = g.tensor([2, 4, 3, 8], name="x")
    y = g.relu(x, negative_slope=0.25, lower_clip=-1.0, upper_clip=6.0)
    y = g.swish(g.leaky_relu(y, 0.5), swish_beta=1.702)
    y = g.relu_backward(x, y, upper_clip=2.0)
    g.reduction(y, mode=reduction_mode.AVG).set_dim([2, 4, 1, 8]).set_output()


def _training(g):
    x, scale, bias = g.tensor([2, 8, 3, 4]), g.tensor([1, 8, 1, 1]), g.tensor([1, 8, 1, 1])
    y, inverse = g.rmsnorm(x, scale, g.tensor([1] * 4, is_pass_by_value=True), bias, norm_forward_phase=TRAINING)
    inverse.set_output(), y.set_output()
    z, mean, other = g.layernorm(x, scale, bias, 1e-5, norm_forward_phase=TRAINING)
    z.set_output(), mean.set_output(), other.set_output()
    for made in (*g.rmsnorm_backward(z, x, scale, inverse, has_dbias=True),):
        made.set_output()
    for made in g.layernorm_backward(y, x, scale, mean, other):
        made.set_output()


def _dense(g):
    image = g.tensor([1, 4, 2, 6, 6], [288, 1, 144, 24, 4], BF16)
    y = g.conv_fprop(image, g.tensor([8, 2, 1, 3, 3], data_type=BF16), pre_padding=[0, 1, 2], post_padding=[0, 1, 0])
    g.bias(y, g.tensor([1, 8, 1, 1, 1])).set_output().set_data_type(BF16)
    window = {"padding": [1, 0, 1], "stride": [1, 2, 2]}
    loss = g.tensor([1, 8, 2, 3, 4], data_type=BF16)
    g.conv_dgrad(loss, g.tensor([8, 2, 3, 2, 1], data_type=BF16), **window).set_dim([1, 4, 2, 6, 6]).set_output()
    g.conv_wgrad(image, loss, **window).set_dim([8, 2, 3, 2, 1]).set_output()


def _attention(g):
    q, k, v = g.tensor([2, 4, 6, 8]), g.tensor([2, 2, 5, 8]), g.tensor([2, 2, 5, 16])
    o, stats = g.sdpa(q, k, v, 0.125, g.tensor([1, 4, 6, 5]), generate_stats=True, sliding_window_length=3)
    o.set_output(), stats.set_output()
    scale = g.tensor([1, 1, 1, 1], is_pass_by_value=True, name="scale")
    g.sdpa(q, k, v, scale, use_causal_mask_bottom_right=True)[0].set_output()


def _channels(g):
    x, wide = g.tensor([2, 8, 3, 4]), [g.tensor([1, 8, 1, 1]) for _ in range(4)]
    y, mean, inverse = g.instancenorm(x, *wide[:2], 1e-5, norm_forward_phase=TRAINING)
    mean.set_output(), inverse.set_output()
    for made in (*g.batchnorm(y, *wide, 1e-5, 0.1), *g.instancenorm_backward(x, x, wide[0], mean, inverse)):
        made.set_output()
    made = g.batchnorm_inference(x, *wide)
    for one in g.batchnorm_backward(made, x, *wide[:3]):
        one.set_output()


def _moves(g):
    y = g.slice(g.tensor([2, 8, 3, 4]), [slice(None), slice(1, 8, 2), slice(3), slice(-2, None)])
    g.relu(g.transpose(y, [0, 2, 3, 1])).set_output()


def _reshape(g):
    g.relu(g.reshape(g.tensor([2, 8, 3, 4])).set_dim([4, 4, 3, 4])).set_output()


GRAPHS = {
    "channels": _channels,
    "moves": _moves,
    "reshape": _reshape,
    "attributes": _attributes,
    "training": _training,
    "dense": _dense,
    "attention": _attention,
}


@pytest.mark.parametrize("draw", GRAPHS.values(), ids=GRAPHS)
def test_a_graph_is_read_back_as_it_was(cudnn, draw):
    g = graphs.new()
    draw(g)
    same(cudnn, g)


def test_numbers(cudnn):
    """A factor of attention is said as it is; other constants and what execute gives are tensors by value."""
    g = graphs.new()
    o = g.sdpa(g.tensor([1, 1, 4, 8]), g.tensor([1, 1, 4, 8]), g.tensor([1, 1, 4, 8]), attn_scale=0.125)[0]
    factor = g.tensor([1, 1, 1, 1], is_pass_by_value=True, name="factor")
    g.mul(g.add(o, 2.5, name="sum"), factor).set_output()
    facts = part(g)
    translation = ours.translate(cudnn, facts)
    assert translation.graph.nodes[0].params["attn_scale"] == 0.125
    by_name = {t.name: t for t in facts.graph.tensors}
    assert translation.constants == {by_name["sum::b"].uid: 2.5}
    assert translation.by_value == {by_name["factor"].id: by_name["factor"].uid}
    assert not {by_name["factor"].id, by_name["sum::b"].id} & translation.bound.keys()


@pytest.mark.parametrize("asked", attention_implementation)
def test_the_implementation_of_attention_is_asked_for(cudnn, asked):
    """AUTO, which is cuDNN's default, goes unsupported."""
    g = graphs.new()
    g.sdpa(*(g.tensor([1, 1, 4, 8]) for _ in "qkv"), implementation=asked)[0].set_output()
    said = ours.translate(cudnn, part(g)).graph.nodes[0].params.get("implementation")
    assert said is (None if asked.name == "AUTO" else cudnn.attention_implementation[asked.name])


def test_part_of_a_graph(cudnn):
    """What comes from outside is given, what goes outside is an output, of the type that it is carried in: an operand's
    is the one that it declares."""
    g = graphs.new(io_data_type=E4M3, intermediate_data_type=BF16)
    x = g.relu(g.tensor([2, 4, 8], name="a"), name="first").set_name("x")
    y = g.matmul(x, g.tensor([2, 8, 4], name="b"), name="second").set_name("y")
    g.add(y, g.tanh(y, name="third"), name="last").set_output().set_name("z")
    facts = part(g, (1, 2))
    translation = ours.translate(cudnn, facts)
    assert [n.name for n in translation.graph.nodes] == ["second", "third"]
    told = {t.name: t for n in translation.graph.nodes for t in (*n.inputs.values(), *n.outputs.values())}
    virtual = {name: t.is_virtual for name, t in told.items()}
    assert virtual == {"x": False, "b": False, "y": False, "third::OUT_0": False}
    types_ = {name: t.get_data_type().name for name, t in told.items()}
    assert types_ == {"x": "BFLOAT16", "b": "FP8_E4M3", "y": "FLOAT", "third::OUT_0": "FLOAT"}
    assert {facts.graph.tensors[t].name for t in translation.bound} == set(told)
    assert BF16 is facts.graph.tensors[facts.inputs[0]].dtype
