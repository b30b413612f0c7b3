"""Few long rows over many CTAs: bits across knobs and schedules, which knobs are legal, and when they are chosen."""

from dataclasses import replace

import pytest
import torch

from graphfuse import GraphNotSupportedError, heur_mode, reduction_mode
from graphfuse.base.device import for_arch
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.over_grid import OverGrid, OverGridKnobs
from graphfuse.engines.rows.over_grid.split import OverGridSplit
from graphfuse.rows.steps import Join
from support import graphs
from support.emulation import Planned
from support.gradients import Gradient
from support.graphs import BF16, E4M3, FLOAT, FP4, HALF, Norm
from support.losses import CrossEntropy
from support.quantized import Quantized
from support.row_functions import RowFunction
from support.variants import Variant

ENGINE, H200, A100 = RowEngine(), for_arch("sm_90a"), for_arch("sm_80")

PROBLEMS = {
    "softmax": RowFunction("softmax", 3, 5000, BF16, FLOAT),  # a maximum, then a sum
    "softmax of float": RowFunction("softmax", 2, 20003, FLOAT, FLOAT),
    "layer norm": RowFunction("layer norm", 5, 3424, HALF, FLOAT),  # a sum, then another
    "layer norm of float": RowFunction("layer norm", 1, 20000, FLOAT, BF16),
    "odd columns": RowFunction("layer norm", 4, 777, BF16, FLOAT),
    "one column": RowFunction("L2 normalization", 2, 1, FLOAT, FLOAT),
    "one a row": RowFunction("logsumexp", 2, 5000, BF16, FLOAT),
    "two outputs": Norm(2, 5000, BF16, FLOAT, E4M3, BF16, training=True),
    "blocks": Norm(2, 4096, FLOAT, FLOAT, FP4, FLOAT, training=True, blocks=True),
    "largest of a row": Quantized(3, 5000, "silu", None),
    "loss": CrossEntropy(3, 5000, label_smoothing=0.1, z_loss=1e-4),  # picks an element
}
KNOBS = [  # a row in one pass, and in several; fewer CTAs than warps that read what they leave, and more
    OverGridKnobs(2, 128, 1),
    OverGridKnobs(32, 32, 1),
    OverGridKnobs(4, 256, 4),
    OverGridKnobs(2, 64, 16),
    OverGridKnobs(16, 512, 2),
]


def facts(problem):
    return Variant(problem).facts()


def planned(problem, knobs) -> Planned:
    return Planned(problem.graph("emulator"), problem.inputs() | problem.outputs(), knobs)


@pytest.mark.some(5)
@pytest.mark.emulate
@pytest.mark.parametrize("name", PROBLEMS)
def test_bits_do_not_depend_on_knobs(name):
    """They are those of a CTA, or of a cluster, a row."""
    problem = PROBLEMS[name]
    every = [k for k in (ByRowKnobs(1024, 1024), ByRowKnobs(512, 128), *KNOBS) if legal(problem, k)]
    assert len(every) >= 5
    made = [planned(problem, knobs) for knobs in every]
    for one in made:
        one.run()
    first, *others = (one.contents() for one in made)
    assert all(other == first for other in others)
    pack = made[-1].pack
    Variant(problem).hold(problem.rows, pack, {n: pack[n] for n in problem.outputs()})


def legal(problem, knobs) -> bool:
    return ENGINE.illegal(facts(problem), knobs, H200) is None


def test_rows_are_held_and_read_again():
    split = OverGridSplit.of(facts(PROBLEMS["softmax of float"]))
    assert {split.passes(knobs) for knobs in KNOBS} == {1, 2, 16}
    assert {split.resident(knobs) for knobs in KNOBS} == {True, False}


@pytest.mark.emulate
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
@pytest.mark.parametrize("knobs", [OverGridKnobs(4, 64, 16), OverGridKnobs(2, 32, 1)], ids=["read again", "held"])
def test_in_place(knobs, build):
    problem = RowFunction("softmax", 2, 3000, FLOAT, FLOAT)
    apart, same = planned(problem, knobs), planned(problem, knobs)
    apart.run()
    same.pack["out"] = same.pack["x"]
    assert same.check(build)["out"] == apart.contents()["out"]


@pytest.mark.emulate
def test_the_largest_magnitude_of_all_rows():
    def made(knobs) -> bytes:
        g = graphs.new(device="emulator")
        x = g.tensor([3, 4000], data_type=BF16, name="x")
        g.softmax(x).set_output().set_name("out").set_data_type(FLOAT)
        g.reduction(x, mode=reduction_mode.AMAX).set_output().set_name("amax").set_data_type(FLOAT)
        values = torch.randn(3, 4000, generator=graphs.generator("cpu", 0)).to(torch.bfloat16)
        pack = {"x": values, "out": torch.empty(3, 4000), "amax": torch.full((1, 1), 7e9)}
        Planned(g, pack, knobs).run()
        assert pack["amax"].item() == values.abs().max().item()
        return pack["out"].numpy().tobytes()

    assert made(OverGridKnobs(4, 64)) == made(ByRowKnobs(256, 256))


