"""Bugs planted into the backward kernel, in what it does as no other: copies ahead, CTAs that stay and meet."""

import pytest

from bugs import ADDRESS, RACE, VARIES, WRONG, Bug, assert_caught, plant
from emulation import Planned, Varies
from gradients import Gradient
from graphfuse.codegen.render import template
from graphfuse.engines.rmsnorm_backward import RmsNormBackwardKnobs as Knobs
from graphfuse.errors import KernelFaultError

pytestmark = pytest.mark.emulate

# Three rounds of two CTAs, rows of two warps, two of them a CTA; columns that take three slabs and more.
CASE, KNOBS = Gradient(11, 520, activation="silu", residual=True, dbias=True), Knobs(64, 128, 3, 1, 2)
_KERNEL = "rmsnorm_backward.cu"
_READ = ("graphfuse/simt.cuh", "__builtin_memcpy(&pack, address, WIDTH)")
_WAIT = "gf::async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();"

BUGS = {
    "missing grid barrier": Bug("gf::grid_barrier();", "", {RACE: "data race"}, (_KERNEL, "sum += partials[")),
    "missing wait for copies": Bug(_WAIT, "", {ADDRESS: "use-after-poison"}, _READ),
    "a wait for one row too few": Bug(
        _WAIT, "gf::async_wait<STAGES - 1>();", {ADDRESS: "use-after-poison", RACE: "data race"}, _READ
    ),
    "a copy into the stage that is read": Bug(
        "stage == 0 ? STAGES - 1 : stage - 1",
        "stage",
        {ADDRESS: "use-after-poison|in use by another copy"},
        _READ,
    ),
    "one buffer for the sums of all rows": Bug(
        "parity ^= 1;", "", {RACE: "data race"}, ("graphfuse/reduce.cuh", "shared[i * THREADS + thread] = parts[i];")
    ),
    "missing barrier before the sums of a CTA": Bug(
        "gf::barrier();  // all have read what was in shared memory",
        "",
        {RACE: "data race"},
        (_KERNEL, "float sum = shared[column];"),
    ),
    "missing barrier between slabs": Bug(
        "gf::barrier();  // the slab before has been read",
        "",
        {RACE: "data race"},
        (_KERNEL, "shared[thread] = sum;"),
    ),
    "sums of a row that does not exist": Bug(
        "i64 used = (rows + ROWS_PER_CTA - 1) / ROWS_PER_CTA;",
        "i64 used = (rows + ROWS_PER_CTA - 1) / ROWS_PER_CTA - 5;",
        {ADDRESS: WRONG},
        ("", ""),
    ),
}


def planned() -> Planned:
    return Planned(CASE.graph("emulator"), CASE.inputs() | CASE.outputs(), KNOBS, "rmsnorm_backward")


@pytest.mark.parametrize(("name", "build"), [(name, build) for name, bug in BUGS.items() for build in bug.found])
def test_in_the_backward_kernel(name, build):
    bug, right, problem = BUGS[name], planned(), planned()
    right.run()
    try:
        found = problem.check(build, plant(problem.source, bug))
        report = "" if found == right.contents() else WRONG
    except KernelFaultError as fault:
        report = str(fault)
    except Varies:
        report = VARIES
    files = {_KERNEL: template("graphfuse.engines.rmsnorm_backward", _KERNEL)}
    for header in ("reduce.cuh", "simt.cuh"):
        files[f"graphfuse/{header}"] = template("graphfuse.codegen.headers", header)
    assert_caught(bug, report, build, files)
