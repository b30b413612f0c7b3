"""Rows whose columns lie apart: results against float64, bits across knobs and layouts, what is refused."""

import dataclasses

import pytest
import torch

import graphfuse as gf
from graphfuse import GraphNotSupportedError, data_type, heur_mode, reduction_mode
from graphfuse.base.device import for_arch
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.across import AcrossKnobs
from graphfuse.engines.rows.across.legal import legal
from graphfuse.engines.rows.across.split import AcrossSplit
from support import graphs, oracle
from support.channels import EPS, Channels
from support.graphs import BF16, E4M3, FLOAT, HALF
from support.variants import Variant

ENGINE, DEVICE = RowEngine(), for_arch("sm_90a")
INFERENCE, TRAINING = gf.norm_forward_phase.INFERENCE, gf.norm_forward_phase.TRAINING


def facts(problem: Channels):
    return Variant(problem, engine=ENGINE).facts()


def split(problem: Channels) -> AcrossSplit:
    return AcrossSplit.of(facts(problem))


def run(problem: Channels, knobs: AcrossKnobs | None = None, pack=None) -> tuple[dict, dict]:
    """What is read and what is written, by the knobs or those proposed first."""
    pack, outputs, g = pack or problem.inputs(), problem.outputs(), problem.graph("emulator")
    g.validate()
    g.build_operation_graph()
    chosen = knobs or ENGINE.propose(facts(problem), DEVICE, heur_mode.A)[0]
    g.build_plan_at_index(g.create_execution_plan(ENGINE.name, knobs_to_dict(chosen)))
    g.execute(pack | outputs, graphs.workspace(g.get_workspace_size()))
    return pack, outputs


def bits(outputs: dict) -> dict[str, bytes]:
    return {name: t.reshape(-1).clone().view(torch.uint8).numpy().tobytes() for name, t in outputs.items()}


@pytest.mark.emulate
@pytest.mark.parametrize("positions", [7, 64, 1000])
@pytest.mark.parametrize("columns", [3, 16, 96, 384, 2000])
def test_results(columns, positions):
    if columns * positions > 1 << 19:
        positions = 200
    problem = Channels(2, columns, positions, training=True)
    problem.hold(*run(problem))


@pytest.mark.emulate
def test_one_column():
    """Is a row of one element each, which rows along columns are, too: both engines take it."""
    problem = Channels(3, 1, 64, training=True)
    problem.hold(*run(problem))


@pytest.mark.emulate
def test_one_position():
    """Of a longer tensor: no rows are neighbours."""
    problem = Channels(9, 96, 1, input_stride=5, output_stride=3, training=True)
    assert split(problem).piece == 1
    problem.hold(*run(problem))


CASES = {
    "float": dict(input=FLOAT, weight=BF16, output=FLOAT, bias=HALF),
    "half to float": dict(input=HALF, weight=FLOAT, output=FLOAT),
    "float to bf16": dict(input=FLOAT, weight=FLOAT, output=BF16, bias=FLOAT, beta=None),
    "e4m3": dict(output=E4M3, training=True),
    "e5m2 of float": dict(input=FLOAT, output=data_type.FP8_E5M2),
    "residual": dict(residual=True, training=True),
    "residual of float": dict(input=FLOAT, residual=True),
    "columns further apart": dict(input_stride=72, output_stride=80),
    "columns an odd number apart": dict(input_stride=65, output_stride=67),
    "positions of half an access": dict(positions=60),
    "odd positions in even memory": dict(positions=63, input_stride=64, output_stride=64),
    "aligned to 8": dict(alignment=8, offset=4),
    "aligned to 2": dict(alignment=2, offset=1, bias=BF16),
}
PIECES = {"columns an odd number apart": 1, "positions of half an access": 4, "odd positions in even memory": 1}
PIECES |= {"aligned to 8": 4, "aligned to 2": 1, "float": 4, "columns further apart": 8}


@pytest.mark.emulate
@pytest.mark.parametrize("name", CASES)
def test_types_and_layouts(name):
    problem = Channels(2, **CASES[name])
    assert split(problem).piece == PIECES.get(name, split(problem).piece)
    problem.hold(*run(problem))


def some_knobs(problem: Channels) -> list[AcrossKnobs]:
    """Every number of groups, each with the fewest threads along the rows, and with the most that read rows again."""
    found = {}
    for knobs in legal(split(problem), DEVICE):
        found.setdefault(knobs.groups, knobs)
        if not split(problem).resident(knobs):
            found[knobs.groups, "again"] = knobs
    return list(found.values())


