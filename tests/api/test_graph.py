"""The graph's methods: the order of steps, argument checks, and that any change undoes the steps."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch

import graphfuse
from graphfuse import (
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    build_plan_policy,
    heur_mode,
    norm_forward_phase,
)
from graphfuse.op_graph.positions import TRAILING
from graphfuse.ops import OPS, SPELLINGS
from support import graphs, oracle
from support.graphs import Norm

STEPS = {
    "validate": lambda g: g.validate(),
    "build_operation_graph": lambda g: g.build_operation_graph(),
    "create_execution_plans": lambda g: g.create_execution_plans([heur_mode.FALLBACK]),
    "check_support": lambda g: g.check_support(),
    "build_plans": lambda g: g.build_plans(),
}

# What a method needs to have run: the last of the steps above.
NEEDS = {
    "key": (lambda g: g.key(), "validate"),
    "create_execution_plans": (STEPS["create_execution_plans"], "build_operation_graph"),
    "create_execution_plan": (lambda g: g.create_execution_plan("reference"), "build_operation_graph"),
    "explain": (lambda g: g.explain(), "build_operation_graph"),
    "check_support": (STEPS["check_support"], "create_execution_plans"),
    "build_plans": (STEPS["build_plans"], "create_execution_plans"),
    "get_workspace_size": (lambda g: g.get_workspace_size(), "build_plans"),
    "execute": (lambda g: g.execute({}), "build_plans"),
    "execute_plan_at_index": (lambda g: g.execute_plan_at_index({}, None, 0), "build_plans"),
}


@pytest.mark.parametrize("method", NEEDS)
def test_a_step_too_early_names_the_one_that_is_missing(method):
    call, needed = NEEDS[method]
    g = Norm().graph()
    for step, run in STEPS.items():
        with pytest.raises(GraphStateError, match=r"'graph'|plan 0"):
            call(g)
        run(g)
        if step == needed:
            break
    try:
        call(g)
    except graphfuse.VariantPackError:
        pass  # an empty variant pack: past the check of the order


@pytest.mark.parametrize(
    "change",
    [
        lambda g, t: t.set_dim([4, 64]),
        lambda g, t: t.set_name("other"),
        lambda g, t: t.set_uid(99),
        lambda g, t: t.set_byte_alignment(4),
        lambda g, t: g.tensor([1]),
        lambda g, t: g.relu(t),
    ],
)
def test_a_change_undoes_the_steps(change):
    g = Norm().graph()
    g.build([heur_mode.FALLBACK])
    change(g, g.tensors[0])
    for call in (g.key, g.explain, g.get_workspace_size, lambda: g.execute({})):
        with pytest.raises(GraphStateError, match="first"):
            call()


def test_a_changed_graph_builds_again():
    g, case = Norm().graph(), Norm()
    g.build([heur_mode.FALLBACK])
    by_name = {t.get_name(): t for t in g.tensors}
    for name in ("x", "out"):
        by_name[name].set_dim([5, 64])
    smaller = Norm(rows=5)
    pack, outputs = smaller.inputs(), smaller.outputs()
    graphs.run(g, pack | outputs)
    assert (outputs["out"].double() - case.exact(pack)["out"]).abs().max() < 0.05


WRONG = [
    (
        lambda g, t: g.relu(torch.ones(2, 3)),
        GraphTypeError,
        r"got an array of shape \[2, 3\], of which tensor_like makes",
    ),
    (lambda g, t: g.relu("x"), GraphTypeError, r"relu.0.*input must be a tensor"),
    (lambda g, t: g.add(t, None), GraphTypeError, r"add.0.*b must be a tensor"),
    (lambda g, t: g.swish(t, swish_beta="1"), GraphTypeError, r"swish_beta must be float or int.*'1'"),
    (lambda g, t: g.swish(t, swish_beta=True), GraphTypeError, "swish_beta"),
    (lambda g, t: g.rmsnorm(t, t, 1e-5, norm_forward_phase="training"), GraphTypeError, "norm_forward_phase"),
    (lambda g, t: g.rmsnorm(t, t, True, norm_forward_phase=norm_forward_phase.INFERENCE), GraphTypeError, "epsilon"),
    (lambda g, t: g.relu(graphs.new().tensor([3], name="far")), GraphValidationError, "'far'.*another graph"),
    (lambda g, t: (g.relu(t, name="n"), g.tanh(t, name="n")), GraphValidationError, "node 'n'.*names must differ"),
    (lambda g, t: g.relu(), TypeError, "input"),
    (lambda g, t: g.relu(t, colour=1), TypeError, "colour"),
    (lambda g, t: g.create_execution_plans("A"), GraphTypeError, "heur_mode"),
    (lambda g, t: g.create_execution_plans([]), GraphTypeError, "heur_mode"),
    (lambda g, t: g.build_plans("all"), GraphTypeError, "build_plans: policy must be a build_plan_policy, got 'all'"),
    (
        lambda g, t: g.build([heur_mode.A], "all"),
        GraphTypeError,
        "build: policy must be a build_plan_policy, got 'all'",
    ),
    (lambda g, t: g.tensor([1], uid=-2), GraphTypeError, "uid must be an int >= 0, got -2"),
    (lambda g, t: g.tensor([1], uid=-1.0), GraphTypeError, "uid must be an int >= 0, got -1.0"),
    (
        lambda g, t: g.rmsnorm(norm_forward_phase.INFERENCE, t, t, None, 1e-5),
        GraphTypeError,
        "norm_forward_phase must be .*got 1e-05; by position: input, scale, epsilon, bias.*cuDNN's order differs",
    ),
    (
        lambda g, t: g.rmsnorm(t, t, None, 1e-5, norm_forward_phase.INFERENCE),
        GraphTypeError,
        "epsilon must be a tensor.*got None; by position: input, scale, epsilon, bias",
    ),
    (lambda g, t: g.deselect_engines("reference"), GraphTypeError, "deselect_engines: give a list"),
    (lambda g, t: g.deselect_engines(5), GraphTypeError, "deselect_engines: give a list, got 5"),
    (lambda g, t: g.relu(t, compute_data_type="float7"), GraphTypeError, "node 'relu.0'.*compute_data_type.*float7"),
    (lambda g, t: graphfuse.pygraph(io_data_type=7), GraphTypeError, "'graph': io_data_type: 7"),
    (lambda g, t: graphfuse.pygraph(compute_data_type=3), GraphTypeError, "'graph': compute_data_type: 3"),
    (lambda g, t: graphfuse.pygraph(5), GraphTypeError, "graph: a name must be a str, got 5"),
    (lambda g, t: graphfuse.pygraph(handle="cuda"), GraphTypeError, "'cuda' is not a handle; accepted: "),
    (lambda g, t: g.relu(t, name=7), GraphTypeError, "node of relu: a name must be a str, got 7"),
    (lambda g, t: g.tensor([2], name=5), GraphTypeError, "tensor: a name must be a str, got 5"),
    (lambda g, t: g.tensor_scalar(2.0, name=0), GraphTypeError, "tensor: a name must be a str, got 0"),
    (lambda g, t: g.tensor_scalar(2.0, "float7", "s"), GraphTypeError, "tensor 's': .*float7"),
    (lambda g, t: g.tensor_scalar(10**400, name="s"), GraphValidationError, "'s'.*does not fit float32; accepted"),
    (lambda g, t: g.tensor_scalar(3.7, "int32", "s"), GraphValidationError, "'s': 3.7.*integers from"),
    (lambda g, t: g.mul(t, 1e300), GraphValidationError, r"'mul.0::b': 1e\+300 does not fit float32; accepted"),
    (lambda g, t: g.swish(t, swish_beta=10**400), GraphValidationError, "'swish.0'.*swish_beta.*bits does not fit"),
    (lambda g, t: g.swish(t, swish_beta=1e300), GraphValidationError, r"'swish.0'.*swish_beta: 1e\+300 does not fit"),
    (lambda g, t: g.build(patterns=None), GraphTypeError, "patterns: give a list, got None"),
    (lambda g, t: g.build(engines="reference"), GraphTypeError, "engines: give a list, got 'reference'"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments(call, error, message):
    g = graphs.new()
    with pytest.raises(error, match=message):
        t = g.tensor([2, 3], name="t")
        g.identity(t).set_output()
        call(g, t)


def test_a_refused_number_leaves_nothing_behind():
    g = graphs.new()
    x = g.tensor([2])
    with pytest.raises(GraphValidationError):
        g.mul(x, 1e300)
    g.mul(x, 2.0).set_output()
    g.build([heur_mode.FALLBACK])


def test_methods_have_the_tables_signature():
    for op in OPS.values():
        found = inspect.signature(getattr(graphfuse.pygraph, op.name)).parameters
        parameters = [name for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        trailing = TRAILING.get(op.name, ("compute_data_type", "name"))
        assert parameters[0] == "self" and parameters[-len(trailing) :] == list(trailing)
        placed = {p.name for p in op.inputs if not p.by_name} | {a.name for a in op.attributes}
        assert set(parameters[1 : -len(trailing)]) == placed
        others = [(n, p.default) for n, p in found.items() if n not in parameters]
        refused = [(n, only) for n, only in op.inert_options.items() if n not in trailing]
        assert others == refused + [(n, None) for n in (*op.tuples, *op.given, *op.by_name)]
        assert all(found[n].default == only for n, (only, _) in op.not_offered.items())
        assert getattr(graphfuse.pygraph, op.name).__doc__ == op.doc


def test_places_by_position_are_of_methods_that_are_there():
    assert set(TRAILING) <= {*OPS, *SPELLINGS}
    assert all({"compute_data_type", "name"} <= set(names) for names in TRAILING.values())


def test_other_spellings_are_nodes_of_their_op():
    g = graphs.new()
    x = g.tensor([2, 3], name="x")
    biased = g.bias(name="b", input=x, bias=g.tensor([1, 3]))
    g.leaky_relu_backward(g.leaky_relu(biased, 0.25), biased, 0.5).set_output()
    made = [(n.op.name, n.attributes.get("negative_slope")) for n in g.nodes]
    assert made == [("add", None), ("relu", 0.25), ("relu_backward", 0.5)]
    assert list(g.nodes[0].inputs) == ["a", "b"] and g.nodes[0].inputs["a"] is x
    for name, spelling in SPELLINGS.items():
        parameters = list(inspect.signature(getattr(graphfuse.pygraph, name)).parameters)
        trailing = TRAILING.get(name, ("compute_data_type", "name"))
        if spelling.parameters is None:
            assert parameters == list(inspect.signature(getattr(graphfuse.pygraph, spelling.op)).parameters)
        else:
            assert parameters == ["self", *dict(spelling.parameters), *trailing]
        assert name not in OPS and getattr(graphfuse.pygraph, name).__doc__ == spelling.doc
    with pytest.raises(GraphTypeError, match="leaky_relu: missing.*negative_slope.*accepted: input, negative_slope"):
        g.leaky_relu(x)


def test_an_earlier_name_is_the_same_node():
    """With all options of the op, and its own name in errors about arguments."""
    keys = []
    for name in ("sdpa", "scaled_dot_product_flash_attention"):
        g = graphs.new()
        q, k, v = (g.tensor([1, 2, 4, 8], name=name) for name in "qkv")
        o, stats = getattr(g, name)(q, k, v, attn_scale=0.5, use_causal_mask=True, generate_stats=True, name="a")
        o.set_output(), stats.set_output()
        given = q, k, v, g.tensor([1, 2, 4, 8]), g.tensor([1, 2, 4, 8]), g.tensor([1, 2, 4, 1])
        for t in getattr(g, f"{name}_backward")(*given, attn_scale=0.5, use_causal_mask=True, name="b"):
            t.set_output()
        g.validate()
        keys.append(g.key())
    assert keys[0] == keys[1] and [n.op.name for n in g.nodes] == ["sdpa", "sdpa_backward"]
    with pytest.raises(GraphTypeError, match="scaled_dot_product_flash_attention: missing.*'v'"):
        g.scaled_dot_product_flash_attention(q, k)


def test_cudnn_names_are_there():
    """What the cuDNN frontend's samples call, under ``import graphfuse as cudnn``."""
    for name in graphfuse.__all__:
        assert getattr(graphfuse, name) is not None
    assert graphfuse.cudnnGraphNotSupportedError is GraphNotSupportedError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        graphfuse.nothing  # noqa: B018


