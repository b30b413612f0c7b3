"""What the backward engine takes, proposes and launches, without running anything."""

import dataclasses
import re

import pytest

from graphfuse import data_type, heur_mode
from graphfuse.base.device import ARCHES, CPU, for_arch
from graphfuse.contract import match
from graphfuse.contract.engine import Address, Scratch
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.rows import PATTERN
from support import graphs
from support.gradients import CASES, Gradient
from support.graphs import BF16, E4M3, FLOAT, HALF

ENGINE = RowEngine()
H200 = for_arch("sm_90a")


def matches(graph) -> list:
    return [m for m in match.find(PATTERN, lower(freeze(graph)))]


def facts_of(case: Gradient):
    return matches(case.graph())[0].facts


# What is taken


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_around_it_is_one_region(case):
    graph = lower(freeze(case.graph()))
    found = next(match.find(PATTERN, graph))
    assert len(found.subgraph.node_ids) == len(graph.nodes)
    assert ENGINE.why_not(found.facts, H200) is None
    program = found.facts.program
    assert len(program.sums) == (case.weight != "none") + case.dbias
    assert [len(s.factors) for s in program.sums] == [2, 1][: len(program.sums)]
    assert program.last == 1 and all(program.extents[s.value.index].columns for s in program.stores)


def drawn(g, **types):
    """Two gradients that are added, the backward, and its outputs."""
    x, dy = (g.tensor([6, 64], data_type=types.get(n, BF16), name=n) for n in ("x", "dy"))
    w, inverse = g.tensor([1, 64], data_type=types.get("w", BF16), name="w"), g.tensor([6, 1], name="inverse")
    total = g.add(dy, g.tensor([6, 64], data_type=BF16, name="other"))
    return total, w, *g.rmsnorm_backward(total, x, w, inverse, has_dbias=True)


def sizes(g) -> list[int]:
    return [len(m.subgraph.node_ids) for m in matches(g)]


def test_a_value_on_the_way_that_is_read_elsewhere_is_written_too():
    g = graphs.new()
    total, _, dx, dscale, dbias = drawn(g)
    for t in (total, dx, dscale, dbias):
        t.set_output()
    program = matches(g)[0].facts.program
    assert sizes(g)[0] == 2 and len(program.stores) == 2 and len(program.sums) == 2


def test_who_reads_a_sum_over_rows_comes_after():
    """Neither a step of the optimizer nor what spreads the sum over rows again."""
    g = graphs.new()
    _, w, dx, dscale, dbias = drawn(g)
    g.sub(w, g.mul(dscale, 0.1)).set_output()
    g.mul(dx, dbias).set_output()
    assert sizes(g)[0] == 2  # the sum of gradients, and the backward
    (store,) = matches(g)[0].facts.program.stores
    assert len(matches(g)[0].facts.program.sums) == 2 and store.view.rows


def test_it_may_be_asked_for_no_gradient_of_the_input():
    g = graphs.new()
    _, _, _, dscale, dbias = drawn(g)
    dscale.set_output(), dbias.set_output()
    facts = matches(g)[0].facts
    assert not facts.program.stores and ENGINE.why_not(facts, H200) is None


def test_growing_is_tried_without_what_is_before_and_after():
    g = graphs.new()
    _, _, dx, dscale, dbias = drawn(g)
    dscale.set_output(), dbias.set_output()
    g.add(dx, g.tensor([6, 64], data_type=BF16, name="residual")).set_output()
    assert sizes(g) == [3, 2, 2, 1]


# What is refused


def views(facts, **changed):
    """The facts with the first input that has an element a column and row changed."""
    inputs = list(facts.program.inputs)
    number = next(i for i, view in enumerate(inputs) if view.rows and view.columns)
    inputs[number] = dataclasses.replace(inputs[number], **changed)
    return dataclasses.replace(facts, program=dataclasses.replace(facts.program, inputs=tuple(inputs)))


def sums(facts, **changed):
    made = [dataclasses.replace(s, view=dataclasses.replace(s.view, **changed)) for s in facts.program.sums]
    return dataclasses.replace(facts, program=dataclasses.replace(facts.program, sums=tuple(made)))


def stores(facts, **changed):
    made = [dataclasses.replace(s, view=dataclasses.replace(s.view, **changed)) for s in facts.program.stores]
    return dataclasses.replace(facts, program=dataclasses.replace(facts.program, stores=tuple(made)))


