"""Bugs planted into the kernel of rows whose columns lie apart: tails, sums, what its groups tell each other."""

import re

import pytest

from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows.across import AcrossKnobs as Knobs
from support.bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, plant
from support.channels import Channels
from support.emulation import Planned, Varies
from support.graphs import FLOAT

pytestmark = pytest.mark.emulate

# A row of twelve chunks, of which some groups have two; CTAs of 64 rows, of which the last has too few.
GROUPS = Channels(3, 96, 40, output=FLOAT, training=True), Knobs(8, 8)
STEPS = Channels(3, 96, 40, output=FLOAT, training=True), Knobs(32, 4)
AGAIN = Channels(2, 712, 40, output=FLOAT, training=True), Knobs(32, 4)
PIECES = Channels(3, 24, 12, training=True), Knobs(32, 1)
_KERNEL, _HEADER = "across.cu", "graphfuse/across.cuh"
_READ = (_KERNEL, "reads[k] = Phase::read_rows(row, chunk * CHUNK + k);")
_COLUMN = (_KERNEL, "columns[k] = Phase<PHASE>::read_columns(row, chunk * CHUNK + k);")
_LATE = r"(heap-buffer-overflow|use-after-poison)[^$]*READ of size|SEGV"
_TOTALS = "#pragma unroll\n      for (int first = 0; first < PIECE; first += VECTOR) {\n        const Pack"
NOWHERE = ("", "")

BUGS = {
    "missing barrier before rows are joined": (
        GROUPS,
        Bug(
            "      barrier();\n#pragma unroll\n      for (int row = 0",
            "#pragma unroll\n      for (int row = 0",
            {RACE: "data race"},
            (_HEADER, "return shared.parts[FIRST][place];"),
        ),
    ),
    "missing barrier before totals are read": (
        GROUPS,
        Bug(
            "      barrier();\n" + _TOTALS,
            _TOTALS,
            {RACE: "data race"},
            (_HEADER, "shared.totals[row + thread] = over<0, 1>(row + thread);"),
        ),
    ),
    "chunk past the end of the row": (
        GROUPS,
        Bug("(TAILLESS || chunk < CHUNKS)", "(TAILLESS || chunk <= CHUNKS)", {ADDRESS: _LATE}, _COLUMN),
    ),
    "last chunk left out": (
        GROUPS,
        Bug("(TAILLESS || chunk < CHUNKS)", "(TAILLESS || chunk + 1 < CHUNKS)", {ADDRESS: WRONG}, NOWHERE),
    ),
    "rows past the last": (
        GROUPS,
        Bug("return row.exists && (", "return (", {ADDRESS: _LATE}, _READ),
    ),
    "values of rows past the last": (
        GROUPS,
        Bug(
            "thread == 0 && row.exists",
            "thread == 0",
            {ADDRESS: r"(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size"},
            ("graphfuse/rows.cuh", "store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece)"),
        ),
    ),
    "values of a row that all groups write": (
        GROUPS,
        Bug(
            "thread == 0 && row.exists",
            "row.exists",
            {RACE: "data race"},
            ("graphfuse/rows.cuh", "store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece)"),
        ),
    ),
    "halves of a chunk summed in one go": (
        GROUPS,
        Bug("            halves[sum][i] = 0.0f;\n", "", {ADDRESS: WRONG}, NOWHERE),
    ),
    "groups joined in another order": (
        GROUPS,
        Bug(
            "if constexpr (FIRST + STRIDE < GROUPS) {",
            "if constexpr (STRIDE == 1 && FIRST + 1 < GROUPS) {\n"
            "      return Join::join(shared.parts[FIRST][place], over<FIRST + 1, 1>(place));\n"
            "    } else if constexpr (FIRST + STRIDE < GROUPS) {",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "chunks of a thread joined in another order": (
        STEPS,
        Bug(
            "parts.sums[sum][k].add(i, gf::tree<gf::Add>(chunks[sum][k]));",
            "float in_turn = 0.0f;\n          for (float part : chunks[sum][k]) in_turn += part;\n"
            "          parts.sums[sum][k].add(i, in_turn);",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "passes joined in another order": (
        AGAIN,
        Bug("gf::Passes<gf::Add, PASSES>::place(i) : i", "Index(i) : i", {ADDRESS: WRONG}, NOWHERE),
    ),
    "pieces longer than they are aligned for": (
        PIECES,
        Bug(
            "gf::load<8, 8, ROW_READS>(gf::offset(row.i0, at * row.i0_apart))",
            "gf::load<8, 8, ROW_READS>(gf::offset(row.i0, at * row.i0_apart + (at == 3) * 2))",
            {ADDRESS: "load of 8 bytes at an address that is a multiple of 2"},
            ("generated.cuh", "gf::load<8, 8, ROW_READS>"),
        ),
    ),
}


def planned(case: Channels, knobs: Knobs) -> Planned:
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs)


def report(planned: Planned, build, source: str, expected: dict[str, bytes]) -> str:
    """What the lane says about a kernel; empty if it finds nothing."""
    try:
        return "" if planned.check(build, source) == expected else WRONG
    except KernelFaultError as fault:
        return str(fault)
    except Varies:
        return VARIES


@pytest.mark.some(6)
@pytest.mark.parametrize(("name", "build"), [(name, build) for name, (_, bug) in BUGS.items() for build in bug.found])
def test_in_the_kernel_across_rows(name, build):
    problem, bug = BUGS[name]
    right, problem = planned(*problem), planned(*problem)
    right.run()
    source = plant(problem.source, bug)
    files = {_KERNEL: template("graphfuse.engines.rows.across", _KERNEL)}
    (files["generated.cuh"],) = re.findall(r'#line 1 "generated.cuh"\n(.*?)#line', source, re.DOTALL)
    for header in ("across.cuh", "rows.cuh", "simt.cuh"):
        files[f"graphfuse/{header}"] = template("graphfuse.codegen.headers", header)
    assert_caught(bug, report(problem, build, source, right.contents()), build, files)


@pytest.mark.thorough
@pytest.mark.parametrize("problem", [GROUPS, STEPS, AGAIN, PIECES], ids=["groups", "steps", "again", "pieces"])
@pytest.mark.parametrize("build", [ADDRESS, RACE])
def test_without_a_bug_nothing_is_found(problem, build):
    right, problem = planned(*problem), planned(*problem)
    right.run()
    assert not report(problem, build, problem.source, right.contents())
