"""Bugs planted into the kernel of rows that many CTAs share: what these tell each other, and the order of sums."""

import pytest

from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows.over_grid import OverGridKnobs as Knobs
from support.bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, plant
from support.emulation import Planned, Varies
from support.graphs import FLOAT, Norm
from support.row_functions import RowFunction

pytestmark = pytest.mark.emulate

# Rows of which the last threads have a piece less; three phases, of a maximum and a sum, or of two sums.
HELD = RowFunction("softmax", 2, 1500, FLOAT, FLOAT), Knobs(4, 64)
SUMS = RowFunction("layer norm", 2, 1500, FLOAT, FLOAT), Knobs(4, 64)
AGAIN = Norm(40, 3000, FLOAT, FLOAT, FLOAT, training=True), Knobs(2, 32, 32)
_KERNEL, _HEADER = "over_grid.cu", "graphfuse/grid_reduce.cuh"
_LEFT = "part[round] = as_float(load_pack<4, Access::USUAL>(left).word[0]);"
_READ = "#pragma unroll\n    for (int value = 0; value < VALUES; ++value) {\n      float part[READERS]"
NOWHERE = ("", "")

BUGS = {
    "missing grid barrier": (
        HELD,
        Bug("  gf::grid_barrier();\n", "", {RACE: "data race", ADDRESS: f"{WRONG}|{VARIES}"}, (_HEADER, _LEFT)),
    ),
    "one place in memory for all phases": (
        SUMS,
        Bug("memory + PHASE % 2 * LEFT", "memory", {RACE: "data race"}, (_HEADER, "store_pack<4>(memory + value")),
    ),
    "missing barrier before warps are joined": (
        HELD,
        Bug(
            "    barrier();\n#pragma unroll\n    for (int first = 0; first < VALUES",
            "#pragma unroll\n    for (int first = 0; first < VALUES",
            {RACE: "data race"},
            (_HEADER, "part[warp] = shared.left["),
        ),
    ),
    "missing barrier before all warps read": (
        HELD,
        Bug(
            "    barrier();\n" + _READ,
            _READ,
            {RACE: "data race"},
            (_HEADER, "part[reader] = shared.collected["),
        ),
    ),
    "rows that leave what they have in one place": (
        HELD,
        Bug("i64(index) * 2 * LEFT", "i64(0)", {RACE: "data race"}, (_HEADER, "store_pack<4>(memory + value")),
    ),
    "memory for half of the rows": (
        HELD,
        Bug(
            "i64(index) * 2 * LEFT",
            "i64(index) * 4 * LEFT",
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size 4"},
            ("graphfuse/simt.cuh", "__builtin_memcpy(address, &pack, WIDTH);"),
        ),
    ),
    "threads numbered by CTAs": (
        SUMS,
        Bug(
            "(gf::thread_index() / gf::WARP * CTAS_PER_ROW + cta) * gf::WARP + gf::lane()",
            "cta * THREADS + gf::thread_index()",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "what is past the row's end is added": (
        SUMS,
        Bug("inside ? products : 0.0f", "products", {ADDRESS: f"{WRONG}|{VARIES}"}, NOWHERE),
    ),
    "passes joined in another order": (
        AGAIN,
        Bug(
            "gf::Passes<gf::Add, PASSES>::place(PHASE % 2 == 0 ? i : PASSES - 1 - i)",
            "Index(PHASE % 2 == 0 ? i : PASSES - 1 - i)",
            {ADDRESS: WRONG},
            NOWHERE,
        ),
    ),
    "a value of a row that all CTAs write": (
        (RowFunction("logsumexp", 2, 1500, FLOAT, FLOAT), Knobs(4, 64)),
        Bug(
            "thread == 0;",
            "gf::thread_index() == 0;",
            {RACE: "data race"},
            ("graphfuse/simt.cuh", "__builtin_memcpy(address, &pack, WIDTH);"),
        ),
    ),
}


def planned(case: RowFunction | Norm, knobs: Knobs) -> Planned:
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs)


def report(planned: Planned, build, source: str, expected: dict[str, bytes]) -> str:
    """What the lane says about a kernel; empty if it finds nothing."""
    try:
        return "" if planned.check(build, source) == expected else WRONG
    except KernelFaultError as fault:
        return str(fault)
    except Varies:
        return VARIES


@pytest.mark.some(5)
@pytest.mark.parametrize(("name", "build"), [(name, build) for name, (_, bug) in BUGS.items() for build in bug.found])
def test_in_the_kernel_over_the_grid(name, build):
    problem, bug = BUGS[name]
    right, problem = planned(*problem), planned(*problem)
    right.run()
    source = plant(problem.source, bug)
    files = {_KERNEL: template("graphfuse.engines.rows.over_grid", _KERNEL)}
    for header in ("grid_reduce.cuh", "rows.cuh", "simt.cuh"):
        files[f"graphfuse/{header}"] = template("graphfuse.codegen.headers", header)
    assert_caught(bug, report(problem, build, source, right.contents()), build, files)


@pytest.mark.thorough
@pytest.mark.parametrize("problem", [HELD, SUMS, AGAIN], ids=["held", "sums", "again"])
@pytest.mark.parametrize("build", [ADDRESS, RACE])
def test_without_a_bug_nothing_is_found(problem, build):
    right, problem = planned(*problem), planned(*problem)
    right.run()
    assert not report(problem, build, problem.source, right.contents())