def test_outputs_of_rmsnorm_by_phase():
    g = graphs.new()
    x, w = g.tensor([4, 8]), g.tensor([1, 8])
    y, nothing = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    assert nothing is None
    z, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    y.set_output(), z.set_output(), inverse.set_output()
    g.validate()
    assert inverse.get_dim() == [4, 1] and inverse.get_data_type() is graphs.FLOAT


@pytest.mark.parametrize("number", [2.5, 3, float("inf"), np.float32(2.5), np.int64(3)])
@pytest.mark.parametrize("order", ["tensor first", "number first"])
def test_numbers_are_operands(number, order):
    """Either operand may be a number, and the node's shape follows the tensor."""
    g = graphs.new()
    x = g.tensor([2, 3, 4], name="x")
    made = g.mul(x, number) if order == "tensor first" else g.mul(number, x)
    made.set_output().set_name("out")
    data, out = torch.randn(2, 3, 4), torch.empty(2, 3, 4)
    graphs.run(g, {"x": data, "out": out})
    assert torch.equal(out, data * float(number))


def test_numbers_of_numpy_are_numbers():
    """Of a node's arguments, as of extents and of what a variant pack gives."""
    g, plain = graphs.new(), graphs.new()
    for graph, real, whole in ((g, np.float32, np.int64), (plain, float, int)):
        x = graph.tensor([2, 3], name="x")
        y = graph.softmax(graph.relu(x, negative_slope=real(0.5)), axis=whole(1))
        graph.add(y, graph.tensor_scalar(real(0.25))).set_output()
        graph.validate()
    assert str(g) == str(plain)
    for wrong in (np.True_, np.array([2.0]), np.complex64(1)):
        with pytest.raises(GraphTypeError, match="value must be an int or float"):
            g.tensor_scalar(wrong)


