"""Bugs planted into how kernels on several ranks meet: each is caught, and caught as what it is."""

import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows.by_row import ByRowKnobs
from support.bugs import ADDRESS, RACE, WRONG, Bug, assert_caught, each, plant
from support.gathered_rows import GatheredRows
from support.sums_over_ranks import MEETS, REWRITES, SumOverRanks, Wrong

pytestmark = pytest.mark.emulate

NOWHERE = ("", "")
# Buffers take turns: what a call writes, peers read in the next.
TURNS = SumOverRanks(rows=9, knobs=ByRowKnobs(8, 32))
REWRITTEN = SumOverRanks(rows=9, out=data_type.FP8_E4M3, knobs=ByRowKnobs(8, 32), rewritten=True)
FOUR = SumOverRanks(ranks=4, rows=3, calls=2, out=data_type.FP8_E4M3, knobs=ByRowKnobs(8, 32))
GATHERED = GatheredRows(rows=9, knobs=ByRowKnobs(8, 32))
TOUCHED = GatheredRows(rows=9, knobs=ByRowKnobs(8, 32), touched=True, calls=2)
_READ = ("by_row.cu", "reads[step] = Phase::read_rows(row, at);")
_TOUCHES = ("by_row.cu", "gf::store<16, 16>(const_cast<void*>(row.i0)")
_ENDS = ("graphfuse/ranks.cuh", "    store_pack<4>(mine(")
_SPINS = ("graphfuse/ranks.cuh", "      spin();")
_RACE = "data race"
_STUCK = "deadlock: no thread can go on[^$]*of rank 1"

BUGS = {
    "no wait for peers that have not begun": (
        TURNS,
        Bug("      await(Signal::BEGUN);\n", "", {RACE: _RACE}, _READ),
    ),
    "threads that do not wait for those that met": (
        TURNS,
        Bug(
            "await(Signal::BEGUN);\n    }\n    barrier();",
            "await(Signal::BEGUN);\n    }",
            {ADDRESS: WRONG, RACE: _RACE},
            _READ,
        ),
    ),
    "no wait for peers that still read": (
        REWRITTEN,
        Bug("    await(Signal::DONE);\n", "", {RACE: "deadlock"}, _SPINS),
    ),
    "peers told before all threads have read": (
        REWRITTEN,
        Bug(
            "  GF_DEVICE bool done() const {\n    barrier();\n",
            "  GF_DEVICE bool done() const {\n",
            {RACE: _RACE},
            _READ,
        ),
    ),
    "peers told by the first CTA that has read": (
        REWRITTEN,
        Bug("!meets || atomic_add_acq_rel(mine(Signal::CTAS), 1u) + 1 < grid_size()", "!meets", {RACE: _RACE}, _ENDS),
    ),
    "peers told without what other CTAs have read": (
        REWRITTEN,
        Bug("value, __ATOMIC_ACQ_REL)", "value, __ATOMIC_RELEASE)", {RACE: _RACE}, _ENDS),
    ),
    "a call that has the number of the one before": (
        TURNS,
        Bug(
            "    store_pack<4>(mine(Signal::CALLS), {{call}});\n",
            "",
            {ADDRESS: WRONG, RACE: _RACE},
            _READ,
        ),
    ),
    "readers of the call before that count": (
        TURNS,
        Bug("    store_pack<4>(mine(Signal::CTAS), {{0}});\n", "", {ADDRESS: _STUCK}, _SPINS),
    ),
    "a signal that releases nothing": (
        REWRITTEN,
        Bug(
            "__atomic_store_n(address, value, __ATOMIC_RELEASE)",
            "__atomic_store_n(address, value, __ATOMIC_RELAXED)",
            {RACE: _RACE},
            _READ,
        ),
    ),
    "a signal that is awaited for ever": (
        TURNS,
        Bug(
            "    store_release_system(their(Signal::DONE), call);\n",
            "",
            {ADDRESS: _STUCK},
            _SPINS,
        ),
    ),
    "ranks added up from one's own on": (
        FOUR,
        Bug(
            "return address(other) - address(rank);",
            "return address((other + rank) % SIZE) - address(rank);",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "rows written to peers that have not begun": (
        TOUCHED,
        Bug("      await(Signal::BEGUN);\n", "", {RACE: "deadlock"}, _SPINS),
    ),
    "peers told before all threads have written": (
        TOUCHED,
        Bug(
            "  GF_DEVICE bool done() const {\n    barrier();\n",
            "  GF_DEVICE bool done() const {\n",
            {RACE: _RACE},
            _TOUCHES,
        ),
    ),
    "no wait for peers that still write": (
        TOUCHED,
        Bug("    await(Signal::DONE);\n", "", {RACE: "deadlock"}, _SPINS),
    ),
    "peers told before rows are written": (
        TOUCHED,
        Bug("RANKS_LAST == 0", "RANKS_LAST >= 0", {RACE: _RACE}, _TOUCHES),
    ),
    "rows written to one's own memory alone": (
        GATHERED,
        Bug("return address(other) - address(rank);", "return 0 * address(other);", {ADDRESS: WRONG}, NOWHERE),
    ),
}


@pytest.mark.parametrize(("name", "build"), each(BUGS))
def test_in_sums_over_ranks(name, build):
    case, bug = BUGS[name]
    text = template("graphfuse.engines.rows.by_row", "by_row.cu")
    files = {"by_row.cu": text.replace(MEETS, REWRITES + MEETS) if REWRITES in case.source else text}
    files["graphfuse/ranks.cuh"] = template("graphfuse.codegen.headers", "ranks.cuh")
    assert_caught(bug, _caught(case, plant(case.source, bug), build), build, files)


def _caught(case: SumOverRanks, source: str, build) -> str:
    try:
        case.hold(build, source)
    except KernelFaultError as fault:
        return str(fault)
    except Wrong:
        return WRONG
    return ""
