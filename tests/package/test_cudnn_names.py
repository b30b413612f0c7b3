"""Every public name of cuDNN's frontend is offered, or answers with what to use instead."""

import pytest
import torch

import cudnn_compatibility as compatibility
import graphfuse
from graphfuse import GraphfuseError, GraphNotSupportedError, GraphTypeError, NotOfferedError, create_handle
from graphfuse.api import node_arguments
from graphfuse.base import cudnn_names
from graphfuse.op_graph.positions import TRAILING
from graphfuse.ops import OPS
from support import graphs

X = torch.tensor([-200.0, -3.0, -0.5, 0.25, 4.0, 90.0], dtype=torch.float64)


def test_the_page_is_as_written():
    assert compatibility.PATH.read_text() == compatibility.render(), f"run {compatibility.COMMAND}"


@pytest.mark.parametrize("section", compatibility.SECTIONS)
def test_what_is_not_offered_says_what_to_use(section):
    _, owner, instead = compatibility.SECTIONS[section]
    having, found = owner(), compatibility.rows(section)
    missing = [row.name for row in found if row.verdict == compatibility.NOT_OFFERED]
    assert set(instead) == set(missing), "a name is offered by now, or is none of cuDNN's"
    for name in missing:
        assert getattr(having, name, None) is None  # it is an AttributeError, too
        with pytest.raises(NotOfferedError, match=f"'{name}'.*; instead: ") as error:
            getattr(having, name)
        assert isinstance(error.value, GraphfuseError) and instead[name] in str(error.value)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.not_offered])
def test_refused_options_say_what_to_use(name):
    """In the error, and in the page where cuDNN 1.32 has them."""
    op, page = OPS[name], {row.name: row.how for row in compatibility.rows("pygraph")}
    for option, (nothing, instead) in op.not_offered.items():
        required = {a.name: () for a in op.attributes if a.required}
        for unasked in (None, nothing):
            node_arguments.attributes("here", op, required | {option: unasked})
        with pytest.raises(GraphNotSupportedError, match=rf"^here: {option} is 'x'; instead: \w.* \w") as error:
            node_arguments.attributes("here", op, required | {option: "x"})
        assert str(error.value).endswith(instead)
        assert option not in compatibility.NAMES["pygraph"][name] or instead in page[name]


def test_no_refusal_without_a_reason():
    """Each argument that the page counts as refused has one."""
    found = [row for section in compatibility.SECTIONS for row in compatibility.rows(section)]
    refusing = [row for row in found if False in row.takes.values()]
    assert refusing and all("(instead: " in row.how for row in refusing)
    assert all(len(hint.split()) > 1 for _, hint in cudnn_names.KEYWORDS.values())


def test_ready_made_kernels_say_what_to_use():
    for name in compatibility.NAMES["ready_made"]:
        assert getattr(graphfuse, name, None) is None
        with pytest.raises(NotOfferedError, match=f"'{name}', nor others of cuDNN's ready-made kernels; instead: \\w"):
            getattr(graphfuse, name)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("GatedAttentionBlockFwd", "torch.nn.functional.scaled_dot_product_attention"),
        ("gemm_proj_rope_mxfp8_wrapper_sm100", "torch.matmul"),
        ("conv3d_rmsnorm_silu_wrapper_sm100", "torch.nn.functional.conv1d or conv3d"),
        ("RmsNormSiluPadSm100", "rmsnorm"),
        ("tail_rope", "rotate"),
    ],
)
def test_the_family_of_a_kernel(name, hint):
    """A name that has words of several is of the one that most of its work is."""
    with pytest.raises(NotOfferedError, match=f"instead: {hint}"):
        getattr(graphfuse, name)


@pytest.mark.parametrize("name", ["_gemm", "__moe__", "softmaxx"])
def test_names_of_no_kernel(name):
    with pytest.raises(AttributeError) as error:
        getattr(graphfuse, name)
    assert not isinstance(error.value, GraphfuseError)


@pytest.mark.parametrize("name", compatibility.NAMES["enums"])
def test_members_that_are_not_there(name):
    kind, instead = getattr(graphfuse, name), cudnn_names.MEMBERS.get(name, {})
    theirs = set(compatibility.NAMES["enums"][name])
    assert set(instead) == theirs - set(kind.__members__)
    assert all(getattr(kind, m) is kind[m] for m in theirs - set(instead))
    for member, hint in instead.items():
        with pytest.raises(NotOfferedError, match=f"{name} has no '{member}'") as error:
            getattr(kind, member)
        assert str(error.value).endswith(f"instead: {hint}")
    with pytest.raises(AttributeError, match="'NOTHING'"):
        kind.NOTHING  # noqa: B018


