"""The tables that come with the engines: complete, legal, and, where translated, translated so."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from graphfuse import data_type, engines, heur_mode, norm_forward_phase, pygraph, reduction_mode
from graphfuse.base.device import ARCHES, for_arch
from graphfuse.benchmarks import rmsnorm_backward, rmsnorm_silu, rmsnorm_training, sizes
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.programs import chain_knobs, in_a_model
from graphfuse.contract.engine import ProblemClass, knobs_from_dict, knobs_to_dict
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.rows.steps import Join
from graphfuse.tuned_tables import store
from graphfuse.tuned_tables.entry import Source, TunedEntry
from graphfuse.tuned_tables.tunings import Tunings, origin_text

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "engines").rglob("*.json"))
DEVICES = {f"sm_{for_arch(arch).sm}": for_arch(arch) for arch in ARCHES}
H200 = for_arch("sm_90a")
ENGINES = {engine.name: engine for engine in engines.ALL}
WHOLE = ("rows",)
"""Engines whose tables have all that is benched; others' may leave some of it to the heuristic."""
UNTUNED = (
    "norm-add-norm",
    "silu-mul-fp8",
    "add-rmsnorm-fp8-blocks",
    "rmsnorm-channels",
    "qk-norm-rope-cache",
    "qk-norm-rope-training",
)
"""Benches some of whose problems the heuristic still decides."""


@pytest.mark.parametrize("path", TABLES, ids=[p.name for p in TABLES])
def test_a_table_names_its_engine_and_chip_and_planning_uses_all_of_it(path):
    name, chip, _ = path.name.split(".")
    device, entries = DEVICES[chip], store.first_party(ENGINES[name], DEVICES[chip])
    assert store.to_text(entries) == path.read_text()
    assert {e.source.arch for e in entries} == {chip} and {e.engine for e in entries} == {name}
    assert {e.source.origin for e in entries} <= {"measured", "published"}
    assert all((e.us is None) == (e.source.origin == "published") and not e.others for e in entries)
    assert all(e.source.date for e in entries if e.source.origin == "measured")
    tunings, known = Tunings(first_party=entries), {identity(e): e for e in entries}
    benched, between = (
        {identity(p.engine.problem(p.facts)): p for g in graphs for p in parts(g, device) if p.engine.name == name}
        for graphs in (tuned_for(chip), may_be_tuned_for(chip))
    )
    assert len(known) == len(entries)
    orphans = set(known) - {*benched, *between}
    assert not orphans, f"{len(orphans)} of {len(known)} entries are of no benched program, as {min(orphans)}"
    assert name not in WHOLE or set(benched) <= set(known)
    benched |= between
    for problem, entry in known.items():
        part = benched[problem]
        (first, *_) = tunings.ranked(part.engine, part.facts, device, heur_mode.A)
        assert (first.why, first.knobs) == (
            origin_text(entry),
            knobs_from_dict(part.engine, entry.knobs),
        )  # of its rows


def identity(problem: ProblemClass | TunedEntry) -> str:
    return json.dumps([problem.key, problem.rows], sort_keys=True)


def tuned_for(chip):
    """Graphs of what is tuned. Measured: the sizes of the cuDNN frontend's engine and of the other benches, in training
    both phases. Published: the first alone."""
    graphs = [problem.graph() for problem in sizes.seeds()]
    if chip == "sm_90":
        beside = (b for b in BENCHES.values() if b is not rmsnorm_silu.BENCH and b.name not in UNTUNED)
        graphs += [case.graph() for bench in beside for case in bench.cases]
        graphs += [case.inference_graph() for case in rmsnorm_training.BENCH.cases]
    return graphs


def may_be_tuned_for(chip):
    """Graphs of norms in a model, some of which have knobs of their own, and of benches that are tuned in part."""
    if chip != "sm_90":
        return []
    between = [chain_knobs.graph(case) for case in in_a_model.BENCH.cases]
    return between + [case.graph() for name in UNTUNED for case in BENCHES[name].cases]


def parts(graph, device, tunings=Tunings()):
    """Of the first plan."""
    lowered, known = lower(freeze(graph)), plugins.installed()
    regions, _ = plan.matches(lowered, known)
    return plan.propose(lowered, regions, known.engines, device, heur_mode.OPENSOURCE, tunings).plans[0].parts


def drawn(columns: int, activated: bool, written_out: bool):
    """RMSNorm, and SiLU: by their ops, or by the nodes that these are made of."""
    g = pygraph(intermediate_data_type=data_type.FLOAT)
    x = g.tensor([24960, columns], data_type=data_type.BFLOAT16)
    weight = g.tensor([1, columns], data_type=data_type.BFLOAT16)
    if written_out:
        mean = g.reduction(g.mul(x, x), mode=reduction_mode.AVG).set_dim([24960, 1])
        y = g.mul(weight, g.mul(x, g.rsqrt(g.add(mean, 1e-6))))
        y = g.mul(y, g.sigmoid(y)) if activated else y
    else:
        y, _ = g.rmsnorm(x, weight, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)
        y = g.swish(y) if activated else y
    y.set_output().set_data_type(data_type.BFLOAT16)
    return g