@pytest.mark.some(1)
@pytest.mark.emulate
@pytest.mark.parametrize(
    ("columns", "least", "options"),
    [
        (96, 5, {}),
        (111, 7, {}),
        (100, 6, dict(residual=True)),
        (1208, 8, dict(input=FLOAT, weight=FLOAT)),
    ],
)
def test_bits_do_not_depend_on_knobs_or_layout(columns, least, options):
    """Nor on where a row lies; and they are those of columns that lie side by side, where these are whole chunks."""
    problem = Channels(2, columns, 40, training=True, **options)
    knobs = some_knobs(problem)
    assert len(knobs) >= least
    assert columns < 1000 or {split(problem).resident(k) for k in knobs} == {True, False}
    pack, first = run(problem, knobs[0])
    assert {tuple(bits(run(problem, k, pack)[1]).items()) for k in knobs[1:]} == {tuple(bits(first).items())}

    last = dataclasses.replace(problem, rows=1, positions=1, input_stride=3, output_stride=3)
    alone = {n: t if t.shape[-1] == 1 else last.placed(t[1:, :, 39:], 3) for n, t in pack.items()}
    one = run(last, None, alone)[1]
    assert bits(one) == bits({name: t[1:, :, 39:] for name, t in first.items()})

    along = along_columns(problem, pack)
    assert columns % 8 or bits(along) == bits({n: t.movedim(1, 2) for n, t in first.items()})


def along_columns(problem: Channels, pack: dict) -> dict:
    """The same problem on [rows, positions, columns], by the engine of such rows."""
    g = graphs.new(device="emulator")
    turned = {name: t.movedim(1, 2).contiguous() for name, t in pack.items()}
    given = {
        name: g.tensor(list(t.shape), data_type={v: k for k, v in graphs.TORCH.items()}[t.dtype], name=name)
        for name, t in turned.items()
    }
    x, outputs = given["x"], {}
    dim = [problem.rows, problem.positions, problem.columns]
    if problem.residual:
        x = g.add(x, given["residual"]).set_output().set_name("sum").set_data_type(problem.input)
        outputs["sum"] = torch.empty(dim, dtype=graphs.TORCH[problem.input])
    y, inverse = g.rmsnorm(x, given["weight"], EPS, norm_forward_phase=TRAINING)
    inverse.set_output().set_name("inverse_rms")
    g.swish(y, swish_beta=problem.beta).set_output().set_name("out").set_data_type(problem.output)
    outputs |= {"out": torch.empty(dim, dtype=graphs.TORCH[problem.output])}
    outputs |= {"inverse_rms": torch.empty(problem.rows, problem.positions, 1)}
    graphs.run(g, turned | outputs, [heur_mode.OPENSOURCE])
    assert g.get_engine_and_knobs_at_index(0)[0] == "rows"
    return outputs


def video(dim=(2, 24, 2, 3, 8), dtype=BF16):
    """A graph for the emulator, its input [N, C, T, H, W], and a value a channel."""
    g = graphs.new(device="emulator")
    x = g.tensor(list(dim), data_type=dtype, name="x")
    return g, x, g.tensor([1, dim[1], 1, 1, 1], data_type=dtype, name="weight")


def made(g, inputs: dict, **outputs: torch.Tensor) -> dict:
    graphs.run(g, inputs | outputs, [heur_mode.OPENSOURCE])
    assert g.get_engine_and_knobs_at_index(0)[0] == ENGINE.name
    return outputs


def randn(*dim) -> torch.Tensor:
    return torch.randn(*dim, generator=graphs.generator("cpu", 3))


@pytest.mark.emulate
def test_softmax_over_channels():
    """Two phases of sums and maxima, whose exponentials stay in registers."""
    g, x, _ = video(dtype=FLOAT)
    row = [2, 1, 2, 3, 8]
    largest = g.reduction(x, mode=reduction_mode.MAX).set_dim(row)
    power = g.exp(g.sub(x, largest))
    g.div(power, g.reduction(power, mode=reduction_mode.ADD).set_dim(row)).set_output().set_name("y")
    values = randn(2, 24, 2, 3, 8) * 4
    y = made(g, {"x": values}, y=torch.empty(values.shape))["y"]
    torch.testing.assert_close(y.double(), values.double().softmax(1), rtol=1e-5, atol=1e-7)


