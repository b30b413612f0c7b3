"""Bugs planted into cross entropy, forward and backward, in what it does as no norm: numbers of columns and targets."""

import re

import pytest

from graphfuse.base.errors import KernelFaultError
from graphfuse.codegen.render import template
from graphfuse.engines.rows.by_row import ByRowKnobs
from support.bugs import ADDRESS, WRONG, Bug, assert_caught, plant
from support.emulation import Planned, Varies
from support.graphs import FLOAT
from support.losses import CrossEntropy

pytestmark = pytest.mark.emulate

# Eight rows a CTA, the second of which has one. Some pieces of a row's last step are none.
LOSS = CrossEntropy(9, 208), ByRowKnobs(8, 64)
GRADIENT = CrossEntropy(9, 208, backward=True), ByRowKnobs(8, 64)
HALVES = CrossEntropy(9, 208, FLOAT, backward=True), ByRowKnobs(8, 64)
NOWHERE = ("", "")
_INDEX = "float((row.thread + at) * PIECE)"
_TARGET = "float(i64(u64(words.word[1]) << 32 | words.word[0]))"
_IN_ROW = "row.exists ? gf::scalar(static_cast<const long long*>"

BUGS = {
    "the logit beside the target's": (
        LOSS,
        Bug("offset(first, int(column) *", "offset(first, (int(column) ^ 1) *", {ADDRESS: WRONG}, NOWHERE),
    ),
    "columns of a gradient numbered in each step anew": (
        GRADIENT,
        Bug(_INDEX, "float(row.thread * PIECE)", {ADDRESS: WRONG}, NOWHERE),
    ),
    "columns numbered by chunks where a piece is half of one": (
        HALVES,
        Bug(_INDEX, "float((row.thread + at) * CHUNK)", {ADDRESS: WRONG}, NOWHERE),
    ),
    "columns numbered from 1": (
        GRADIENT,
        Bug("(column + float(i))", "(column + float(i + 1))", {ADDRESS: WRONG}, NOWHERE),
    ),
    "half of a target": (LOSS, Bug(_TARGET, "float(int(words.word[0]))", {ADDRESS: WRONG}, NOWHERE)),
    "half of a gradient's target": (GRADIENT, Bug(_TARGET, "float(words.word[0])", {ADDRESS: WRONG}, NOWHERE)),
    "target of the row after the last": (
        LOSS,
        Bug(
            _IN_ROW,
            _IN_ROW.replace("row.exists", "row.thread >= 0"),
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*READ of size"},
            ("generated.cuh", "gf::scalar(static_cast<const long long*>"),
        ),
    ),
    "exponentials of what is past the row": (
        LOSS,
        Bug("!TAILLESS && !Phase<PHASE>::ZEROS_STAY_ZERO", "!TAILLESS && PHASE < 1", {ADDRESS: WRONG}, NOWHERE),
    ),
    "gradient past the row": (
        GRADIENT,
        Bug(
            "inside && row.exists",
            "row.exists",
            {ADDRESS: "(heap-buffer-overflow|use-after-poison)[^$]*WRITE of size"},
            ("graphfuse/rows.cuh", "store<BYTES, WIDTH, ACCESS>(offset(address, at * BYTES), piece)"),
        ),
    ),
}


def planned(case: CrossEntropy, knobs: ByRowKnobs) -> Planned:
    return Planned(case.graph("emulator"), case.inputs() | case.outputs(), knobs)


@pytest.mark.parametrize(("name", "build"), [(name, build) for name, (_, bug) in BUGS.items() for build in bug.found])
def test_in_cross_entropy(name, build):
    case, bug = BUGS[name]
    right, problem = planned(*case), planned(*case)
    right.run()
    try:
        found = problem.check(build, plant(problem.source, bug))
        report = "" if found == right.contents() else WRONG
    except KernelFaultError as fault:
        report = str(fault)
    except Varies as varies:
        report = str(varies)
    # Behind includes, of which each is a line.
    *_, (line, generated) = re.findall(r'#line (\d+) "generated.cuh"\n(.*?)#line', problem.source, re.DOTALL)
    files = {
        "generated.cuh": "\n" * (int(line) - 1) + generated,
        "graphfuse/rows.cuh": template("graphfuse.codegen.headers", "rows.cuh"),
    }
    assert_caught(bug, report, build, files)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [LOSS, GRADIENT, HALVES], ids=["loss", "gradient", "halves"])
def test_without_a_bug_nothing_is_found(case):
    right, problem = planned(*case), planned(*case)
    right.run()
    assert problem.check(ADDRESS) == right.contents()
