"""The backward kernel on the emulator: values of combinations, row lengths, strides and knobs."""

import dataclasses
import functools
import random

import pytest
import torch

from graphfuse import heur_mode
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.persistent import PersistentKnobs
from support import gradients, graphs, oracle
from support.emulation import Planned
from support.gradients import CASES, Gradient
from support.graphs import BF16, FLOAT, HALF

pytestmark = pytest.mark.emulate

# With every pair of choices among them; on a GPU all are run.
SOME = random.Random(0).sample(CASES, len(CASES) // 3)


@pytest.mark.each_value
@pytest.mark.parametrize("case", SOME, ids=str)
def test_combinations(case):
    gradients.check(case, "emulator")


@pytest.mark.parametrize("columns", [1, 17, 111, 760, 3420, 16384])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=lambda d: d.name)
def test_row_lengths(columns, dtype):
    gradients.check(Gradient(3, columns, dtype, activation="silu", residual=True, dbias=True), "emulator")


@pytest.mark.parametrize("rows", [0, 1, 2, 131])
def test_row_counts(rows):
    case = Gradient(rows, 64, dbias=True)
    pack, outputs = case.inputs(), case.outputs()
    gradients.run(gradients.fused(case, "emulator"), pack | outputs)
    if rows:
        case.hold(pack, outputs)
    assert rows or not (outputs["dscale"].any() or outputs["dbias"].any())


STRIDES = {
    "rows apart": Gradient(4, 96, x_stride=104, grad_stride=128, dx_stride=112),
    "odd rows apart": Gradient(4, 96, x_stride=97, grad_stride=99, dx_stride=101, residual=True),
    "aligned to 8": Gradient(4, 96, alignment=8, offset=4),
    "aligned to 4": Gradient(4, 96, HALF, alignment=4, offset=2, activation="gate"),
    "aligned to 2": Gradient(4, 96, HALF, alignment=2, offset=1, dbias=True),
    "float aligned to 4": Gradient(4, 96, FLOAT, alignment=4, offset=1),
}


@pytest.mark.parametrize("case", STRIDES.values(), ids=STRIDES)
def test_strides(case):
    gradients.check(case, "emulator")


def planned(case: Gradient, knobs: PersistentKnobs, pack=None) -> Planned:
    return Planned(case.graph("emulator"), pack or case.inputs() | case.outputs(), knobs)


def knobs(threads_per_row, threads, stages=3, ctas=2, ctas_per_sm=1, delay=0) -> PersistentKnobs:
    return PersistentKnobs(threads_per_row, threads, stages, ctas_per_sm, ctas, delay)


# Rows that share a warp, a warp each, several; a CTA; clusters; copies ahead or none; one CTA and several; read again.
SPREAD = {
    "8 of 32": knobs(8, 32),
    "8 of 64": knobs(8, 64, 2, 1),
    "32 of 64": knobs(32, 64, 4),
    "64 of 128, none ahead": knobs(64, 128, 1),
    "128 of 128": knobs(128, 128, 5, 3),
    "512 of 512": knobs(512, 512, 2, 1),
    "a cluster of 2": knobs(128, 64, 3, 4),
    "a cluster of 4": knobs(256, 64, 2, 8),
}


# Of rows of several warps of which nothing is kept.
DELAYED = {
    "64 of 64": knobs(64, 64, 3, delay=1),
    "64 of 128": knobs(64, 128, 5, 1, delay=1),
    "256 of 256": knobs(256, 256, 4, 3, delay=1),
    "a cluster of 2": knobs(128, 64, 3, 4, delay=1),
    "a cluster of 4": knobs(128, 32, 3, 4, delay=1),
    "a cluster of 8": knobs(256, 32, 3, 8, delay=1),
}
# ThreadSanitizer makes a thread for each message between CTAs, of which a cluster of 8 sends most.
DELAYED_BUILDS = [
    (name, build)
    for name in DELAYED
    for build in (None, Build.ADDRESS, Build.RACE)
    if (name, build) != ("a cluster of 8", Build.RACE)
]


@functools.cache
def first_choice(case: Gradient) -> dict[str, torch.Tensor]:
    pack, outputs = case.inputs(), case.outputs()
    gradients.run(gradients.fused(case, "emulator"), pack | outputs)
    case.hold(pack, outputs)
    return outputs


