"""Every kernel variant on the emulator under sanitizers, in all schedules: nothing is found, and what comes
out is right.

AddressSanitizer and UndefinedBehaviorSanitizer see all variants, ThreadSanitizer those that
differ in how threads meet or in what they share.
"""

import dataclasses
import functools

import pytest

from graphfuse.base.device import EMULATOR
from graphfuse.base.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import graphs
from support.emulation import Planned
from support.variants import VARIANTS, Variant, cases

pytestmark = pytest.mark.emulate

SMALL = {name: v for name, v in VARIANTS.items() if v.small}


def planned(variant: Variant, rows: int) -> Planned:
    """A variant with a number of rows."""
    case = dataclasses.replace(variant.problem, rows=rows)
    knobs = variant.knobs_on(EMULATOR)
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs, variant.engine.name)


@functools.cache
def rows_of(name: str) -> tuple[int, ...]:
    """Of long rows two, of which each has CTAs of its own: such a row takes AddressSanitizer a second. Of the longest,
    which take several, one."""
    columns = VARIANTS[name].problem.columns
    return (1,) if columns > 1 << 16 else (2,) if columns > 1 << 14 else VARIANTS[name].row_counts(EMULATOR)


def clean(problem: Planned, build: Build) -> None:
    """Nothing is found, and every byte is what a run without sanitizers leaves."""
    found = problem.check(build)
    problem.run()
    assert_same(found, problem.contents())


def assert_same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    for name, content in wanted.items():
        assert found[name] == content, name


@pytest.mark.parametrize("name", cases(SMALL))
def test_addresses(name):
    for rows in rows_of(name):
        problem = planned(SMALL[name], rows)
        problem.keep(problem.check(Build.ADDRESS))
        outputs = dataclasses.replace(SMALL[name].problem, rows=rows).outputs()
        SMALL[name].hold(rows, problem.pack, {n: problem.pack[n] for n in outputs})


# The knobs that spread rows over lanes, warps and CTAs; blocks, whose scales lanes agree on; the rest of the code once.
SHARING = [name for name in SMALL if " a row" in name or "blocks in" in name]
SHARING += ["three blocks", "nvfp4 rows apart", "odd columns", "scalars in half", "long e5m2"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHARING)
def test_races(name):
    """Of as many rows as fill a CTA and begin another: a thread takes ThreadSanitizer most of a millisecond to make."""
    knobs = SMALL[name].knobs_on(EMULATOR)
    clean(planned(SMALL[name], max(1, knobs.threads // knobs.threads_per_row) + 1), Build.RACE)


def all_knobs(variant: Variant) -> list[ByRowKnobs]:
    """Every legal number of threads a row with every number of chunks, each with some size of a CTA, and every
    legal number of threads a row and a CTA, each with some number of chunks."""
    powers, facts = range(11), variant.facts()
    every = [ByRowKnobs(1 << t, 1 << c, n) for t in powers for c in powers[5:] for n in (1, 2, 4)]
    found: dict[tuple, ByRowKnobs] = {}
    for knobs in every:
        if RowEngine().illegal(facts, knobs, EMULATOR) is None:
            found.setdefault((knobs.threads_per_row, "chunks", knobs.chunks), knobs)
            found.setdefault((knobs.threads_per_row, "threads", knobs.threads), knobs)
    return list(dict.fromkeys(found.values()))


KNOBS = {
    f"{columns} {output.name} {knobs.chunks} x {knobs.threads_per_row} of {knobs.threads}": (columns, output, knobs)
    for columns, output in ((992, data_type.BFLOAT16), (64, data_type.FP4_E2M1))
    for knobs in all_knobs(Variant(graphs.Norm(1, columns, output=output, blocks=output is data_type.FP4_E2M1)))
}


@pytest.mark.thorough
@pytest.mark.parametrize(("columns", "output", "knobs"), KNOBS.values(), ids=KNOBS)
def test_all_knobs(columns, output, knobs):
    """Nothing is found, and every byte is what the first choice of knobs leaves in a run without sanitizers."""
    case = graphs.Norm(5, columns, output=output, blocks=output is data_type.FP4_E2M1)
    assert_same(planned(Variant(case, knobs), 5).check(Build.ADDRESS), first_choice(case))


@functools.cache
def first_choice(case: graphs.Norm) -> dict[str, bytes]:
    problem = planned(Variant(case), case.rows)
    problem.run()
    return problem.contents()


IN_PLACE = {
    "held": (1000, ByRowKnobs(128, 128)),
    "held by a cluster": (4096, ByRowKnobs(256, 64)),
    "read again": (40960, ByRowKnobs(1024, 1024)),
}


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
@pytest.mark.parametrize(("columns", "knobs"), IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(columns, knobs, build):
    variant = Variant(graphs.Norm(2, columns, graphs.FLOAT, output=graphs.FLOAT), knobs)
    apart, same = planned(variant, 2), planned(variant, 2)
    apart.run()
    same.pack["out"] = same.pack["x"]
    assert same.check(build)["out"] == apart.contents()["out"]
