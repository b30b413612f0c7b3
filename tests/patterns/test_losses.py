"""Cross entropy in one kernel each way: values, the same bits as its nodes and for every knob, what is refused."""

from dataclasses import replace

import pytest
import torch

from graphfuse import GraphNotSupportedError, GraphTypeError, GraphValidationError, heur_mode, reduction_mode
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import graphs
from support.emulation import Planned
from support.graphs import BF16, FLOAT, HALF
from support.losses import INT32, INT64, INTEGERS, CrossEntropy, Window


def planned(problem, knobs: object = None, seed: int = 0) -> Planned:
    return Planned(problem.graph("emulator"), problem.inputs(seed=seed) | problem.outputs(), knobs)


def hold(problem, run: Planned) -> None:
    problem.hold(run.pack, {name: run.pack[name] for name in problem.outputs()})


LENGTHS = [(17, 1), (17, 7), (12, 1000), (8, 32000), (9, 50257), (8, 131072)]


@pytest.mark.emulate
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("rows, columns", LENGTHS)
def test_values(rows, columns, backward):
    dtype, target = (BF16, HALF, FLOAT)[columns % 3], (INT32, INT64)[columns % 2]
    problem = CrossEntropy(rows, columns, dtype, target, backward)
    run = planned(problem)
    run.run()
    hold(problem, run)


KINDS = {
    "smoothing": dict(label_smoothing=0.1),
    "all smoothing": dict(label_smoothing=1.0),
    "z": dict(z_loss=1e-2),
    "both": dict(label_smoothing=0.3, z_loss=1e-3),
    "a column ignored": dict(ignore_index=5),
    "minus one ignored": dict(ignore_index=-1),
    "apart": dict(stride=105, offset=3, alignment=2),
    "one row": dict(rows=1),
    "no rows": dict(rows=0),
}


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_kinds(options, backward, device):
    problem = CrossEntropy(**{"rows": 12, "columns": 100, "dtype": BF16} | options, backward=backward)
    pack = problem.inputs() | problem.outputs()
    graphs.run(problem.graph(device), pack, [heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE])
    if problem.rows:
        problem.hold(pack, {name: pack[name] for name in problem.outputs()})


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_oracle_agrees_with_torch(smoothing):
    """Which, too, is in float64. Targets that torch refuses are left out."""
    problem = CrossEntropy(16, 50, FLOAT, label_smoothing=smoothing)
    pack = problem.inputs()
    x, target = pack["x"].double().requires_grad_(), pack["target"][:, 0]
    rows = torch.tensor([r for r in range(16) if r % 8 not in (2, 3, 4)])
    loss = torch.nn.functional.cross_entropy(x[rows], target[rows], reduction="none", label_smoothing=smoothing)
    exact = problem.exact(pack)
    torch.testing.assert_close(torch.from_numpy(exact["loss"][0])[rows, 0], loss.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.from_numpy(exact["logsumexp"][0]), x.logsumexp(1, True).detach())

    gradient = replace(problem, backward=True)
    pack = gradient.inputs() | {"logsumexp": x.detach().logsumexp(1, True)}
    finite = rows[loss.isfinite()]  # where it is infinite, torch's gradient is NaN
    (loss[loss.isfinite()] * pack["grad"].double()[finite, 0]).sum().backward()
    made = torch.from_numpy(gradient.exact(pack)["dx"][0])
    torch.testing.assert_close(made[finite], x.grad[finite], rtol=1e-12, atol=1e-13)


KNOBS = {
    "part of a warp": ByRowKnobs(8, 64),
    "two chunks": ByRowKnobs(32, 64, 2),
    "warps": ByRowKnobs(128, 128),
    "two CTAs": ByRowKnobs(128, 64),
}