@pytest.mark.parametrize(
    "build",
    [None, Build.ADDRESS, pytest.param(Build.RACE, marks=pytest.mark.thorough)],
    ids=["plain", "address", "race"],
)
@pytest.mark.parametrize("chosen", SPREAD.values(), ids=SPREAD)
def test_every_way_of_spreading_rows(chosen, build):
    """The same bits of what is written of rows; sums over rows within their error, and in every schedule the same."""
    case = Gradient(7, 184, activation="gate", residual=True, dbias=True)
    problem, wanted = planned(case, chosen), first_choice(case)
    problem.run()
    case.hold(problem.pack, {n: problem.pack[n] for n in wanted})
    left = problem.contents()
    assert all(torch.equal(problem.pack[n], wanted[n]) for n in ("dx", "dgate"))
    if build is not None:
        again = planned(case, chosen)
        assert again.check(build) == left


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "build"), DELAYED_BUILDS)
def test_every_way_of_delaying_the_second_phase(name, build):
    """The same bits as without, and in every schedule."""
    case, chosen = Gradient(7, 184, residual=True, dbias=True), DELAYED[name]
    problem, wanted = planned(case, chosen), first_choice(case)
    at_once = planned(case, dataclasses.replace(chosen, delay=0))
    at_once.run()
    problem.run()
    left = problem.contents()
    assert left == at_once.contents() and torch.equal(problem.pack["dx"], wanted["dx"])
    if build is not None:
        assert planned(case, chosen).check(build) == left


def test_rows_that_are_read_again_have_the_same_bits():
    """Rows of 41000 columns, by 512 threads in several passes, and by clusters that hold them."""
    case = Gradient(3, 41000, activation="silu", residual=True)
    outputs = []
    for chosen in (knobs(512, 512, 1), knobs(2048, 256, 2, 8), knobs(4096, 512, 2, 8)):
        problem = planned(case, chosen)
        problem.run()
        case.hold(problem.pack, {n: problem.pack[n] for n in case.outputs()})
        outputs.append(problem.pack["dx"])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_row_is_the_same_alone_and_among_others():
    case = Gradient(40, 96, activation="silu", residual=True)
    whole, wanted = case.inputs(), first_choice(case)["dx"]
    for rows in (1, 3, 17):
        part = dataclasses.replace(case, rows=rows)
        pack = {n: t if n == "weight" else t[:rows].contiguous() for n, t in whole.items()}
        outputs = part.outputs()
        gradients.run(gradients.fused(part, "emulator"), pack | outputs)
        assert torch.equal(outputs["dx"], wanted[:rows])


@pytest.mark.parametrize("name", ["x", "grad", "residual"])
@pytest.mark.parametrize(
    "chosen", [knobs(32, 64), knobs(32, 64, 1), knobs(128, 64, 2, 4)], ids=["ahead", "none", "cluster"]
)
def test_in_place(name, chosen):
    """DX over what it is made from: rows that are copied ahead are not yet written, those written not read again."""
    case = Gradient(9, 184, residual=True)
    apart, same = planned(case, chosen), planned(case, chosen)
    apart.run()
    same.pack["dx"] = same.pack[name]
    found = same.check(Build.ADDRESS)
    assert found["dx"] == apart.contents()["dx"] and found["dscale"] == apart.contents()["dscale"]


def test_a_gradient_that_is_read_by_rows_already_written_is_kept_apart():
    """dgate is written before DX, which needs the gradient once more."""
    case = Gradient(4, 96, activation="gate")
    part = planned(case, knobs(32, 32, 1)).part
    ids = {t.name: t.id for t in part.region.subgraph.graph.tensors}
    pairs = part.engine.in_place(part.facts, part.knobs)
    assert (ids["x"], ids["dx"]) in pairs and (ids["x"], ids["dgate"]) not in pairs


