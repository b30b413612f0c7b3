"""The list of kernel variants covers what changes a kernel's code; each can be planned by the public API."""

import re

import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.ops import OPS
from graphfuse.runtime.handle import Handle
from support import variants
from support.variants import ACROSS, BACKWARD, FIRST, FORWARD, LOSSES, OVER_GRID, TARGETS, VARIANTS

H200 = TARGETS["sm_90a"]
FACTS = [v.facts() for v in FORWARD.values()]
FLOATS = {data_type.FLOAT, data_type.HALF, data_type.BFLOAT16}


def test_every_type_in_every_role():
    programs = [f.program for f in FACTS]
    rows = {view.dtype for p in programs for view in p.inputs if view.rows}
    columns = {view.dtype for p in programs for view in p.inputs if not view.rows}
    assert rows == columns == FLOATS
    outputs = FLOATS | {data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1}
    assert {(p.inputs[0].dtype, p.stores[-1].view.dtype) for p in programs} >= {(x, y) for x in FLOATS for y in outputs}
    assert {None if s.by_value else s.dtype for p in programs for s in p.scalars} == FLOATS | {None}


def test_every_type_of_logits_and_targets_both_ways():
    programs = [v.facts().program for v in LOSSES.values()]
    types = {
        (frozenset(view.dtype for view in p.inputs if view.columns), view.dtype, bool(p.last))
        for p in programs
        for view in p.inputs
        if not view.columns
    }
    integers = (data_type.INT32, data_type.INT64)
    assert types >= {(frozenset({x}), t, forward) for x in FLOATS for t in integers for forward in (True, False)}


def test_every_pointwise_op():
    used = {step.op_name for v in VARIANTS.values() for step in v.facts().program.steps} & OPS.keys()
    assert used == {op.name for op in OPS.values() if op.pointwise}


def test_the_first_variants_have_every_type_op_and_schedule():
    assert len(FIRST) <= len(VARIANTS) // 2
    assert all(FIRST & kind.keys() for kind in (FORWARD, BACKWARD, LOSSES, ACROSS, OVER_GRID))
    first, every = ([v.facts().program for n, v in VARIANTS.items() if n in names] for names in (FIRST, VARIANTS))
    for types_of in (
        lambda p: {view.dtype for view in p.inputs if view.rows},
        lambda p: {view.dtype for view in p.inputs if not view.rows},
        lambda p: {store.view.dtype for store in p.stores},
        lambda p: {scalar.dtype for scalar in p.scalars},
        lambda p: {step.op_name for step in p.steps},
    ):
        assert set().union(*map(types_of, first)) == set().union(*map(types_of, every))
    spread = [{k for n in names if (k := _spread(n))} for names in (FIRST & FORWARD.keys(), FORWARD)]
    assert spread[0] == spread[1]


def _spread(name: str) -> tuple | None:
    """How the knobs of a variant that has some spread rows."""
    knobs = VARIANTS[name].knobs
    return knobs and (type(knobs).__name__, knobs.threads_per_row)


@pytest.mark.parametrize("access, widths", [("load<", {2, 4, 8, 16}), ("store_", {1, 2, 4, 8, 16})])
def test_every_access_width(access, widths):
    found = re.compile(rf"gf::{access}[^()]*?(\d+)(?:, (?:ROW|COLUMN)_\w+)?(?:, gf::Scales\w+)?>\(").findall
    assert {
        int(width) for v in FORWARD.values() for width in found(v.source(H200).split("namespace problem")[1])
    } >= widths


def test_every_way_of_spreading_rows():
    knobs = [v.knobs_on(H200) for v in FORWARD.values()]
    assert {k.threads_per_row for k in knobs} >= {1 << power for power in range(11)}
    assert {k.cluster > 1 for k in knobs} == {True, False}
    assert {k.threads for k in knobs} >= {32, 128, 256, 512, 1024}
    for warps in (range(2), range(2, 9), range(9, 33)):  # no barrier, one, two
        chosen = [k for k in knobs if k.threads_per_row // 32 in warps]
        assert {k.threads > k.threads_per_row for k in chosen} == {True, False}
        assert {k.chunks for k in chosen} == {1, 2, 4}
        assert {k.chunks for k in chosen if k.threads > k.threads_per_row} >= {1, 2}


def test_every_number_of_lanes_that_share_a_block():
    quantized = [(v.facts().program, v.knobs_on(H200)) for v in FORWARD.values()]
    lanes = {
        (p.inputs[0].dtype, s.block_size // (8 * k.chunks)) for p, k in quantized for s in p.stores if s.block_size
    }
    assert lanes >= {(x, n) for x in FLOATS for n in (1, 2)}


@pytest.mark.parametrize("name", VARIANTS)
def test_planned_by_the_public_api(name):
    variant = VARIANTS[name]
    counts = variant.row_counts(H200)
    knobs = variant.knobs_on(H200)
    assert counts[0] == 1
    launches = [variant.engine.launch(variant.facts(rows), knobs) for rows in counts]
    assert [one.grid for one in launches] == [variant.ctas(n, knobs) for n in counts]
    graph = variant.problem.graph()
    graph.handle = Handle(H200)  # planning needs no GPU
    graph.validate()
    graph.build_operation_graph()
    index = graph.create_execution_plan(variant.engine.name, knobs_to_dict(knobs))
    assert graph.get_engine_and_knobs_at_index(index) == (variant.engine.name, knobs_to_dict(knobs))
    assert graph.get_workspace_size_plan_at_index(index) == launches[0].scratch_bytes


@pytest.mark.further
def test_rows_do_not_change_the_source():
    for variant in VARIANTS.values():
        knobs = variant.knobs_on(H200)
        sources = {variant.engine.source(variant.facts(rows), knobs) for rows in (variant.problem.rows, 2, 1000)}
        assert sources == {variant.source(H200)}


@pytest.mark.further
@pytest.mark.xdist_group("digest")
def test_the_digest_is_of_sources_alone(monkeypatch):
    digest = variants.digest()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    renamed = {f"again {name}": v for name, v in reversed(VARIANTS.items())} | {"twice": VARIANTS["every op"]}
    monkeypatch.setattr(variants, "VARIANTS", renamed)
    assert variants.digest() == digest
    monkeypatch.setattr(variants, "VARIANTS", {n: v for n, v in VARIANTS.items() if n != "every op"})
    assert variants.digest() != digest
