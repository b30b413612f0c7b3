"""Bugs planted into the exchange of pairs and into rows that are chosen by number: they are seen."""

import re

import pytest

from graphfuse.base.errors import KernelFaultError
from graphfuse.engines.rows.persistent import PersistentKnobs
from support.bugs import ADDRESS, WRONG, Bug, plant
from support.emulation import Planned, Varies
from support.rotary import Rotary
from support.rotary_gradient import RotaryGradient

pytestmark = pytest.mark.emulate

NOWHERE = ("", "")
HALVES, PART = Rotary(slots=9), Rotary(columns=80, rotary=32, interleaved=True, beyond=True)
BACK = RotaryGradient(tokens=9)
OUTSIDE = "AddressSanitizer|SUMMARY|load of|store of"
BUGS = {
    "the sign of the wrong half": (HALVES, Bug("first ? -other :", "!first ? -other :", {ADDRESS: WRONG}, NOWHERE)),
    "another lane": (
        HALVES,
        Bug("shuffle_xor(values[i], PIECES)", "shuffle_xor(values[i], 1)", {ADDRESS: WRONG}, NOWHERE),
    ),
    "cosines behind the pairs": (
        PART,
        Bug("gf::filled<float, 4>((0x1.0", "gf::filled<float, 4>((0x0.0", {ADDRESS: WRONG}, NOWHERE),
    ),
    "a number beyond the table": (
        PART,
        Bug("u64(row.n0) < gf::u64(", "i64(row.n0) < gf::i64(", {ADDRESS: OUTSIDE}, NOWHERE),
    ),
    "a number beyond the cache": (
        HALVES,
        Bug("gf::u64(row.n1) < gf::u64(a.o1_count)", "row.n1 >= 0", {ADDRESS: OUTSIDE}, NOWHERE),
    ),
    "rows whose number is not read": (
        BACK,
        Bug("    locate(row, a, next + group, stage, own);\n", "", {ADDRESS: WRONG}, NOWHERE),
    ),
    "a number in shared memory that is read as global": (
        BACK,
        Bug("gf::integer<gf::Access::USUAL>(", "gf::integer(", {ADDRESS: "load of 8 bytes of shared memory"}, NOWHERE),
        PersistentKnobs(16, 128, 2, 1, 1),
    ),
    "sums of rows that are not there": (
        BACK,
        Bug("if (row.exists && in_row(row.thread + at)) {", "if (true) {", {ADDRESS: f"{OUTSIDE}|{WRONG}"}, NOWHERE),
    ),
    "keys of the first head": (
        HALVES,
        Bug("(gf::u32(axis1) - a.i0_1_first)", "gf::u32(axis1)", {ADDRESS: f"{OUTSIDE}|{WRONG}"}, NOWHERE),
    ),
}
"""By name, with what is found: another result, or an access that no tensor has; knobs where rows are copied ahead."""


@pytest.mark.some(4)
@pytest.mark.parametrize("name", BUGS)
def test_is_seen(name):
    case, bug, *knobs = BUGS[name]
    right, problem = (Planned(case.graph("emulator"), case.inputs() | case.outputs(), *knobs) for _ in range(2))
    right.run()
    try:
        found = problem.check(ADDRESS, plant(problem.source, bug))
        report = "" if found == right.contents() else WRONG
    except (KernelFaultError, Varies) as fault:
        report = str(fault)
    assert re.search(bug.found[ADDRESS], report), report