def test_rows_along_several_axes():
    """Four axes with strides of their own, a gradient that is the same along one of them, heads transposed."""
    shape = (2, 3, 4, 32)
    x = torch.randn(2, 4, 3, 40)[..., :32].permute(0, 2, 1, 3)
    grad = torch.randn(2, 1, 4, 32).expand(shape)
    weight = torch.randn(1, 1, 1, 32)
    g = graphs.new(device="emulator")
    tensors = [
        g.tensor(list(shape), list(grad.stride()), FLOAT, name="grad", byte_alignment=4),
        g.tensor(list(shape), list(x.stride()), FLOAT, name="x", byte_alignment=4),
        g.tensor([1, 1, 1, 32], data_type=FLOAT, name="weight"),
        g.tensor([2, 3, 4, 1], data_type=FLOAT, name="inverse"),
    ]
    made = g.rmsnorm_backward(*tensors, has_dbias=True)
    for t, name in zip(made, ("dx", "dscale", "dbias"), strict=True):
        t.set_output().set_name(name)
    g.build([heur_mode.OPENSOURCE])
    assert len(g._planner.at(0).parts[0].facts.row_extents) == 3
    inverse = torch.rsqrt((x * x).mean(-1, keepdim=True) + gradients.EPS)
    outputs = {"dx": torch.empty(shape), "dscale": torch.empty(1, 1, 1, 32), "dbias": torch.empty(1, 1, 1, 32)}
    gradients.run(g, {"grad": grad, "x": x, "weight": weight, "inverse": inverse} | outputs)
    wanted = oracle.rmsnorm_gradients(grad, x, weight, gradients.EPS)
    for got, want in zip(outputs.values(), wanted, strict=True):
        want = want.sum((0, 1, 2), keepdim=True) if want.shape != got.shape else want
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def test_the_channels_of_an_image():
    """Normalized along an axis that is not the last, of channels-last tensors."""
    shape = (2, 24, 3, 5)
    x, grad = (torch.randn(shape).to(memory_format=torch.channels_last) for _ in range(2))
    weight = torch.randn(1, 24, 1, 1)
    g = graphs.new(device="emulator")
    strides = list(x.stride())
    tx, tgrad = g.tensor(list(shape), strides, FLOAT, name="x"), g.tensor(list(shape), strides, FLOAT, name="grad")
    ts, tinverse = g.tensor([1, 24, 1, 1], name="weight"), g.tensor([2, 1, 3, 5], name="inverse")
    dx, dscale, _ = g.rmsnorm_backward(tgrad, tx, ts, tinverse, has_dbias=False)
    dx.set_output().set_name("dx")
    dscale.set_output().set_name("dscale")
    g.build([heur_mode.OPENSOURCE])
    inverse = torch.rsqrt((x * x).mean(1, keepdim=True) + gradients.EPS)
    outputs = {"dx": torch.empty_like(x), "dscale": torch.empty(1, 24, 1, 1)}
    gradients.run(g, {"grad": grad, "x": x, "weight": weight, "inverse": inverse.contiguous()} | outputs)
    want_dx, want_dscale, _ = oracle.rmsnorm_gradients(grad, x, weight, gradients.EPS, axes=(1,))
    torch.testing.assert_close(outputs["dx"].double(), want_dx, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(outputs["dscale"].double(), want_dscale, rtol=2e-5, atol=2e-5)


def test_values_on_the_way_are_rounded_where_the_graph_says_so():
    """intermediate_rounding="declared": the gradient behind an activation is a bf16 to all who read it."""
    results = {}
    for rounding in ("float32", "declared"):
        g = graphs.new(device="emulator", intermediate_data_type=BF16, intermediate_rounding=rounding)
        x, grad = (g.tensor([5, 96], data_type=BF16, name=n) for n in ("x", "grad"))
        weight, inverse = g.tensor([1, 96], data_type=BF16, name="weight"), g.tensor([5, 1], name="inverse_rms")
        hidden = g.swish_backward(grad, g.mul(g.mul(x, inverse), weight))
        dx, dscale, _ = g.rmsnorm_backward(hidden, x, weight, inverse, has_dbias=False)
        dx.set_output().set_name("dx").set_data_type(FLOAT)
        dscale.set_output().set_name("dscale").set_data_type(FLOAT)
        g.build([heur_mode.OPENSOURCE])
        pack = Gradient(activation="silu").inputs()
        outputs = {"dx": torch.empty(5, 96), "dscale": torch.empty(1, 96)}
        gradients.run(g, pack | outputs)
        results[rounding] = outputs
    y = (pack["x"].float() * pack["inverse_rms"]).bfloat16().float() * pack["weight"].float()
    hidden = oracle.POINTWISE["swish_backward"](pack["grad"], y.bfloat16()).float().bfloat16()
    dx, dscale, _ = oracle.rmsnorm_gradients(hidden, pack["x"], pack["weight"], gradients.EPS)
    torch.testing.assert_close(results["declared"]["dx"].double(), dx, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(results["declared"]["dscale"].double(), dscale, rtol=1e-3, atol=1e-3)
    assert not torch.equal(results["declared"]["dx"], results["float32"]["dx"])


def test_gradients_of_the_scale_alone():
    """DX is not asked for: no row is reduced, the program has one phase."""
    rows, columns = 37, 96
    g = graphs.new(device="emulator")
    dy, x = g.tensor([rows, columns], data_type=FLOAT, name="dy"), g.tensor([rows, columns], data_type=FLOAT, name="x")
    scale, inverse = g.tensor([1, columns], data_type=FLOAT), g.tensor([rows, 1], data_type=FLOAT, name="inverse")
    _, dscale, dbias = g.rmsnorm_backward(dy, x, scale.set_name("scale"), inverse, has_dbias=True)
    dscale.set_name("dscale").set_output().set_data_type(FLOAT)
    dbias.set_name("dbias").set_output().set_data_type(FLOAT)
    g.build([heur_mode.OPENSOURCE])
    assert "rows" in g.get_plan_name_at_index(0)
    pack = {n: torch.rand(t, dtype=torch.float32) for n, t in (("dy", (rows, columns)), ("x", (rows, columns)))}
    pack |= {"scale": torch.rand(1, columns), "inverse": torch.rand(rows, 1)}
    made = {n: torch.full((1, columns), torch.nan) for n in ("dscale", "dbias")}
    g.execute(pack | made, torch.empty(g.get_workspace_size(), dtype=torch.uint8))
    wide = {n: t.double() for n, t in pack.items()}
    exact = {
        "dscale": (wide["dy"] * wide["x"] * wide["inverse"]).sum(0, keepdim=True),
        "dbias": wide["dy"].sum(0)[None],
    }
    for name, value in exact.items():
        torch.testing.assert_close(made[name].double(), value, rtol=1e-5, atol=1e-5)
