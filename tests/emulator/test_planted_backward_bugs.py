"""Bugs planted into the backward kernel, in what it does as no other: copies ahead, CTAs that stay and meet."""

import pytest

from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows.persistent import PersistentKnobs
from support.bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, plant
from support.emulation import Planned, Varies
from support.gradients import Gradient

pytestmark = pytest.mark.emulate

# Rows of two warps, two of them a CTA.
CASE = Gradient(11, 520, activation="silu", residual=True, dbias=True)
ROUNDS = CASE, PersistentKnobs(64, 128, 3, 1, 2)  # three of two CTAs
SLABS = CASE, PersistentKnobs(64, 128, 3, 1, 40)  # one round, in the first stage; several for each CTA to add up
LINES = Gradient(11, 512, activation="silu", residual=True, dbias=True), PersistentKnobs(64, 128, 3, 1, 40)
DELAYED = Gradient(11, 520, residual=True), PersistentKnobs(64, 128, 3, 1, 2, delay=1)
DELAYED_CLUSTERS = Gradient(11, 520, residual=True), PersistentKnobs(128, 64, 3, 1, 4, delay=1)
_KERNEL = "persistent.cu"
_READ = ("graphfuse/simt.cuh", "__builtin_memcpy(&pack, address, WIDTH)")
_WAIT = "gf::async_wait<AHEAD_OF_ROW - 1>();"

BUGS = {
    "missing grid barrier": (
        SLABS,
        Bug(
            "gf::grid_barrier();",
            "",
            {RACE: "data race"},
            ("graphfuse/simt.cuh", "__builtin_memcpy(&pack, address, WIDTH)"),
        ),
    ),
    "missing wait for copies": (ROUNDS, Bug(_WAIT, "", {ADDRESS: "use-after-poison"}, _READ)),
    "a wait for one row too few": (
        ROUNDS,
        Bug(_WAIT, "gf::async_wait<AHEAD_OF_ROW>();", {ADDRESS: "use-after-poison", RACE: "data race"}, _READ),
    ),
    "a copy into the stage that is read": (
        ROUNDS,
        Bug(
            "AHEAD_OF_ROW * together, read[0]);",
            "AHEAD_OF_ROW * together, stage);",
            {ADDRESS: "use-after-poison|in use by another copy"},
            _READ,
        ),
    ),
    "one buffer for the sums of all rows": (
        ROUNDS,
        Bug(
            "RowSum{sums[sum_turn % 2]}",
            "RowSum{sums[0]}",
            {RACE: "data race"},
            ("graphfuse/reduce.cuh", "shared.totals[i * THREADS + thread] = parts[i / COUNT][i % COUNT];"),
        ),
    ),
    "missing barrier before the sums of a CTA": (
        SLABS,
        Bug(
            "gf::barrier();  // all have read what was in shared memory",
            "",
            {RACE: "data race"},
            _READ,
        ),
    ),
    "missing barrier between slabs": (
        SLABS,
        Bug(
            "gf::barrier();  // the slab before has been read",
            "",
            {RACE: "data race"},
            ("graphfuse/simt.cuh", "__builtin_memcpy(address, &pack, WIDTH)"),
        ),
    ),
    "partial sums given up that another CTA reads": (
        LINES,
        Bug(
            "gf::discard(totals.partials + which * apart + begin + line + i * COLUMNS);",
            "gf::discard(totals.partials + which * apart + (begin + SLAB) % COLUMNS + line + i * COLUMNS);",
            {RACE: "data race"},
            ("graphfuse/simt.cuh", "__builtin_memcpy(address, &pack, WIDTH)"),
        ),
    ),
    "sums of a row that does not exist": (
        ROUNDS,
        Bug(
            "i64 used = (rows + ROWS_PER_CTA - 1) / ROWS_PER_CTA;",
            "i64 used = (rows + ROWS_PER_CTA - 1) / ROWS_PER_CTA - 5;",
            {ADDRESS: WRONG},
            ("", ""),
        ),
    ),
    "missing barrier between the rounds of delayed sums": (
        DELAYED,
        Bug("reduction.wait(turn - 1);", "", {RACE: "data race"}, ("graphfuse/reduce.cuh", "over_ctas[cta] = ")),
    ),
    "missing wait for the delayed sums of other CTAs": (
        DELAYED_CLUSTERS,
        Bug(
            "reduction.wait(turn - 1);",
            "",
            {ADDRESS: "use-after-poison|unknown-crash"},
            ("graphfuse/reduce.cuh", "over_ctas[cta] = "),
        ),
    ),
    "delayed sums of all rows in one place": (
        DELAYED_CLUSTERS,
        Bug(
            "float (&parts)[VALUES][1], u32 row) const {\n    auto& mine = shared[row % 2];",
            "float (&parts)[VALUES][1], u32 row) const {\n    auto& mine = shared[0];",
            {ADDRESS: "deadlock|use-after-poison|unknown-crash|in use by another|arrivals of the phase have come"},
            ("graphfuse/reduce.cuh", "over_ctas[cta] = "),
        ),
    ),
}


def planned(case: Gradient, knobs: PersistentKnobs) -> Planned:
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs)


@pytest.mark.some(6)
@pytest.mark.parametrize(("name", "build"), [(name, build) for name, (_, bug) in BUGS.items() for build in bug.found])
def test_in_the_backward_kernel(name, build):
    problem, bug = BUGS[name]
    right, problem = planned(*problem), planned(*problem)
    right.run()
    try:
        found = problem.check(build, plant(problem.source, bug))
        report = "" if found == right.contents() else WRONG
    except KernelFaultError as fault:
        report = str(fault)
    except Varies:
        report = VARIES
    files = {_KERNEL: template("graphfuse.engines.rows.persistent", _KERNEL)}
    for header in ("reduce.cuh", "simt.cuh"):
        files[f"graphfuse/{header}"] = template("graphfuse.codegen.headers", header)
    assert_caught(bug, report, build, files)