def test_build_plans_all_builds_every_plan():
    g = Norm().graph()
    for step in list(STEPS.values())[:-1]:
        step(g)
    g.build_plans(build_plan_policy.ALL)
    case = Norm()
    for index in range(g.get_execution_plan_count()):
        g.execute_plan_at_index(case.inputs() | case.outputs(), None, index)


def test_the_seed_sample_with_four_dimensions():
    """Dimensions [N, C, 1, 1] as the cuDNN frontend's sample writes them, on the CPU."""
    n, c = 48, 96
    g = graphs.new()
    x = g.tensor(dim=[n, c, 1, 1], stride=[c, 1, 1, 1], data_type=graphs.BF16)
    scale = g.tensor(dim=[1, c, 1, 1], stride=[c, 1, 1, 1], data_type=graphs.BF16)
    epsilon = g.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=graphs.FLOAT, is_pass_by_value=True)
    y = g.rmsnorm(norm_forward_phase=norm_forward_phase.INFERENCE, input=x, scale=scale, epsilon=epsilon)[0]
    y.set_dim([n, c, 1, 1]).set_stride([c, 1, 1, 1]).set_data_type(graphs.BF16)
    z = g.swish(input=y, swish_beta=1.0).set_output(True).set_data_type(graphs.BF16)
    case = Norm(n, c, eps=None)
    pack, out = case.inputs(), case.outputs()["out"]
    g.build([heur_mode.A])
    g.execute(
        {
            x: pack["x"].view(n, c, 1, 1),
            scale: pack["weight"].view(1, c, 1, 1),
            epsilon: torch.full((1, 1, 1, 1), case.EPS),
            z: out.view(n, c, 1, 1),
        },
        torch.empty(0, dtype=torch.uint8),
    )
    assert (out.double() - case.exact(pack)["out"]).abs().max() < 0.05