BASE = Gradient(6, 64, activation="silu", dbias=True)
REFUSED = {
    "type": (lambda f: views(f, dtype=data_type.INT64), "input '.*' is INT64; accepted: FLOAT, HALF, BFLOAT16"),
    "column stride": (lambda f: views(f, column_stride=2), "input '.*' has stride 2 between columns; accepted: 1"),
    "output rows": (lambda f: stores(f, row_strides=(60,)), "output 'dx' has row stride 60; accepted: at least 64"),
    "sum type": (lambda f: sums(f, dtype=E4M3), "sum over rows 'dscale' is FP8_E4M3; accepted: FLOAT, HALF"),
    "sum stride": (lambda f: sums(f, column_stride=3), "sum over rows 'dscale' has stride 3 between columns"),
    "sum alignment": (lambda f: sums(f, alignment=1), "sum over rows 'dscale' is aligned to 1 byte; accepted: a mult"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    change, message = case
    found = ENGINE.why_not(change(facts_of(BASE)), H200)
    assert found is not None and re.search(message, found.reason), found


@pytest.mark.parametrize(
    "device, message",
    [
        (CPU, "needs a CUDA device or the emulator; got cpu"),
        (dataclasses.replace(H200, compute_capability=(7, 5)), "needs SM80 or newer; cuda:0 is SM75"),
        (dataclasses.replace(H200, compute_capability=(11, 0)), "is SM110, for which the kernel has not been compiled"),
    ],
)
def test_refused_devices(device, message):
    assert message in ENGINE.why_not(facts_of(BASE), device).reason


def test_a_norm_in_another_type_is_refused_by_the_pattern():
    g = graphs.new(compute_data_type=graphs.graphfuse.data_type.DOUBLE)
    drawn(g)[2].set_output()
    assert "computes in DOUBLE; accepted: FLOAT" in str(matches(g)[-1].why)


# PersistentKnobs


def legal(case: Gradient, knobs: PersistentKnobs, device=H200) -> str:
    found = ENGINE.illegal(facts_of(case), knobs, device)
    return "" if found is None else found.reason


ILLEGAL = {
    "no power": (PersistentKnobs(96, 128, 2, 1, 132), "threads_per_row is 96; accepted: a power of two"),
    "threads": (PersistentKnobs(16, 2048, 2, 1, 132), "threads is 2048; accepted: 32 to 1024"),
    "no stages": (PersistentKnobs(64, 128, 0, 1, 132), "stages is 0; accepted: 1 to 8"),
    "stages": (PersistentKnobs(64, 128, 9, 1, 132), "stages is 9; accepted: 1 to 8"),
    "bool": (PersistentKnobs(64, 128, True, 1, 132), "stages is True; accepted: 1 to 8"),
    "per SM": (PersistentKnobs(64, 512, 2, 5, 132), "ctas_per_sm is 5; accepted: 1 to 4 on this device"),
    "ctas": (PersistentKnobs(64, 128, 2, 1, 133), "ctas is 133; accepted: up to 132, that run at the same time"),
    "cluster": (PersistentKnobs(256, 128, 2, 1, 131), "ctas is 131; accepted: a multiple of the 2 CTAs of a cluster"),
    "too large a cluster": (PersistentKnobs(4096, 128, 2, 1, 128), "accepted: clusters of up to 16 CTAs"),
    "registers": (PersistentKnobs(1, 128, 2, 1, 132), "too few registers for rows of 4096 columns"),
    "shared memory": (PersistentKnobs(128, 512, 8, 1, 132), "bytes of shared memory a CTA; cuda:0 has 232448"),
    "shared memory of an SM": (
        PersistentKnobs(256, 256, 8, 2, 264),
        "2 CTAs an SM, .* bytes of shared memory each; cuda:0 has",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal(case):
    knobs, message = case
    assert re.search(message, legal(Gradient(4096, 4096), knobs))


def test_no_stages_where_nothing_can_be_copied():
    case = Gradient(4, 96, HALF, "none", alignment=2)
    assert "stages is 2; accepted: 1, as no input" not in legal(
        case, PersistentKnobs(32, 128, 2, 1, 4)
    )  # the inverse RMS can
    assert not legal(case, PersistentKnobs(32, 128, 1, 1, 4))


def test_no_clusters_before_sm90():
    knobs = PersistentKnobs(1024, 512, 2, 1, 100)
    assert "accepted: no clusters: cuda:0 is SM80" in legal(Gradient(100, 8192), knobs, for_arch("sm_80"))
    assert not legal(Gradient(100, 8192), knobs)


COLUMNS = (1, 17, 64, 111, 128, 760, 1024, 3420, 4096, 8192, 16384, 32768, 65536, 65537, 131072, 262144, 1 << 20)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_what_is_proposed_fits(arch, columns):
    """Knobs of every mode are legal, and all CTAs of the grid run at the same time."""
    device = for_arch(arch)
    for rows, dtype in ((1, BF16), (4096, BF16), (4096, FLOAT), (1 << 33, HALF)):
        facts = facts_of(Gradient(rows, columns, dtype, activation="gate", residual=True, dbias=True))
        assert ENGINE.why_not(facts, device) is None
        few, many = (ENGINE.propose(facts, device, mode) for mode in (heur_mode.A, heur_mode.B))
        assert 1 <= len(few) <= 3 and list(many[: len(few)]) == list(few) and len(set(many)) == len(many)
        assert all(ENGINE.illegal(facts, knobs, device) is None for knobs in {*few, *many[::5]})
        for knobs in many[::11]:
            launch = ENGINE.launch(facts, knobs)
            assert launch.grid <= device.sm_count * knobs.ctas_per_sm and launch.grid % launch.cluster == 0
            assert launch.block * knobs.ctas_per_sm <= device.threads_per_sm
            assert knobs.ctas_per_sm * (launch.shared_bytes + 1024) <= device.shared_memory_per_sm
            assert launch.shared_bytes <= device.shared_memory_per_block


def test_long_rows_are_spread_over_clusters_where_there_are_some():
    case = Gradient(4096, 65536)
    hopper, ampere = (ENGINE.propose(facts_of(case), for_arch(a), heur_mode.A)[0] for a in ("sm_90a", "sm_80"))
    assert hopper.cluster > 1 and (ampere.threads_per_row, ampere.threads, ampere.stages) == (512, 512, 1)
    notes = ENGINE.notes(facts_of(case), ampere, for_arch("sm_80"))
    assert "rows of 65536 columns do not fit in registers: they are read again in each phase" in notes
    silu = facts_of(Gradient(8, 64, activation="silu"))
    for facts, has in ((facts_of(case), False), (silu, True)):
        knobs = ENGINE.propose(facts, H200, heur_mode.A)[0]
        assert any(note.startswith("sigmoid of x") for note in ENGINE.notes(facts, knobs, H200)) is has


# Launches


@pytest.mark.parametrize(("rows", "ctas"), [(0, 1), (1, 1), (5, 3), (263, 132), (265, 67), (4096, 128), (1 << 20, 132)])
def test_the_workspace_has_a_row_of_sums_for_each_cta(rows, ctas):
    """Of as few as take no more rounds of two rows each."""
    knobs = PersistentKnobs(128, 256, 3, 1, 132)
    launch = ENGINE.launch(facts_of(Gradient(rows, 1024, dbias=True)), knobs)
    assert launch.cooperative and launch.grid == ctas
    most = max(launch.by_rows.grid(fewer) for fewer in range(max(0, rows - 300), rows + 1))
    assert launch.scratch_bytes == most * 1024 * 4 * 2  # that no fewer rows need more of
    assert sum(isinstance(a, Scratch) for a in launch.arguments) == 1


def test_a_cluster_has_one_row_of_sums():
    launch = ENGINE.launch(facts_of(Gradient(4096, 16384)), PersistentKnobs(1024, 512, 3, 1, 132))
    assert (launch.grid, launch.cluster, launch.scratch_bytes) == (132, 2, 66 * 16384 * 4)


def test_nothing_meets_where_there_are_no_sums():
    facts = facts_of(Gradient(4096, 1024, weight="none", activation="silu"))
    knobs = ENGINE.propose(facts, H200, heur_mode.A)[0]
    launch = ENGINE.launch(facts, knobs)
    assert not launch.cooperative and not launch.scratch_bytes
    assert not any(isinstance(a, Scratch) for a in launch.arguments)
    assert ENGINE.launch(facts_of(Gradient(0, 1024, weight="none")), knobs).grid == 0


def test_arguments_name_all_tensors():
    facts = facts_of(Gradient(7, 96, activation="gate", residual=True, dbias=True))
    launch = ENGINE.launch(facts, ENGINE.propose(facts, H200, heur_mode.A)[0])
    program = facts.program
    tensors = {view.tensor for view in program.inputs} | {s.view.tensor for s in (*program.stores, *program.sums)}
    assert {a.tensor for a in launch.arguments if isinstance(a, Address)} == tensors


def test_it_is_not_started_before_the_kernel_before_has_ended():
    """Cooperative launches are not: no documentation says that they may be."""
    facts = facts_of(Gradient(6, 64))
    assert not ENGINE.launch(facts, ENGINE.propose(facts, H200, heur_mode.A)[0]).waits


CLASSES = ((4, False), (9, False), (4, True))


def test_the_problem_class_tells_sums_apart():
    keys = [ENGINE.problem(facts_of(Gradient(rows, 96, dbias=dbias))).key for rows, dbias in CLASSES]
    assert keys[0] == keys[1] != keys[2]