@pytest.mark.emulate
def test_layer_norm_with_statistics():
    g, x, weight = video()
    bias = g.tensor([1, 24, 1, 1, 1], data_type=BF16, name="bias")
    y, mean, inverse = g.layernorm(norm_forward_phase=TRAINING, input=x, scale=weight, bias=bias, epsilon=EPS)
    y.set_output().set_name("y").set_data_type(FLOAT)
    mean.set_output().set_name("mean").set_data_type(FLOAT)
    inverse.set_output().set_name("inverse").set_data_type(FLOAT)
    values, w, b = randn(2, 24, 2, 3, 8).bfloat16(), (randn(1, 24, 1, 1, 1) + 1).bfloat16(), randn(1, 24, 1, 1, 1)
    row = torch.empty(2, 1, 2, 3, 8)
    found = made(
        g,
        {"x": values, "weight": w, "bias": b.bfloat16()},
        y=torch.empty(values.shape),
        mean=row,
        inverse=row.clone(),
    )
    exact = values.double()
    center, spread = exact.mean(1, keepdim=True), exact.var(1, keepdim=True, correction=0)
    want = (exact - center) / (spread + EPS).sqrt() * w.double() + b.bfloat16().double()
    torch.testing.assert_close(found["y"].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["mean"].double(), center, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["inverse"].double(), 1 / (spread + EPS).sqrt(), rtol=1e-5, atol=0)