@pytest.mark.parametrize(
    "arguments",
    [{"dim": [2, -1]}, {"dim": [2], "stride": ["a"]}, {"dim": [2], "byte_alignment": 3}, {"dim": [2], "uid": 1}],
)
def test_a_refused_tensor_leaves_the_graph_as_it_was(arguments):
    g = graphs.new()
    x = g.tensor([4], uid=1)
    g.relu(x).set_output()
    before = str(g)
    with pytest.raises(GraphValidationError):
        g.tensor(**arguments)
    assert str(g) == before
    g.validate()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g, x: g.rmsnorm(x, x),
            "rmsnorm: missing a required argument: 'epsilon'; accepted: input, scale=None, epsilon",
        ),
        (lambda g, x: g.swish(x, beta=2), "swish: .*'beta'; accepted: input, swish_beta=1.0"),
        (lambda g, x: g.relu(), "relu: missing a required argument: 'input'"),
    ],
)
def test_wrong_arguments_are_told_what_the_op_takes(call, message):
    g = graphs.new()
    with pytest.raises(GraphTypeError, match=message):
        call(g, g.tensor([4, 4]))


def test_a_node_without_a_name_gets_one_that_is_free():
    g = graphs.new()
    x = g.relu(g.tensor([2, 3]), name="relu.1")
    for _ in range(2):
        x = g.relu(x)
    g.tanh(x).set_output()
    assert [node.name for node in g.nodes] == ["relu.1", "relu.2", "relu.3", "tanh.0"]
    with pytest.raises(GraphValidationError, match="node 'relu.2'.*names must differ"):
        g.relu(x, name="relu.2")


