"""Planning as pure functions: schedules, regions, alternatives and the layout of the workspace."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphfuse import data_type, heur_mode, norm_forward_phase
from graphfuse.base.device import CPU, for_arch
from graphfuse.contract.engine import No
from graphfuse.contract.match import Pattern
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.op_graph import verify
from graphfuse.op_graph.ir import Subgraph
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.computing import MOST_NORMS
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.planning.workspace import ALIGNMENT
from support import graphs, toys
from support.graphs import FP4, Norm

H200 = for_arch("sm_90a")
INFERENCE = norm_forward_phase.INFERENCE
OPS = (*graphs.UNARY, *graphs.BINARY)


def ir(g):
    g.validate()
    return lower(g._ir)


def proposal(g, patterns, engines, mode=heur_mode.A, device=CPU):
    graph = ir(g)
    regions, _ = plan.matches(graph, plugins.Registry(tuple(patterns), tuple(engines)))
    return plan.propose(graph, regions, engines, device, mode)


def test_the_reason_is_said():
    def template(g):
        y = g.relu(g.capture("a"))
        return {"out": g.add(y, g.capture("b")), "y": y}

    made = proposal(diamond(), [Pattern("around", template, toys.facts)], [toys.HostSolo(), ReferenceEngine()])
    assert [(v.engine, str(v.why)) for v in made.verdicts][0] == (
        "planning",
        "it and another region would wait for each other",
    )


def test_many_regions():
    g = graphs.new()
    y = g.tensor([4, 64])
    for _ in range(160):
        y = g.swish(g.rmsnorm(y, g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0])
    y.set_output()
    made = proposal(g, plugins.installed().patterns, plugins.installed().engines, device=H200)
    assert len(made.plans[0].parts) == 160 / MOST_NORMS


class Odd(toys.HostSolo):
    """Answers what an engine must not."""

    def __init__(self, answer, sizes=(1,)):
        super().__init__("odd", sizes)
        self.answer = answer

    def why_not(self, facts, device):
        return self.answer


@pytest.mark.parametrize("answer", [True, False, 0, "no"])
def test_what_is_not_none_is_a_reason_against(answer):
    made = proposal(diamond(), toys.solo("relu"), [Odd(answer)])
    assert not made.plans and {str(v.why) for v in made.verdicts} == {str(answer)}


def test_a_reason_against_is_true():
    """As `if reason:` reads it: None alone is not."""
    assert No("too wide") and No("")


def test_an_engine_that_proposes_nothing_declines():
    made = proposal(diamond(), toys.solo("relu"), [Odd(None, sizes=())])
    assert not made.plans and {str(v.why) for v in made.verdicts} == {"it proposes no knobs"}


@given(st.data())
def test_what_lives_at_once_never_shares_workspace(data):
    drawn = data.draw(graphs.drawn(max_ops=9))
    ops = data.draw(st.sets(st.sampled_from(OPS), min_size=1))
    scratch = data.draw(st.sampled_from([0, 1, 256, 1000]))
    engines = (toys.ScratchSolo(scratch), ReferenceEngine())
    (best, *_) = proposal(drawn.build(), toys.solo(*sorted(ops)), engines).plans
    graph = best.parts[0].region.subgraph.graph
    part_of = {i: n for n, p in enumerate(best.parts) for i in p.region.subgraph.node_ids}
    used = []  # bytes from, to, first part, last part
    for t, at in best.placed.items():
        readers = [part_of[i] for i in graph.consumers[t]]
        used.append((at, at + graph.tensors[t].nbytes, part_of[graph.producer[t]], max(readers)))
    for n, part in enumerate(best.parts):
        if size := part.outline.workspace_bytes:
            used.append((best.scratch[n], best.scratch[n] + size, n, n))
    for one, two in itertools.combinations(used, 2):
        together = one[2] <= two[3] and two[2] <= one[3]
        assert not together or one[1] <= two[0] or two[1] <= one[0], (one, two)
    assert all(low % ALIGNMENT == 0 for low, *_ in used)
    assert best.workspace_bytes == max((high for _, high, *_ in used), default=0)
    sizes = [(high - low, first, last) for low, high, first, last in used]
    at_once = [sum(size for size, first, last in sizes if first <= n <= last) for n in range(len(best.parts))]
    assert max(at_once) <= best.workspace_bytes <= sum(-(-size // ALIGNMENT) * ALIGNMENT for size, *_ in sizes)
    # Every tensor between two parts has a place, and nothing else has.
    crossing = {t for p in best.parts for t in p.region.subgraph.inputs if graph.tensors[t].virtual}
    assert set(best.placed) == crossing


@given(st.data())
def test_any_cut_into_regions_computes_the_same(data):
    """Partitioned graphs run with intermediates in the workspace, whatever the cut."""
    drawn = data.draw(graphs.drawn(max_ops=9))
    ops = data.draw(st.sets(st.sampled_from(OPS), min_size=1))
    g, pack = drawn.build(), drawn.inputs()
    exact = drawn.exact(pack)
    outputs = {name: torch.full(value.shape, float("nan")) for name, value in exact.items()}
    g.build([heur_mode.A], patterns=toys.solo(*sorted(ops)), engines=[toys.HostSolo()])
    g.execute(pack | outputs, graphs.workspace(g.get_workspace_size()))
    for name, want in exact.items():
        torch.testing.assert_close(outputs[name].double(), want, rtol=2e-4, atol=2e-4)


def test_workspace_is_reused_and_as_small_as_it_can_be():
    """Of a chain of regions at most two intermediates live at once."""
    g = graphs.new()
    x = g.tensor([1000])
    for _ in range(6):
        x = g.tanh(x)
    x.set_output()
    best = proposal(g, toys.solo("tanh"), [toys.HostSolo()]).plans[0]
    assert len(best.parts) == 6
    assert best.workspace_bytes == 4096 + 4000


def test_no_workspace_where_none_is_needed():
    assert proposal(Norm().graph(), (), [ReferenceEngine()]).plans[0].workspace_bytes == 0


def test_fixed_places_stay_free():
    """Implicit block scales keep their offset; what planning places comes after them."""
    g = Norm(rows=33, output=FP4).graph()
    best = proposal(g, toys.solo("swish"), [toys.HostSolo(), ReferenceEngine()]).plans[0]
    graph = best.parts[0].region.subgraph.graph
    fixed = [t for t in graph.tensors if t.workspace is not None]
    assert [best.placed[t.id] for t in fixed] == [256 + 128]
    others = {t: at for t, at in best.placed.items() if t != fixed[0].id}
    assert others and all(at >= fixed[0].workspace + fixed[0].nbytes for at in others.values())


def diamond():
    g = graphs.new()
    y = g.relu(g.tensor([4]))
    g.add(y, g.tanh(y)).set_output()
    return g


def test_a_region_that_needs_a_node_that_needs_it_cannot_be_scheduled():
    graph = ir(diamond())
    assert plan.schedule(graph, [Subgraph(graph, (0, 2))]) is None
    assert [s.node_ids for s in plan.schedule(graph, [Subgraph(graph, (0, 1))])] == [(0, 1), (2,)]


def test_such_a_region_is_left_to_others():
    def template(g):
        y = g.relu(g.capture("a"))
        return {"out": g.add(y, g.capture("b")), "y": y}

    best = proposal(diamond(), [Pattern("around", template, toys.facts)], [toys.HostSolo(), ReferenceEngine()]).plans[0]
    assert [p.engine.name for p in best.parts] == ["reference"]


@given(graphs.drawn(), st.data())
def test_a_schedule_runs_every_node_once_after_what_it_needs(drawn, data):
    graph = ir(drawn.build())
    ids = data.draw(st.permutations(range(len(graph.nodes))))
    cut = data.draw(st.integers(0, len(ids)))
    regions = [Subgraph(graph, tuple(sorted(ids[:cut])))] if cut else []
    order = plan.schedule(graph, regions)
    if order is not None:
        verify.check_partition(graph, order)
    assert order is not None or len(regions[0].node_ids) > 1


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([(0,), (1,)], "not planned: node 'add.0'"),
        ([(0,), (0,), (1,), (2,)], "planned twice"),
        ([(1,), (0,), (2,)], "read before"),
    ],
)
def test_a_wrong_partition_is_refused(regions, message):
    graph = ir(diamond())
    with pytest.raises(ValueError, match=message):
        verify.check_partition(graph, [Subgraph(graph, r) for r in regions])


def test_what_one_part_writes_for_users_no_other_overwrites():
    g = graphs.new(device="emulator")
    x, inference = g.tensor([4, 64], name="x"), norm_forward_phase.INFERENCE
    y = g.rmsnorm(x, epsilon=1e-5, norm_forward_phase=inference)[0].set_output().set_name("y")
    all_of_them = g.tensor([4, 64])  # a scale of rows of another kind
    g.rmsnorm(y, all_of_them, 0.5, norm_forward_phase=inference)[0].set_output().set_name("z")
    g.validate(), g.build_operation_graph()
    g.create_execution_plans([heur_mode.OPENSOURCE])
    plan, ids = g._planner.at(0), {t.name: t.id for t in g._planner.graph.tensors}
    assert len(plan.parts) == 2
    assert plan.in_place == {(ids["x"], ids["y"])}


def two_norms():
    g = graphs.new()
    y = g.relu(g.tensor([8]))
    g.tanh(y).set_output()
    g.relu(y).set_output()
    return g


def test_alternatives_differ_from_the_best_in_one_region():
    engines = [toys.HostSolo("a", (1, 2)), toys.HostSolo("b", (7,))]
    names = [p.name for p in proposal(two_norms(), toys.solo("relu", "tanh"), engines).plans]
    best, other, last = "a[size=1]", "a[size=2]", "b[size=7]"
    assert names[0] == f"{best} + {best} + {best}"
    assert len(names) == len(set(names)) == 7
    for changed in (other, last):
        assert sum(name.count(changed) for name in names) == 3
    assert all(name.count(best) >= 2 for name in names)


def test_a_larger_match_wins_and_a_declined_one_leaves_room():
    def template(g):
        return {"out": g.tanh(g.relu(g.capture("a")))}

    both = Pattern("both", template, toys.facts)
    g = graphs.new()
    g.tanh(g.relu(g.tensor([8]))).set_output()
    patterns = (*toys.solo("tanh"), both)
    best = proposal(g, patterns, [toys.HostSolo(), ReferenceEngine()]).plans[0]
    assert [p.region.pattern for p in best.parts] == ["both"]


def test_modes_ask_different_engines():
    engines = plugins.installed().engines
    patterns = plugins.installed().patterns
    asked = {m: {v.engine for v in proposal(Norm().graph(), patterns, engines, m, H200).verdicts} for m in heur_mode}
    generated = {"rows"}
    assert asked[heur_mode.OPENSOURCE] == generated
    assert asked[heur_mode.FALLBACK] == {"reference"}
    assert asked[heur_mode.A] == asked[heur_mode.B] == {*generated, "reference"}


def test_b_is_a_wider_a():
    engines, patterns = plugins.installed().engines, plugins.installed().patterns
    a, b = (proposal(Norm().graph(), patterns, engines, m, H200).plans for m in (heur_mode.A, heur_mode.B))
    assert a[0].name == b[0].name and {p.name for p in a} < {p.name for p in b}


@pytest.mark.parametrize(
    "case", [Norm(), Norm(training=True, bias=graphs.FLOAT), Norm(output=FP4, blocks=True), Norm(output=FP4)], ids=str
)
def test_the_main_job_is_one_kernel(case):
    engines, patterns = plugins.installed().engines, plugins.installed().patterns
    best = proposal(case.graph(), patterns, engines, heur_mode.OPENSOURCE, H200).plans[0]
    assert [p.engine.name for p in best.parts] == ["rows"]
    implicit = case.output is FP4 and not case.blocks
    assert best.workspace_bytes == (128 + 128 + 12 * 4 if implicit else 0)


def test_rows_do_not_enter_the_source():
    engines, patterns = plugins.installed().engines, plugins.installed().patterns
    parts = [
        proposal(Norm(rows).graph(), patterns, engines, heur_mode.OPENSOURCE, H200).plans[0].parts[0]
        for rows in (0, 1, 1000, 10**7)
    ]
    texts = {part.engine.source(part.facts, parts[0].knobs) for part in parts}
    assert len(texts) == 1


def double_compute(g):
    x, w = g.tensor([4, 64]), g.tensor([1, 64])
    return g.rmsnorm(x, w, 1e-5, norm_forward_phase=INFERENCE, compute_data_type=data_type.DOUBLE)[0]


def double_epilogue(g):
    y = g.rmsnorm(g.tensor([4, 64]), g.tensor([1, 64]), 1e-5, norm_forward_phase=INFERENCE)[0]
    return g.swish(y, compute_data_type=data_type.DOUBLE)


def weight_by_value(g):
    return g.rmsnorm(g.tensor([4, 1]), 2.0, 1e-5, norm_forward_phase=INFERENCE)[0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (double_compute, "node 'rmsnorm.0' .* computes in DOUBLE"),
        (weight_by_value, "'rmsnorm.0::scale' .* is passed by value"),
    ],
)
def test_what_the_facts_cannot_say_is_left_to_the_reference_engine(make, reason):
    g = graphs.new()
    make(g).set_output()
    graph, known = ir(g), plugins.installed()
    regions, declined = plan.matches(graph, known)
    assert not regions and all(re.search(reason, str(d.why)) for d in declined)
    best = plan.propose(graph, regions, known.engines, H200, heur_mode.A).plans[0]
    assert [p.engine.name for p in best.parts] == ["reference"]


def test_a_node_that_cannot_be_fused_is_left_outside():
    g = graphs.new()
    double_epilogue(g).set_output()
    graph, known = ir(g), plugins.installed()
    best = plan.propose(graph, plan.matches(graph, known)[0], known.engines, H200, heur_mode.A).plans[0]
    assert [p.engine.name for p in best.parts] == ["rows", "reference"]