@pytest.mark.parametrize("section", compatibility.SECTIONS)
def test_what_is_said_by_hand_is_of_names_that_are_there(section):
    found = {row.name: row for row in compatibility.rows(section)}
    assert all(found[name].verdict == compatibility.DIFFERS_ for name in compatibility.DIFFERS[section])


def test_compared():
    def ours(self, a, b, c=1, *, d=2): ...

    def every(self, a, **others): ...

    assert compatibility.compared(["a", "b"], ours) == compatibility.compared(["a", "b", "c"], ours) == ""
    assert compatibility.compared(["a", "*", "d", "c"], ours) == ""
    assert compatibility.compared(["b", "a"], ours) == "by position the 1st is `a`: give names"
    assert compatibility.compared(["a", "c"], ours) == "by position the 2nd is `b`: give names"
    assert compatibility.compared(["a", "b", "c", "d"], ours) == "by position the 4th is none: give names"
    assert compatibility.compared(["a", "e"], ours) == "without `e`"
    assert compatibility.compared(["a", "e"], every) == ""


@pytest.mark.parametrize("having", [graphfuse, graphfuse.pygraph(), graphfuse.pygraph().tensor([1])])
def test_other_names_are_plain_attribute_errors(having):
    with pytest.raises(AttributeError, match="'nothing_of_cudnn'") as error:
        having.nothing_of_cudnn  # noqa: B018
    assert not isinstance(error.value, GraphfuseError)


