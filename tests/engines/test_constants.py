"""Constants that schedules give their kernels: each has the C++ type of its value, and is read."""

import re

import pytest

from graphfuse.engines.rows.across import Across
from graphfuse.engines.rows.by_row import ByRow
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.engines.rows.kernel import Access, constant
from graphfuse.engines.rows.over_grid import OverGrid
from graphfuse.engines.rows.persistent import Persistent
from support.variants import VARIANTS

PRINTED = {"COLUMN_READS", "ROW_READS", "ROW_WRITES"}
"""Those that the printed phases read, of some programs."""
OF_EVERY_KERNEL = {"COLUMNS", "CHUNK", "PIECE", "STEPS", "PASSES", "THREADS"} | PRINTED


def test_a_constant_has_the_type_of_its_value():
    assert constant("A", True) == "constexpr bool A = true;\n"
    assert constant("A", 8) == "constexpr int A = 8;\n"
    assert constant("A", Access.FIRST) == "constexpr gf::Access A = gf::Access::FIRST;\n"


@pytest.mark.parametrize("schedule", [ByRow, Persistent, Across, OverGrid])
def test_a_kernel_reads_every_constant_that_its_schedule_gives_it(schedule):
    variant = next(v for v in VARIANTS.values() if isinstance(v.knobs, schedule.knobs))
    text = variant.engine.source(variant.facts(), variant.knobs)
    block = re.search(r"^using RowIndex = [\w:]+;\n((?:constexpr .*;\n)+)", text, re.MULTILINE)[1]
    given = set(re.findall(r"^constexpr [a-zA-Z0-9:]+ ([A-Z_]+) = ", block, re.MULTILINE))
    assert given >= OF_EVERY_KERNEL
    assert given - PRINTED <= {*re.findall(r"\b[A-Z_]+\b", text.replace(block, ""))}


def test_what_the_l2_gives_up_is_said_by_constants_of_every_kernel():
    assert {name for changed in EVICTIONS for name in changed} <= PRINTED