def test_fewer_rows_take_fewer_ctas_and_no_more_memory():
    problem, knobs = PROBLEMS["softmax"], OverGridKnobs(8, 128, 2)
    few, many = (ENGINE.launch(facts(replace(problem, rows=rows)), knobs) for rows in (2, 5))
    assert (few.grid, many.grid, many.by_rows.grid(2)) == (16, 40, 16)
    assert many.cooperative and not many.waits  # for nothing that a kernel before wrote late
    values = 1  # of a row, behind one phase
    assert [launch.scratch_bytes for launch in (few, many)] == [rows * 8 * 32 * 4 * 2 * 2 * values for rows in (2, 5)]
    assert ENGINE.launch(facts(replace(problem, rows=0)), knobs).grid == 0


LONG = RowFunction("softmax", 3, 1 << 20)
FAULTS = {
    "ctas_per_row is 3; accepted: a power of two": (LONG, OverGridKnobs(3, 128)),
    "threads is 2048; accepted: 32 to 1024": (LONG, OverGridKnobs(2, 2048)),
    "ctas_per_sm is 4; accepted: 1 to 2": (LONG, OverGridKnobs(2, 512, 4)),
    "ctas_per_row is 64, ctas_per_sm 1; accepted for 3 rows: up to 44, as all CTAs run": (
        LONG,
        OverGridKnobs(64, 1024),
    ),
    "for sums over rows": (Gradient(3, 4096), OverGridKnobs(4, 128)),
    "for rows that are not reduced": (CrossEntropy(3, 4096, backward=True, sums=False), OverGridKnobs(4, 128)),
}


@pytest.mark.parametrize("said", FAULTS)
def test_illegal_knobs(said):
    problem, knobs = FAULTS[said]
    g = problem.graph("emulator")
    g.validate()
    g.build_operation_graph()
    with pytest.raises(GraphNotSupportedError, match=said.replace("(", r"\(")):
        g.create_execution_plan(ENGINE.name, knobs_to_dict(knobs))


def test_all_ctas_of_legal_knobs_run_at_the_same_time():
    for rows in (1, 3, 40):
        of = facts(replace(LONG, rows=rows))
        every = OverGrid().legal(of, H200)
        assert max(k.ctas_per_row for k in every) * rows <= 4 * H200.sm_count
        assert all(ENGINE.launch(of, k).grid <= H200.sm_count * k.ctas_per_sm for k in every)
        fewer = OverGrid().legal(of, replace(H200, sm_count=50))
        assert {*fewer} < {*every}
        shapes = {(k.threads, k.ctas_per_sm) for k in every}
        others = (OverGridKnobs(1 << power, *shape) for power in range(1, 12) for shape in shapes)
        assert {k for k in others if ENGINE.illegal(of, k, H200) is None} == {*every}


CHOSEN = {  # whether a row is spread over the grid
    "1 x 2^20": (RowFunction("softmax", 1, 1 << 20), H200, True),
    "8 x 2^20": (RowFunction("layer norm", 8, 1 << 20), H200, True),
    "32 x 2^20": (RowFunction("layer norm", 32, 1 << 20), H200, True),
    "the largest of 2^24": (Quantized(1, 1 << 24, "x", None), H200, True),
    "the length of 2^26": (RowFunction("L2 normalization", 1, 1 << 26), H200, True),
    "a cluster's": (RowFunction("softmax", 1, 1 << 17), H200, False),
    "a cluster's, without clusters": (RowFunction("softmax", 1, 1 << 17), A100, True),
    "rows of 32 clusters": (RowFunction("layer norm", 64, 1 << 18), H200, False),
    "many rows": (RowFunction("layer norm", 1000, 1 << 20), H200, False),
    "a short row": (RowFunction("softmax", 1, 1 << 15), H200, False),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choice(name):
    problem, device, over = CHOSEN[name]
    of = facts(problem)
    assert ENGINE.why_not(of, device) is None
    found = ENGINE.propose(of, device, heur_mode.A)
    assert {isinstance(knobs, OverGridKnobs) for knobs in found} == {over}
    assert all(ENGINE.illegal(of, knobs, device) is None for knobs in found)


def test_tuning_tries_both():
    kinds = [type(k) for k in ENGINE.propose(facts(LONG), H200, heur_mode.B)]
    assert kinds[0] is OverGridKnobs and ByRowKnobs in kinds
    of_a_cluster = ENGINE.propose(facts(RowFunction("softmax", 1, 1 << 17)), H200, heur_mode.B)
    assert isinstance(of_a_cluster[0], ByRowKnobs) and OverGridKnobs in {*map(type, of_a_cluster)}


def test_the_problem_is_that_of_a_row_in_a_cta():
    of = facts(LONG)
    assert ENGINE.problem(of) == OverGrid().problem(of)


def test_memory_is_for_all_that_is_reduced_behind_a_phase():
    of, knobs = facts(CrossEntropy(2, 5000, label_smoothing=0.1)), OverGridKnobs(4, 128)
    most = sum(max(len(of.program.reduced_after(p, join)) for p in range(of.program.last + 1)) for join in Join)
    assert ENGINE.launch(of, knobs).scratch_bytes == 2 * 4 * 32 * 4 * 2 * most


def test_notes():
    assert any("read again in each phase" in note for note in ENGINE.notes(facts(LONG), OverGridKnobs(2, 1024), H200))
    assert not any("read again" in note for note in ENGINE.notes(facts(LONG), OverGridKnobs(32, 1024), H200))