def test_first_lines_of_a_script():
    assert graphfuse.backend_version() >= 91200
    assert graphfuse.backend_version_string().split(".")[0] == str(graphfuse.backend_version() // 10000)


def test_arguments_of_the_constructor():
    """cuDNN's, in its order; those that ask for nothing are accepted."""
    kind = graphfuse.data_type
    handle = create_handle("cpu")
    given = ("g", kind.HALF, kind.FLOAT, kind.FLOAT, handle, None, None, None, None, True, True, None)
    g = graphfuse.pygraph(*given, is_cuda_graph_replay_expected=True)
    assert (g.name, g.io_data_type, g.handle) == ("g", kind.HALF, handle)
    for argument in ("sm_count", "cuda_graph_retention"):
        hint = cudnn_names.KEYWORDS[argument][1]
        with pytest.raises(GraphNotSupportedError) as error:
            graphfuse.pygraph(**{argument: True})
        assert f"{argument} is True; instead: {hint}" in str(error.value)
    with pytest.raises(GraphTypeError, match="is_dynamic_shape_enabled: give True or False, got 'yes'"):
        graphfuse.pygraph(is_dynamic_shape_enabled="yes")


def test_arguments_of_tensor():
    g = graphfuse.pygraph()
    x = g.tensor([4], [1], graphfuse.data_type.HALF, False, False, None, graphfuse.tensor_reordering.NONE, "x", -1, 1)
    assert x.get_name() == "x"
    promised = g.tensor([4], None, graphfuse.data_type.HALF, alignment_value=8)
    assert promised.set_alignment_value(16) is promised
    for wrong in (0, 2.0, True):
        with pytest.raises(graphfuse.GraphValidationError, match=f"alignment value must be .*got {wrong!r}"):
            g.tensor([4], alignment_value=wrong)
    ragged = g.tensor([4], ragged_offset=x, ragged_offset_multiplier=2)
    assert (ragged.get_ragged_offset(), ragged.get_ragged_offset_multiplier()) == (x, 2)
    assert len(g.tensors) == 3


@pytest.mark.parametrize("name", sorted(TRAILING))
def test_the_name_of_a_node_in_cudnns_place(name):
    """By position, where cuDNN has it in another place than most of its methods have."""
    g = graphfuse.pygraph(io_data_type=graphfuse.data_type.FLOAT)
    theirs = compatibility.NAMES["pygraph"][name]
    given = {"axis": 0, "negative_slope": 0.5, "padding": 0.0, "compute_data_type": graphfuse.data_type.DOUBLE}
    given |= {"name": "mine"} | dict.fromkeys(("A", "B", "a", "b", "input", "loss"), g.tensor([4, 4]))
    getattr(g, name)(*(given.get(argument) for argument in theirs))
    node = g.get_node("mine")
    assert node is g.nodes[-1] and node.compute is graphfuse.data_type.DOUBLE
    assert g.get_node("other") is None


@pytest.mark.parametrize(
    "method, keyword, value, shown",
    [
        ("set_data_type", "dtype", graphfuse.data_type.HALF, lambda t: t.get_data_type() is graphfuse.data_type.HALF),
        ("set_output", "value", True, lambda t: not t.get_is_virtual()),
        ("set_is_virtual", "value", False, lambda t: not t.get_is_virtual()),
        ("set_is_pass_by_value", "value", True, lambda t: t.get_is_pass_by_value()),
    ],
)
def test_keywords_of_setters(method, keyword, value, shown):
    g = graphfuse.pygraph()
    t = g.relu(g.tensor([4]))
    assert not shown(t) and getattr(t, method)(**{keyword: value}) is t and shown(t)
    with pytest.raises(GraphTypeError, match=f"{method}: {keyword} is cuDNN's name of .*; give one of them"):
        getattr(t, method)(value, **{keyword: value})


def test_vectors_of_a_tensor_are_none():
    x = graphfuse.pygraph().tensor([4], name="x")
    assert (x.get_vector_count(), x.get_vector_dimension()) == (1, -1)
    assert x.set_vector_count_and_dimension(1, -1) is x
    with pytest.raises(GraphNotSupportedError, match="tensor 'x': vectors of 4 along axis 1; accepted: 1 and -1"):
        x.set_vector_count_and_dimension(4, 1)


@pytest.mark.parametrize(
    "set_up, message",
    [
        (lambda g: g.relu(g.tensor([4])).set_name("x"), "tensor 'x' has no dim: call set_dim"),
        (lambda g: g.relu(g.tensor([4])).set_dim([4]).set_name("x"), "tensor 'x' has no stride: call set_stride"),
        (lambda g: g.tensor([4, 1], [1], name="x"), r"dim \[4, 1\] and stride \[1\], which differ in rank"),
        (lambda g: g.tensor([1], is_pass_by_value=True).set_is_virtual(True), "is virtual and passed by value"),
    ],
)
def test_a_tensor_checks_itself(set_up, message):
    g = graphs.new(device="cpu")
    t = set_up(g)
    with pytest.raises(graphfuse.GraphValidationError, match=message):
        t.validate()
    assert g.tensor([4]).validate() is None


def test_plans_are_what_create_execution_plan_takes():
    g = graphs.new(device="cpu")
    assert g.plans == []
    y = g.relu(g.tensor([4])).set_output()
    g.build([graphfuse.heur_mode.FALLBACK])
    assert [(p.engine_id, p.knobs) for p in g.plans] == [g.get_engine_and_knobs_at_index(0)]
    assert g.create_execution_plan(g.plans[0].engine_id, g.plans[0].knobs) == len(g.plans) - 1 == 1
    assert y.validate() is None  # what was inferred counts


def _halved():
    """A graph of 0.5 x on the CPU, built; its tensors, and buffers for them."""
    g = graphs.new(device="cpu")
    x = g.tensor_like(X.float(), "x").set_uid(7)
    y = g.mul(x, 0.5).set_output().set_uid(11)
    g.build([graphfuse.heur_mode.FALLBACK], ctx=None)
    return g, (x, y), (X.float(), torch.full(X.shape, torch.nan))


@pytest.mark.parametrize("index", [(), (0,)])
def test_packs_in_cudnns_spellings(index):
    for given in (
        lambda tensors, buffers: {"tensor_dict": dict(zip(tensors, buffers, strict=True))},
        lambda tensors, buffers: {"tensor_dict": buffers, "tensor_uids": (7, 11)},
        lambda tensors, buffers: {"variant_pack": list(buffers)[::-1], "tensor_uids": [11, 7]},
    ):
        g, tensors, buffers = _halved()
        call = g.execute_plan_at_index if index else g.execute
        call(**given(tensors, buffers), **({"index": 0} if index else {}))
        assert torch.equal(buffers[1], X.float() / 2)


def test_packs_by_position():
    g, _, buffers = _halved()
    g.execute(buffers, None, None, None, None, None, (7, 11))
    assert torch.equal(buffers[1], X.float() / 2)


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"variant_pack": {}, "tensor_dict": {}}, GraphTypeError, "tensor_dict is cuDNN's name of variant_pack"),
        ({"tensor_dict": {7: X}, "tensor_uids": [7]}, GraphTypeError, "variant_pack must be a list or tuple, got dict"),
        ({"tensor_dict": [X], "tensor_uids": 7}, GraphTypeError, "tensor_uids must be a list or tuple, got int"),
        ({"tensor_dict": [X], "tensor_uids": ["x"]}, GraphTypeError, r"tensor_uids\[0\] must be an int, got 'x'"),
        ({"tensor_dict": [X], "tensor_uids": [7, 11]}, graphfuse.VariantPackError, "1 buffer and 2 tensor_uids"),
        ({"tensor_dict": [X, X], "tensor_uids": [7, 7]}, graphfuse.VariantPackError, "has 7 twice"),
        ({"tensor_dict": [X.float()], "tensor_uids": [7]}, graphfuse.VariantPackError, "11"),
        ({}, graphfuse.VariantPackTypeError, "NoneType"),
    ],
)
def test_packs_that_are_refused(given, error, says):
    g, _, (_, out) = _halved()
    for call, what in ((g.execute, "execute"), (g.execute_plan_at_index, "execute_plan_at_index")):
        with pytest.raises(error, match=says) as raised:
            call(**given)
        assert what in str(raised.value) or "variant pack" in str(raised.value)
    assert out.isnan().all()