@pytest.mark.emulate
def test_per_row_scales_and_the_largest_of_all():
    """A largest magnitude of each row, of all, and FP8 by the row's."""
    g, x, weight = video()
    y = g.rmsnorm(x, weight, EPS, norm_forward_phase=INFERENCE)[0]
    g.reduction(y, mode=reduction_mode.AMAX).set_output().set_name("amax").set_data_type(FLOAT)
    amax = g.reduction(y, mode=reduction_mode.AMAX).set_dim([2, 1, 2, 3, 8])
    scale = g.mul(amax, 1 / 448).set_output().set_name("scale").set_data_type(FLOAT)
    g.mul(y, g.reciprocal(scale)).set_output().set_name("y").set_data_type(E4M3)
    values, w = randn(2, 24, 2, 3, 8).bfloat16(), (randn(1, 24, 1, 1, 1) + 1).bfloat16()
    found = made(
        g,
        {"x": values, "weight": w},
        amax=torch.full((1, 1, 1, 1, 1), 7e9),
        scale=torch.empty(2, 1, 2, 3, 8),
        y=torch.empty(values.shape, dtype=torch.float8_e4m3fn),
    )
    exact = oracle.rmsnorm(values, w, EPS, axes=(1,))[0]
    torch.testing.assert_close(found["amax"].double().view(()), exact.abs().max(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["scale"].double(), exact.abs().amax(1, keepdim=True) / 448, rtol=1e-5, atol=0)
    torch.testing.assert_close(found["y"].double() * found["scale"].double(), exact, rtol=2**-4, atol=2e-3)


@pytest.mark.emulate
def test_values_of_a_row_and_of_a_batch():
    """Read of each position, and of each batch and channel, where they are the same for all positions."""
    g, x, weight = video()
    row = g.tensor([2, 1, 2, 3, 8], data_type=HALF, name="row")
    batch = g.tensor([2, 24, 1, 1, 1], data_type=BF16, name="batch")
    alone = g.tensor([2, 1, 1, 1, 1], data_type=FLOAT, name="alone")
    y = g.rmsnorm(x, weight, EPS, norm_forward_phase=INFERENCE)[0]
    y = g.add(g.mul(g.mul(y, g.add(batch, 1.0)), row), alone)
    y.set_output().set_name("y").set_data_type(FLOAT)
    pack = {"x": randn(2, 24, 2, 3, 8).bfloat16(), "weight": (randn(1, 24, 1, 1, 1) + 1).bfloat16()}
    pack |= {"row": randn(2, 1, 2, 3, 8).half(), "batch": randn(2, 24, 1, 1, 1).bfloat16()}
    pack |= {"alone": randn(2, 1, 1, 1, 1)}
    y = made(g, pack, y=torch.empty(2, 24, 2, 3, 8))["y"]
    want = oracle.rmsnorm(pack["x"], pack["weight"], EPS, axes=(1,))[0]
    want = want * (pack["batch"].double() + 1) * pack["row"].double() + pack["alone"].double()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.emulate
@pytest.mark.parametrize("columns", [96, 2000])
def test_in_place(columns):
    problem = Channels(2, columns, 40)
    pack, apart = run(problem)
    g = problem.graph("emulator")
    g.build([heur_mode.OPENSOURCE])
    for knobs in [k for k in some_knobs(problem) if columns < 1000 or not split(problem).resident(k)][:2]:
        assert len(ENGINE.in_place(facts(problem), knobs)) == 1
        g = problem.graph("emulator")
        g.validate()
        g.build_operation_graph()
        g.build_plan_at_index(g.create_execution_plan(ENGINE.name, knobs_to_dict(knobs)))
        same = pack["x"].clone()
        g.execute(pack | {"x": same, "out": same}, graphs.workspace(0))
        assert torch.equal(same, apart["out"])


def test_proposals_are_legal_and_differ():
    for problem in (Channels(1, 96, 64), Channels(1, 96, 1597440), Channels(1, 384, 99840), Channels(4, 5000, 9000)):
        first = ENGINE.propose(facts(problem), DEVICE, heur_mode.A)
        assert len(first) == 3
        assert len({(k.threads_across, k.groups) for k in first}) == 3
        every = ENGINE.propose(facts(problem), DEVICE, heur_mode.B)
        assert every[:3] == first and len(set(every)) == len(every)
        assert all(ENGINE.illegal(facts(problem), k, DEVICE) is None for k in every)


def test_large_problems_have_enough_bytes_in_flight():
    """A chip's memory is busy if each SM waits for 40 KB at a time."""
    for columns, positions in ((96, 1597440), (192, 399360), (384, 99840)):
        problem = Channels(1, columns, positions)
        for knobs in ENGINE.propose(facts(problem), DEVICE, heur_mode.A):
            steps = split(problem).steps(knobs)
            assert split(problem).resident(knobs)
            assert knobs.ctas_per_sm * knobs.threads * steps * 8 * 16 >= 40 << 10


BAD = {
    "threads_across is 12": AcrossKnobs(12, 4),
    "threads_across is 'x'": AcrossKnobs("x", 4),
    "groups is 3; accepted: a power of two below the 12 chunks of a row, or as many": AcrossKnobs(32, 3),
    "groups is 16": AcrossKnobs(32, 16),
    "groups is 0": AcrossKnobs(32, 0),
    "accepted: a CTA of whole warps": AcrossKnobs(4, 12),
    "threads is 1536; accepted: 32 to 1024": AcrossKnobs(128, 12),
    "ctas_per_sm is 0": AcrossKnobs(32, 4, 0),
    "ctas_per_sm is 17; accepted: 1 to 16 on this device": AcrossKnobs(32, 4, 17),
    "eviction is 3; accepted: 0 to 2": AcrossKnobs(32, 4, 1, 3),
    r"ctas_per_sm 16: \d+ registers a thread for 8 columns at a time; accepted: 32": AcrossKnobs(32, 4, 16),
}


@pytest.mark.parametrize("message", BAD)
def test_knobs_that_are_refused(message):
    g = Channels(2, 96, 64).graph("emulator")
    g.validate()
    g.build_operation_graph()
    with pytest.raises(gf.GraphfuseError, match=message):
        g.create_execution_plan(ENGINE.name, knobs_to_dict(BAD[message]))


def refused(g) -> str:
    with pytest.raises(GraphNotSupportedError) as error:
        g.build([heur_mode.OPENSOURCE])
    return str(error.value)


def test_tensors_whose_neighbours_differ_are_named():
    """One tensor channels-last, the others contiguous."""
    g, x, weight = video()
    last = g.tensor([2, 24, 2, 3, 8], [1152, 1, 576, 192, 24], BF16, name="residual")
    y = g.rmsnorm(g.add(x, last), weight, EPS, norm_forward_phase=INFERENCE)[0]
    y.set_output().set_name("y").set_data_type(BF16)
    assert "input 'residual' has stride 24 between rows that are neighbours in 'x'; accepted: 1" in refused(g)


def test_rows_that_are_nowhere_neighbours_are_refused():
    g = graphs.new(device="emulator")
    x = g.tensor([2, 24, 8], [24 * 16, 16, 2], BF16, name="x")
    y = g.rmsnorm(x, g.tensor([1, 24, 1], data_type=BF16), EPS, norm_forward_phase=INFERENCE)[0]
    y.set_output().set_name("y").set_dim([2, 24, 8]).set_stride([24 * 16, 16, 2])
    reason = "input 'x' has strides [384, 2] between rows and 16 between columns; accepted: 1 along an axis of rows"
    assert reason in refused(g)


def test_blocks_along_columns_are_refused():
    g = graphs.new(device="emulator")
    x = g.tensor([32, 64], [1, 32], BF16, name="x")
    y = g.rmsnorm(x, g.tensor([1, 64], data_type=BF16), EPS, norm_forward_phase=INFERENCE)[0]
    y, scale = g.block_scale_quantize(y, block_size=32)
    scale.set_output().set_name("scale").set_data_type(data_type.FP8_E8M0)
    y.set_output().set_name("y").set_data_type(E4M3)
    assert "output 'y' is quantized in blocks along columns that are not contiguous" in refused(g)


def test_columns_that_reach_into_each_other_are_refused():
    found = facts(Channels(2, 24, 8))
    (store,) = found.program.stores
    stores = (dataclasses.replace(store, view=dataclasses.replace(store.view, column_stride=7)),)
    found = dataclasses.replace(found, program=dataclasses.replace(found.program, stores=stores))
    assert str(ENGINE.why_not(found, DEVICE)) == "output 'out' has a stride of 7; accepted: at least 8"


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("stride", [[16, 16, 2], [1, 2, 2], [80, 80, 10]], ids=str)
def test_a_written_value_of_each_row_lies_anywhere(stride, dtype):
    g = graphs.new(device="emulator")
    x = g.tensor([2, 24, 8], data_type=BF16, name="x")
    mean = g.reduction(x, mode=reduction_mode.AVG).set_dim([2, 1, 8])
    mean.set_output().set_name("mean").set_data_type(dtype).set_stride(stride)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    g.build_plans()
    given, memory = torch.randn(2, 24, 8).bfloat16(), torch.full((160,), 7.0, dtype=getattr(torch, dtype.facts.torch))
    made = memory.as_strided((2, 1, 8), stride)
    g.execute({"x": given, "mean": made}, graphs.workspace(g.get_workspace_size()))
    assert "threads_across" in g.get_plan_name_at_index(0)
    torch.testing.assert_close(made, given.float().mean(1, keepdim=True).to(made.dtype))
    made.fill_(7)
    assert (memory == 7).all()


def test_a_read_value_of_each_row_lies_as_rows_do():
    g = graphs.new(device="emulator")
    x, factor = g.tensor([2, 24, 8], name="x"), g.tensor([2, 1, 8], [16, 16, 2], name="factor")
    g.mul(g.rmsnorm(x, g.tensor([1, 24, 1]), EPS, norm_forward_phase=INFERENCE)[0], factor).set_output().set_name("y")
    assert "input 'factor' has stride 2 between neighbouring rows; accepted: 1" in refused(g)


@pytest.mark.emulate
def test_more_batches_are_the_same_kernel():
    """Rows are counted by batches; where the first axis is the one of neighbours, a launch is for its own count."""
    sources = {ENGINE.source(facts(Channels(n, 96, 64)), AcrossKnobs(32, 4)) for n in (1, 2, 50)}
    assert len(sources) == 1
    assert ENGINE.launch(facts(Channels(3, 96, 64)), AcrossKnobs(32, 4)).by_rows.rows == 192
    g = graphs.new(device="emulator")
    x = g.tensor([40, 24, 3], [1, 120, 40], BF16, name="x")
    y = g.rmsnorm(x, g.tensor([1, 24, 1], data_type=BF16, name="weight"), EPS, norm_forward_phase=INFERENCE)[0]
    y.set_output().set_name("y").set_data_type(BF16).set_dim([40, 24, 3]).set_stride([1, 120, 40])
    memory = randn(24, 3, 40).bfloat16()
    values, weight = memory.permute(2, 0, 1), torch.ones(1, 24, 1, dtype=torch.bfloat16)
    y = made(g, {"x": values, "weight": weight}, y=torch.empty_like(memory).permute(2, 0, 1))["y"]
    want = oracle.rmsnorm(values, weight, EPS, axes=(1,))[0]
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=1e-6)
    assert g._planner.at(0).parts[0].outline.by_rows is None


@pytest.mark.emulate
def test_no_rows():
    problem = Channels(0, 96, 64)
    assert ENGINE.launch(facts(problem), AcrossKnobs(32, 4)).grid == 0


def test_notes():
    problem = Channels(1, 2000, 7, output=E4M3)
    found = ENGINE.notes(facts(problem), AcrossKnobs(32, 1), DEVICE)
    assert any("read again in each phase" in note for note in found)
    assert any("one at a time" in note for note in found)
    assert "FP8 conversion: instruction" in found