@pytest.mark.parametrize("activated", [False, True])
def test_nodes_that_are_written_out_have_the_entries_of_the_op(activated):
    tunings = store.tunings(engines.ALL, H200)
    (op,), (nodes,) = (parts(drawn(512, activated, written), H200, tunings) for written in (False, True))
    assert op.engine.problem(op.facts) == nodes.engine.problem(nodes.facts)
    assert (op.knobs, op.why) == (nodes.knobs, nodes.why)
    assert not activated or op.why.startswith("tuned on NVIDIA H200, measured")
    assert activated == (op.engine.problem(op.facts).key.get("functions") is True)


def test_a_problem_is_the_same_however_its_steps_are_spelled():
    """A copy more, a step less, other names: no better lowering loses its entries. Another reduction is another."""
    (part,) = parts(drawn(512, False, False), H200)
    facts, program = part.facts, part.facts.program
    key = part.engine.problem(facts).key
    (at,) = program.reductions(Join.SUM)
    scaled = replace(program.steps[-1], op_name="add")
    assert scaled != program.steps[-1]
    respelled = replace(facts, program=replace(program, steps=(*program.steps[:-1], scaled)))
    assert part.engine.problem(respelled).key == key
    largest = (*program.steps[:at], replace(program.steps[at], join=Join.MAX), *program.steps[at + 1 :])
    assert part.engine.problem(replace(facts, program=replace(program, steps=largest))).key != key


def test_the_sm100_table_is_the_translation_of_what_is_published():
    script = runpy.run_path(str(ROOT / "benchmarks" / "programs" / "published_sm100.py"))
    entries = store.parse(script["TABLE"].read_bytes())
    assert store.to_text([*script["translated"](entries)]) == script["TABLE"].read_text()
    assert {json.dumps(sorted(e.published)) for e in entries} == {
        json.dumps(["bytes_per_load", "ctas_per_sm", "split_columns", "variant", "warps_per_cta"])
    }


def test_planning_for_a_b200_uses_it_and_says_so():
    device = for_arch("sm_100a")
    tunings = store.tunings(plugins.installed().engines, device)
    (part,) = parts(sizes.Size(24960, 512, "nvfp4").graph(), device, tunings)
    assert part.why == "published for NVIDIA B200, not measured here"


BACKWARD = rmsnorm_backward.RmsNormBackwardCase(4096, 1024, "bf16")
(PART,) = parts(BACKWARD.graph(), H200)
# A CTA an SM, which takes row after row.
STAYING = [
    knobs
    for knobs in PART.engine.propose(PART.facts, H200, heur_mode.B)
    if knobs.threads_per_row == knobs.threads and knobs.ctas == H200.sm_count
]


def backward(rows, *tuned, device=H200):
    """The plan's part for other rows than BACKWARD's, with a table for `tuned` rows, and the knobs in it."""
    source, key = Source("measured", "NVIDIA H200", "sm_90", "2026-11-21"), PART.engine.problem(PART.facts).key
    knobs = dict(zip(tuned, STAYING, strict=False))
    table = (TunedEntry(source, PART.engine.name, key, r, knobs_to_dict(k), 10.0) for r, k in knobs.items())
    (part,) = parts(replace(BACKWARD, rows=rows).graph(), device, Tunings(first_party=tuple(table)))
    return part, knobs


@pytest.mark.parametrize(("rows", "near"), [(1024, 4096), (5000, 4096), (11585, 4096), (11586, 32768), (131072, 32768)])
def test_between_measured_rows_the_backward_takes_the_nearest(rows, near):
    part, tuned = backward(rows, 4096, 32768)
    assert part.knobs == tuned[near] and part.why == f"tuned on NVIDIA H200, measured 2026-11-21, for {near} rows"
    grid = part.engine.launch(part.facts, part.knobs).grid
    assert grid <= 132 and -(-rows // grid) == -(-rows // 132)  # no more rounds than with a CTA on each SM


def test_beyond_the_measured_rows_the_backward_has_its_own_knobs():
    for rows in (1, 1023, 131073):
        assert backward(rows, 4096, 32768)[0].why == "heuristic"


def test_a_grid_has_no_more_ctas_than_there_are_rows():
    part, tuned = backward(40, 80)
    assert part.knobs == tuned[80] and part.engine.launch(part.facts, part.knobs).grid == 40


def test_a_chip_of_fewer_sms_does_not_take_more_ctas_than_it_runs():
    """Of one architecture there are chips of several sizes, and the barrier of a grid needs all its CTAs running."""
    part, _ = backward(4096, 4096, device=replace(H200, sm_count=114))
    assert part.why == "heuristic" and part.knobs.ctas <= 114 * part.knobs.ctas_per_sm