def test_tensors_of_a_graph():
    g, (x, y), _ = _halved()
    (factor,) = (t for t in g.tensors if t.value is not None)
    assert g.get_inputs() == [x, factor] and g.get_outputs() == [y]
    assert g.find_tensor("x") is g.find_tensor(7) is x and g.find_tensor(y.get_name()) is y
    assert g.find_tensor("z") is g.find_tensor(8) is None
    assert factor.get_has_compile_time_constant() and not x.get_has_compile_time_constant()
    assert x.set_alignment(32) is x and x.get_alignment() == x.get_byte_alignment() == 32
    x.set_name("twin"), y.set_name("twin")
    with pytest.raises(graphfuse.GraphValidationError, match="'twin' names 2 tensors; accepted: their uids 7, 11"):
        g.find_tensor("twin")
    for wrong in (x, True, 1.0):
        with pytest.raises(GraphTypeError, match="find_tensor: give a name or a uid, got"):
            g.find_tensor(wrong)


def test_a_plan_that_is_selected_is_the_one_that_is_built():
    g = graphs.Norm(rows=3).graph("emulator")
    g.build_operation_graph()
    g.create_execution_plans([graphfuse.heur_mode.A])
    last = g.get_execution_plan_count() - 1
    assert g.select_plan(last) is g
    g.build_plans()
    assert g._planner.selected() == last
    g.select_plan(0)
    with pytest.raises(graphfuse.GraphStateError, match="no plan is built and allowed"):
        g.get_workspace_size()
    assert g.select_plan(last)._planner.selected() == last  # it is built
    g.select_plan(0).deselect_engines(["rows"])
    with pytest.raises(GraphNotSupportedError, match="plan 0 .*engine 'rows' is deselected"):
        g.build_plans()  # and no other takes its place
    with pytest.raises(graphfuse.GraphValidationError, match="plan index 99 is out of range"):
        g.select_plan(99)


def test_an_engine_under_cudnns_keyword():
    g, _, _ = _halved()
    engine, knobs = g.get_engine_and_knobs_at_index(0)
    assert g.create_execution_plan(engine_id=engine, knobs=knobs) == 1
    assert g.get_knobs_for_engine(engine_id=0) == []
    with pytest.raises(GraphTypeError, match="engine_id is cuDNN's name of engine"):
        g.create_execution_plan(engine, engine_id=engine)


@pytest.mark.parametrize("method", ["build", "build_plans"])
def test_a_context_is_refused(method):
    g, _, _ = _halved()
    with pytest.raises(GraphNotSupportedError, match=f"{method}: ctx is 3; instead: give the handle"):
        getattr(g, method)(ctx=3)


def test_groups_of_rows():
    """None, cuDNN's default, is accepted; tensors of offsets are refused by name."""
    g = graphs.new(device="cpu")
    x = g.tensor([4, 32])
    g.reduction(x, mode=graphfuse.reduction_mode.ADD, group_offset=None)
    g.block_scale_quantize(x, block_size=32, group_offset=None)
    for refused in (
        lambda: g.reduction(x, mode=graphfuse.reduction_mode.ADD, group_offset=x),
        lambda: g.block_scale_quantize(x, block_size=32, group_offset=x),
    ):
        with pytest.raises(GraphNotSupportedError, match="group_offset is <tensor .*; instead: a node for each group"):
            refused()