def test_a_default_name_gives_way_to_the_users():
    g = graphs.new()
    x = g.tensor([2], name="x")
    for name in ("relu.1", "", "relu.5", "", "", ""):
        x = g.relu(x, name=name)
    assert [node.name for node in g.nodes] == ["relu.1", "relu.2", "relu.5", "relu.3", "relu.4", "relu.6"]


def test_build_operation_graph_validates_what_was_not():
    g, case = Norm().graph(), Norm()
    for step in list(STEPS)[1:]:
        STEPS[step](g)
    pack, outputs = case.inputs(), case.outputs()
    g.execute(pack | outputs)
    graphs.hold(case, pack, outputs)


def test_build_operation_graph_refuses_what_validate_does():
    g = graphs.new()
    g.relu(g.tensor([2]))
    with pytest.raises(GraphValidationError, match="no output"):
        g.build_operation_graph()
    with pytest.raises(GraphStateError, match="call build_operation_graph"):
        g.create_execution_plans()


def test_there_are_no_plans_before_there_are_any():
    g = Norm().graph()
    assert g.get_execution_plan_count() == 0
    g.build_operation_graph()
    assert g.get_execution_plan_count() == 0
    g.create_execution_plans([heur_mode.FALLBACK])
    assert g.get_execution_plan_count() == 1
    g.tensor([1])  # a change undoes the steps
    assert g.get_execution_plan_count() == 0


def test_build_takes_a_policy():
    g, case = Norm().graph(), Norm()
    g.build([heur_mode.FALLBACK, heur_mode.A], build_plan_policy.ALL)
    for index in range(g.get_execution_plan_count()):
        g.execute_plan_at_index(case.inputs() | case.outputs(), None, index)


def test_outputs_have_cudnns_names():
    g = graphs.new()
    x, w, loss = g.tensor([4, 32]), g.tensor([1, 32]), g.tensor([4, 32])
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    made = {
        "rmsnorm.0": (y, inverse),
        "back": g.rmsnorm_backward(loss, x, w, inverse, has_dbias=True, name="back"),
        "swish.0": [g.swish(y)],
        "sum": [g.add(x, x, name="sum")],
        "reduction.0": [g.reduction(y)],
        "block_scale_quantize.0": g.block_scale_quantize(y),
    }
    assert {node: [t.get_name() for t in outputs] for node, outputs in made.items()} == {
        "rmsnorm.0": ["rmsnorm.0::Y", "rmsnorm.0::INV_VARIANCE"],
        "back": ["back::DX", "back::Dscale", "back::Dbias"],
        "swish.0": ["swish.0::OUT_0"],
        "sum": ["sum::OUT_0"],
        "reduction.0": ["reduction.0::OUT_0"],
        "block_scale_quantize.0": ["block_scale_quantize.0::Y", "block_scale_quantize.0::scale"],
    }


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (lambda g, x: g.swish(x, None), lambda g, x: g.swish(x)),
        (lambda g, x: g.relu(x, None, None, None), lambda g, x: g.relu(x)),
        (lambda g, x: g.relu(x, 0.25, None, 2.0), lambda g, x: g.relu(x, negative_slope=0.25, upper_clip=2.0)),
        (lambda g, x: g.swish_backward(x, x, swish_beta=None), lambda g, x: g.swish_backward(x, x)),
        (lambda g, x: g.reduction(x, None), lambda g, x: g.reduction(x)),
        (lambda g, x: g.tensor([2, 32], uid=-1) and g.tanh(x), lambda g, x: g.tensor([2, 32]) and g.tanh(x)),
    ],
)
def test_cudnns_word_for_what_is_not_set(given, meant):
    def made(call):
        g = graphs.new()
        call(g, g.tensor([2, 32])).set_output()
        g.validate()
        return g

    assert str(made(given)) == str(made(meant)) and made(given).key() == made(meant).key()


