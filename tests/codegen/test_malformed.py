"""Checks of row programs and phase plans: nothing is found in those of any variant, planted faults are named."""

from dataclasses import replace

import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import MalformedError
from graphfuse.codegen import rowwise
from graphfuse.codegen.check_plan import check_plan
from graphfuse.engines.rows import RowEngine
from graphfuse.rows.check_program import check_program
from graphfuse.rows.program import ColumnSum, RowProgram
from graphfuse.rows.steps import Chain, Column, Join, Load, Number, Pick, Reduce, Step
from graphfuse.rows.views import Indexed, View
from support.variants import TARGETS, VARIANTS

H200 = TARGETS["sm_90a"]


def program(name: str) -> RowProgram:
    """Made anew: what a test plants in one stays in no other."""
    return replace(VARIANTS[name].facts().program)


def plan(name: str):
    """The plan that the kernel of a variant is printed from."""
    found, variant = [], VARIANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowwise, "_lines", lambda plan: found.append(plan) or iter(()))
        variant.engine.source(variant.facts(), variant.knobs_on(H200))
    return replace(found[0], program=replace(found[0].program))


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_found_in_what_is_made(name):
    check_program(VARIANTS[name].facts().program)
    check_plan(plan(name))


def with_step(p: RowProgram, k: int, step) -> RowProgram:
    return replace(p, steps=(*p.steps[:k], step, *p.steps[k + 1 :]))


def with_view(p: RowProgram, **fields) -> RowProgram:
    return replace(p, stores=(replace(p.stores[0], view=replace(p.stores[0].view, **fields)), *p.stores[1:]))


def first(p: RowProgram, kind: type) -> int:
    return next(k for k, step in enumerate(p.steps) if isinstance(step, kind))


def row_value(p: RowProgram) -> Chain:
    return Chain(first(p, Reduce))


INDEX = View(9, "numbers", data_type.FLOAT, (1,), 1, 16)
NORM, LOSS, SUMS = "silu 1024", "loss BFLOAT16 INT64", "backward 4096"