@pytest.mark.emulate
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_knobs_do_not_decide_a_bit(backward):
    problem = CrossEntropy(8, 208, FLOAT, backward=backward, label_smoothing=0.1, z_loss=1e-3)
    found = {}
    for name, knobs in KNOBS.items():
        run = planned(problem, knobs)
        run.run()
        hold(problem, run)
        found[name] = tuple(run.contents().items())
    assert len(set(found.values())) == 1


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("knobs", ["part of a warp", "two CTAs"])
def test_under_sanitizers_in_all_schedules(knobs, backward, build):
    run = planned(CrossEntropy(3 if knobs == "two CTAs" else 9, 208, backward=backward), KNOBS[knobs])
    found = run.check(build)
    run.run()
    assert found == run.contents()


@pytest.mark.emulate
@pytest.mark.parametrize("columns", [1000, 50257])
def test_the_op_computes_what_its_nodes_do(columns):
    problem = CrossEntropy(12, columns)
    op, by_hand = (planned(replace(problem, by_hand=hand)) for hand in (False, True))
    op.run(), by_hand.run()
    for name in problem.outputs():
        torch.testing.assert_close(op.pack[name], by_hand.pack[name], rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.emulate
@pytest.mark.parametrize("rows, columns", [(9, 100), (3, 40000)])
def test_a_window_of_each_row(rows, columns):
    """What a row's own integers say of its columns."""
    problem = Window(rows, columns)
    run = planned(problem)
    run.run()
    hold(problem, run)


@pytest.mark.emulate
@pytest.mark.parametrize("columns", [96, 50257])
def test_the_gradient_may_lie_where_the_logits_are(columns):
    problem = CrossEntropy(9, columns, backward=True)
    apart = planned(problem)
    apart.run()
    run = planned(problem)
    run.pack["dx"] = run.pack["x"]
    run.run()
    assert torch.equal(run.pack["dx"].view(torch.int16), apart.pack["dx"].view(torch.int16))


@pytest.mark.emulate
def test_rows_of_infinities_are_nan():
    problem = CrossEntropy(3, 64, FLOAT)
    run = planned(problem)
    run.pack["x"][0], run.pack["x"][1, 4], run.pack["x"][2] = -torch.inf, torch.inf, torch.nan
    run.pack["target"][:] = 7
    run.run()
    assert run.pack["loss"].isnan().all() and run.pack["logsumexp"].isnan().all()


@pytest.mark.emulate
def test_ignored_rows_are_zeros_whatever_they_hold():
    problem = CrossEntropy(3, 64, FLOAT, backward=True)
    run = planned(problem)
    run.pack["x"][0], run.pack["x"][1, 4], run.pack["grad"][2] = -torch.inf, torch.nan, torch.inf
    run.pack["target"][:] = -100
    run.run()
    assert not run.pack["dx"].view(torch.int32).any()


@pytest.mark.emulate
@pytest.mark.parametrize("target", [2**32 + 3, -(2**32) + 3, 2**53 + 3, 2**63 - 1, -(2**63), 2**24 + 3, 1000])
def test_no_target_is_taken_for_another(target):
    for backward, name in ((False, "loss"), (True, "dx")):
        run = planned(CrossEntropy(2, 1000, FLOAT, backward=backward))
        run.pack["target"][1] = target
        run.run()
        assert run.pack[name][1].isnan().all() and not run.pack[name][0].isnan().any()


@pytest.mark.emulate
def test_what_stands_before_and_after_is_in_the_kernel():
    """Logits that are capped and scaled, a loss with a weight for each row."""
    g = graphs.new(device="emulator")
    x = g.tensor([5, 300], data_type=BF16, name="x")
    target, weight = g.tensor([5, 1], data_type=INT64, name="target"), g.tensor([5, 1], name="weight")
    capped = g.mul(g.tanh(g.mul(x, 1 / 30)), 30.0)
    g.mul(g.cross_entropy(capped, target)[0], weight).set_output().set_name("y")
    problem = CrossEntropy(5, 300)
    pack = problem.inputs() | {"weight": torch.rand(5, 1), "y": torch.empty(5, 1)}
    pack["target"] = pack["target"].clamp(0, 299)
    Planned(g, pack).run()
    exact = torch.nn.functional.cross_entropy(
        30 * (pack["x"].double() / 30).tanh(), pack["target"][:, 0], reduction="none"
    )
    torch.testing.assert_close(pack["y"].double()[:, 0], exact * pack["weight"][:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.emulate
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_numbers_of_columns_are_reduced_like_other_values(device):
    g = graphs.new(device=device)
    x = g.tensor([3, 1000], data_type=BF16, name="x")
    index = g.gen_index(x, axis=-1)

    def over(value, mode):
        return g.reduction(value, mode=mode).set_dim([3, 1])

    total = g.add(over(g.mul(index, index), reduction_mode.ADD), over(g.mul(index, x), reduction_mode.ADD))
    g.add(total, over(index, reduction_mode.MAX)).set_output().set_name("y")
    pack = {"x": torch.tensor([[1.0], [2], [-3]]).expand(3, 1000).contiguous().bfloat16(), "y": torch.empty(3, 1)}
    graphs.run(g, pack, [heur_mode.FALLBACK if device == "cpu" else heur_mode.OPENSOURCE])
    exact = sum(k * k for k in range(1000)) + pack["x"][:, :1].double() * sum(range(1000)) + 999
    torch.testing.assert_close(pack["y"].double(), exact, rtol=1e-6, atol=0)


def test_what_nobody_asked_for_is_not_computed():
    g = graphs.new(device="emulator")
    x, target = g.tensor([5, 300], data_type=BF16, name="x"), g.tensor([5, 1], data_type=INT64, name="target")
    g.cross_entropy(x, target)[1].set_output().set_name("logsumexp")
    pack = CrossEntropy(5, 300).inputs() | {"logsumexp": torch.empty(5, 1)}
    program = Planned(g, pack).part.facts.program
    assert [step.op_name for step in program.steps] == ["row_max", "sub", "mul", "exp2_approx", "row_sum", "log", "add"]


@pytest.mark.parametrize("axis, extents", [(0, (4, 1)), (1, (1, 6)), (-1, (1, 6)), (-2, (4, 1))])
def test_gen_index_numbers_any_axis(axis, extents):
    g = graphs.new()
    x = g.tensor([4, 6], data_type=BF16, name="x")
    g.gen_index(x, axis).set_output().set_name("y").set_data_type(INT32)
    pack = {"x": torch.full((4, 6), float("nan")).bfloat16(), "y": torch.empty(4, 6, dtype=torch.int32)}
    graphs.run(g, pack)
    assert torch.equal(pack["y"], torch.arange(max(extents)).reshape(extents).expand(4, 6).int())


def test_a_mask_is_stored_as_boolean():
    g = graphs.new()
    a, b = g.tensor([4], name="a"), g.tensor([4], name="b")
    g.cmp_gt(a, b).set_output().set_name("y").set_data_type(torch.bool)
    nan = float("nan")
    pack = {"a": torch.tensor([1.0, 2, nan, 2]), "b": torch.tensor([2.0, 1, 1, nan]), "y": torch.empty(4).bool()}
    graphs.run(g, pack)
    assert pack["y"].tolist() == [False, True, False, False]


def test_numbers_of_rows_are_the_reference_engines():
    g = graphs.new(device="emulator")
    x = g.tensor([4, 6], data_type=BF16, name="x")
    y = g.add(g.gen_index(x, 0), g.reduction(x, mode=reduction_mode.ADD).set_dim([4, 1]))
    y.set_output()
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert "reference" in g.get_engine_and_knobs_at_index(0)[0]


def test_too_many_columns_to_number():
    problem = CrossEntropy(1, 2**24 + 8, BF16)
    with pytest.raises(
        GraphNotSupportedError, match="columns are numbered, of rows of 16777224; accepted: up to 1677721"
    ):
        planned_only(problem)
    planned_only(replace(problem, columns=2**24))


def planned_only(problem) -> None:
    graph = problem.graph("emulator")
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([heur_mode.OPENSOURCE])


def test_integers_of_all_columns_are_the_reference_engines():
    g = graphs.new(device="emulator")
    x = g.tensor([4, 64], data_type=INT32, name="x")
    g.reduction(x, mode=reduction_mode.ADD).set_dim([4, 1]).set_output()
    with pytest.raises(GraphNotSupportedError, match="input 'x' is INT32; accepted: FLOAT, HALF, BFLOAT16, FP8"):
        g.build([heur_mode.OPENSOURCE])


@pytest.mark.parametrize(
    "options, error, said",
    [
        (dict(ignore_index=2**24), GraphValidationError, "ignore_index is 16777216; accepted: magnitudes below 2\\^24"),
        (dict(ignore_index=1.5), GraphTypeError, "ignore_index must be int, got 1.5"),
        (dict(label_smoothing=1.5), GraphValidationError, "label_smoothing is 1.5; accepted: 0 to 1"),
        (dict(label_smoothing=float("nan")), GraphValidationError, "label_smoothing is nan; accepted: 0 to 1"),
        (dict(z_loss=-1.0), GraphValidationError, "z_loss is -1.0; accepted: 0 and finite numbers above"),
        (dict(columns=0), GraphValidationError, "input \\[12, 0\\] has no columns; at least 1 is needed"),
    ],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_is_refused(options, error, said, backward):
    with pytest.raises(error, match=said):
        CrossEntropy(**options, backward=backward).graph().validate()


def test_targets_of_another_shape_are_refused():
    g = graphs.new()
    x, target = g.tensor([4, 8], data_type=BF16), g.tensor([4, 8], data_type=INT64)
    g.cross_entropy(x, target)[0].set_output()
    with pytest.raises(GraphValidationError, match=r"target must have input's extents and 1 .* \[4, 1\], got \[4, 8\]"):
        g.validate()


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_beyond_the_rank_is_refused(axis):
    g = graphs.new()
    g.gen_index(g.tensor([4, 8]), axis).set_output()
    with pytest.raises(GraphValidationError, match=f"axis {axis} is outside the input's rank 2"):
        g.validate()


@pytest.mark.emulate
@pytest.mark.parametrize("integers", [INT32, INT64], ids=lambda t: t.name)
@pytest.mark.parametrize("stages", [1, 3])
def test_integers_of_rows_that_threads_stay_for(integers, stages):
    """Rows that count for nothing in the gradients of a norm: those whose integer is -100. Where rows are copied ahead,
    so are integers of 4 bytes."""
    g = graphs.new(device="emulator")
    x, grad = (g.tensor([11, 520], data_type=BF16, name=name) for name in ("x", "grad"))
    scale, inverse = g.tensor([1, 520], name="scale"), g.tensor([11, 1], name="inverse")
    kept = g.cmp_neq(g.tensor([11, 1], data_type=integers, name="target"), -100.0)
    made = g.rmsnorm_backward(g.binary_select(grad, 0.0, kept), x, scale, inverse, has_dbias=False)
    for name, t in zip(("dx", "dscale"), made, strict=False):
        t.set_output().set_name(name).set_data_type(FLOAT)
    source = graphs.generator("cpu", 1)
    pack = {name: torch.randn(11, 520, generator=source).bfloat16() for name in ("x", "grad")}
    target = torch.tensor([5, -100, 2**31 - 100, -99, -100, 0, -101, 100, -100, 1, 2]).reshape(11, 1)
    if integers is INT64:
        target[0] = 2**32 - 100
    pack |= {"target": target.to(INTEGERS[integers]), "scale": torch.ones(1, 520), "inverse": torch.ones(11, 1)}
    pack |= {"dx": torch.empty(11, 520), "dscale": torch.empty(1, 520)}
    Planned(g, pack, PersistentKnobs(64, 128, stages, 1, 2), "rows").run()
    given = torch.where(target == -100, 0.0, pack["grad"].double())
    normal = pack["x"].double()
    exact = given - normal * (given * normal).mean(1, keepdim=True)
    torch.testing.assert_close(pack["dx"].double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pack["dscale"].double(), (given * normal).sum(0, keepdim=True), rtol=1e-5, atol=1e-5)