TYPES_OF_STATISTICS = {
    "output": ({"io_data_type": graphs.BF16, "intermediate_data_type": graphs.HALF}, True, graphs.BF16),
    "virtual": ({"io_data_type": graphs.BF16, "intermediate_data_type": graphs.HALF}, False, graphs.HALF),
}


@pytest.mark.parametrize(("types", "output", "want"), TYPES_OF_STATISTICS.values(), ids=TYPES_OF_STATISTICS)
def test_statistics_have_the_graphs_types(types, output, want):
    """As every tensor whose type is not set, so that a graph for cuDNN takes the same buffers here."""
    g = graphfuse.pygraph(**types)
    x, w = g.tensor([4, 8]), g.tensor([1, 8])
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    y.set_output()
    inverse.set_output(output)
    back = graphfuse.pygraph(**types)
    stored = back.tensor([4, 1])
    made = back.rmsnorm_backward(*(back.tensor(t.get_dim()) for t in (x, x, w)), stored, has_dbias=True)
    for t in made:
        t.set_output(output)
    made[0].set_output()
    g.validate(), back.validate()
    assert inverse.get_data_type() is want
    assert [t.get_data_type() for t in made[1:]] == [want, want]
    assert stored.get_data_type() is graphs.BF16


def test_statistics_without_any_type_are_named():
    g = graphfuse.pygraph()
    x, w = (g.tensor(dim, data_type=graphs.BF16) for dim in ([4, 8], [1, 8]))
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING, name="RMS")
    y.set_output().set_data_type(graphs.BF16)
    inverse.set_output()
    with pytest.raises(GraphValidationError, match="'RMS::INV_VARIANCE' has no data type.*io_data_type"):
        g.validate()
    inverse.set_data_type(graphs.FLOAT)
    g.validate()


def test_rounded_statistics_are_computed():
    """inv_variance stored in the graph's bfloat16; the norm itself does not see the rounding."""
    g = graphs.new(io_data_type=graphs.BF16)
    x, w = g.tensor([6, 32], name="x"), g.tensor([32], name="w")
    y, inverse = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.TRAINING)
    y.set_output().set_name("y"), inverse.set_output().set_name("inverse")
    pack = {"x": torch.randn(6, 32).bfloat16(), "w": torch.randn(32).bfloat16()}
    got = {"y": torch.empty(6, 32).bfloat16(), "inverse": torch.empty(6, 1).bfloat16()}
    graphs.run(g, pack | got)
    for name, want in zip(got, oracle.rmsnorm(pack["x"], pack["w"], 1e-5), strict=True):
        assert (oracle.ulps(got[name], oracle.rounded(want, torch.bfloat16)) <= 1).all()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("builds", [False, True])
def test_a_graph_is_not_copied_unseen(way, builds):
    """A shallow copy shared the list of nodes: what was drawn into it was in the first, whose plans stayed."""
    g = graphs.new()
    x = g.tensor([2, 3], name="x", data_type=graphs.FLOAT)
    g.relu(x).set_output().set_data_type(graphs.FLOAT)
    if builds:
        g.build()
    for of in (g, [x]) if way is not copy.copy else (g,):
        with pytest.raises(GraphNotSupportedError, match=r"neither copied nor pickled; instead: .*to_json"):
            way(of)