PROGRAMS = {
    "a value that is made later": (
        NORM,
        lambda p: with_step(p, 0, replace(p.steps[0], operands=(("a", Chain(3)), p.steps[0].operands[1]))),
        r"step 0 \(mul\), a reads value 3; accepted: values made before, of which there are 0",
    ),
    "an input that there is not": (
        NORM,
        lambda p: with_step(p, 0, replace(p.steps[0], operands=(p.steps[0].operands[0], ("b", Load(7))))),
        r"step 0 \(mul\), b reads input 7; accepted: one of the 2",
    ),
    "a store of a value that there is not": (
        NORM,
        lambda p: replace(p, stores=(replace(p.stores[0], value=Chain(len(p.steps))),)),
        r"store 0 \('out'\) reads value \d+",
    ),
    "an op without a scalar form": (
        NORM,
        lambda p: with_step(p, 0, replace(p.steps[0], op_name="rmsnorm")),
        r"step 0 \(rmsnorm\) is no pointwise op",
    ),
    "an operand too few": (
        NORM,
        lambda p: with_step(p, 0, replace(p.steps[0], operands=p.steps[0].operands[:1])),
        r"step 0 \(mul\) has operands \['a'\]; accepted: \['a', 'b'\]",
    ),
    "an attribute of another op": (
        NORM,
        lambda p: with_step(p, 0, replace(p.steps[0], attributes=(("swish_beta", 1.0),))),
        r"step 0 \(mul\) has attributes \['swish_beta'\]; accepted: \[\]",
    ),
    "a step that nobody reads": (
        NORM,
        lambda p: replace(p, steps=(*p.steps, Step("neg", (("input", Load(0)),)))),
        r"step \d+ \(neg\) is never read",
    ),
    "a reduction of what is reduced": (
        NORM,
        lambda p: replace(p, steps=(*p.steps, Reduce(Join.SUM, row_value(p)))),
        r"step \d+ \(row_sum\) reduces what has no columns",
    ),
    "a pick of a value that is worked out": (
        LOSS,
        lambda p: with_step(p, first(p, Pick), replace(p.steps[first(p, Pick)], input=Chain(0))),
        r"step \d+ \(row_element\) picks an element of what is not a plain input with columns",
    ),
    "a pick by numbers of columns": (
        LOSS,
        lambda p: with_step(p, first(p, Pick), replace(p.steps[first(p, Pick)], column=Column())),
        r"step \d+ \(row_element\) picks by a number of which there is one a column",
    ),
    "a row's value in every column": (
        NORM,
        lambda p: replace(
            p,
            steps=(*p.steps, Step("add", (("a", row_value(p)), ("b", Number(0.0))))),
            stores=(*p.stores, replace(p.stores[0], value=Chain(len(p.steps)))),
        ),
        r"store 1 \('out'\) writes a value without columns to a tensor with columns",
    ),
    "a column's value in one place": (
        NORM,
        lambda p: with_view(p, columns=False),
        r"store 0 \('out'\) writes a value with columns to a tensor without columns",
    ),
    "blocks without scales": (
        NORM,
        lambda p: replace(p, stores=(replace(p.stores[0], block_size=16),)),
        r"store 0 \('out'\) has blocks of 16 elements and its scales in None, None",
    ),
    "a largest magnitude of each row": (
        NORM,
        lambda p: replace(p, stores=(replace(p.stores[0], amax=True),)),
        r"store 0 \('out'\) is a largest magnitude; accepted: one element",
    ),
    "a late store that there is not": (
        NORM,
        lambda p: replace(p, late=frozenset({4})),
        "store 4 is late and does not exist",
    ),
    "a tensor of other axes": (
        NORM,
        lambda p: with_view(p, row_strides=(1, 2)),
        r"views have \[1, 2\] row axes; accepted: one number",
    ),
    "rows chosen by an index that there is not": (
        NORM,
        lambda p: with_view(p, place=Indexed(0, 1, 1)),
        r"view 'out' is chosen by index 0 of 0",
    ),
    "an index that is no integer": (
        NORM,
        lambda p: replace(p, indices=(INDEX,)),
        r"index 'numbers' is not one integer a row",
    ),
    "a sum over rows of what has no columns": (
        SUMS,
        lambda p: replace(p, sums=(ColumnSum(p.sums[0].view, (row_value(p),)),)),
        r"sum 0 \('\w+'\) adds up Chain\(index=\d+\); accepted: values and inputs with columns",
    ),
    "a sum over rows of three factors": (
        SUMS,
        lambda p: replace(p, sums=(ColumnSum(p.sums[0].view, p.sums[0].factors + (Load(0),)),)),
        r"sum 0 \('\w+'\) has 3 factors; accepted: 1 or 2",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_breaks_a_rule_is_named(name):
    variant, broken, fault = PROGRAMS[name]
    check_program(program(variant))
    with pytest.raises(MalformedError, match=f"row program: (.*; )?{fault}"):
        check_program(broken(program(variant)))


def derived(made, **found):
    """A program or a plan that works out something else than it should."""
    made.__dict__.update(found)
    return made


def shifted(values: tuple[int, ...], k: int, by: int) -> tuple[int, ...]:
    return (*values[:k], values[k] + by, *values[k + 1 :])


def late(p, k: int):
    return derived(p.program, known=shifted(p.program.known, k, 1)) and p


PLANS = {
    "no elements a piece": (NORM, lambda p: replace(p, piece=0), "piece is 0; accepted: 1 and more"),
    "extents of other axes": (
        NORM,
        lambda p: replace(p, extents=(2, 3)),
        r"row extents are \[2, 3\], and not one for each",
    ),
    "copies of rows that lie across": (
        NORM,
        lambda p: replace(p, across=True, stages=2),
        "rows lie across pieces and are copied in 2 stages",
    ),
    "a value that is kept and never made": (
        NORM,
        lambda p: derived(p, kept=((), (*p.kept[1], Chain(len(p.program.steps) - 1)))),
        r"phase 1 keeps value \d+, which phase 0 does not have",
    ),
    "a row's value that is kept of each element": (
        NORM,
        lambda p: derived(p, kept=((), (*p.kept[1], row_value(p.program)))),
        r"phase 1 keeps value \d+, of which there is not one an element",
    ),
    "an input that is used and not read": (
        NORM,
        lambda p: derived(p, _reads=((), *p._reads[1:])),
        "phase 0 uses input 0 and neither reads nor keeps it",
    ),
    "a value that is kept no longer": (
        NORM,
        lambda p: derived(p, _elements=p._elements, _reads=p._reads, kept=((), ())),
        "phase 1 uses input 0 and neither reads nor keeps it",
    ),
    "values in another order": (
        NORM,
        lambda p: derived(p, _elements=tuple(found[::-1] for found in p._elements)),
        r"phase 1 makes value \d+ before value \d+",
    ),
    "a value that a phase lacks": (
        NORM,
        lambda p: derived(p, _elements=(p._elements[0], p._elements[1][:-1])),
        r"phase 1 stores, reduces or sums value \d+, which it does not have",
    ),
    "a reduction that is known too early": (
        NORM,
        lambda p: derived(p.program, known=shifted(p.program.known, row_value(p.program).index, -1)) and p,
        r"value \d+ is reduced after phases \[0\] and known in phase 0",
    ),
    "a row's value that is known too late": (
        NORM,
        lambda p: late(p, next(k for k, s in enumerate(p.program.steps) if s.op_name == "rsqrt")),
        r"phase 1 makes value \d+ of value \d+, known in phase 2",
    ),
    "a row's value before what it is made of": (
        NORM,
        lambda p: late(p, next(k for k, s in enumerate(p.program.steps) if s.op_name == "fma")),
        r"value \d+ is known before value \d+, which it is made of",
    ),
    "a store in no phase": (
        NORM,
        lambda p: derived(p.program, phase=shifted(p.program.phase, p.program.stores[0].value.index, 1)) and p,
        r"store 0 \('out'\) is written in 0 phases",
    ),
    "a sum in no phase": (
        SUMS,
        lambda p: derived(p.program, phase=tuple(k + 9 for k in p.program.phase)) and p,
        r"sum 0 \('\w+'\) is added to in 0 phases",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_breaks_a_rule_is_named(name):
    variant, broken, fault = PLANS[name]
    check_plan(plan(variant))
    with pytest.raises(MalformedError, match=f"phase plan: (.*; )?{fault}"):
        check_plan(broken(plan(variant)))


def test_both_are_checked_under_the_setting_alone(monkeypatch):
    """Programs before an engine reads them, plans before a kernel is printed."""
    facts = VARIANTS[NORM].facts()
    broken = replace(facts, program=replace(facts.program, late=frozenset({4})))
    wrong = derived(plan(NORM), _reads=((), ()))
    monkeypatch.setenv("GRAPHFUSE_VERIFY", "on")
    with pytest.raises(MalformedError, match="store 4 is late"):
        RowEngine().why_not(broken, H200)
    with pytest.raises(MalformedError, match="phase plan: "):
        rowwise.source(wrong, "GF_KERNEL(THREADS)")
    monkeypatch.delenv("GRAPHFUSE_VERIFY")
    assert RowEngine().why_not(broken, H200) is None
