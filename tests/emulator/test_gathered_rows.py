"""Kernels that write the memory of other ranks, on the emulator: several ranks at the same time, in all schedules."""

import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from support.gathered_rows import GatheredRows

pytestmark = pytest.mark.emulate

E4M3 = data_type.FP8_E4M3
CASES = {
    "several CTAs": GatheredRows(rows=9, knobs=ByRowKnobs(8, 32)),
    "touched between calls": GatheredRows(rows=9, knobs=ByRowKnobs(8, 32), touched=True, calls=2),
    "four ranks, summed": GatheredRows(ranks=4, rows=3, calls=2, summed=True, knobs=ByRowKnobs(8, 32, 1)),
    "fp8, summed, of two memories": GatheredRows(rows=5, out=E4M3, calls=2, summed=True),
    "fp8, a row a cluster": GatheredRows(rows=2, columns=2048, out=E4M3, calls=2, knobs=ByRowKnobs(256, 64)),
    "rows read again": GatheredRows(rows=1, columns=40960, calls=1, summed=True),
}


@pytest.mark.parametrize("name", CASES)
def test_addresses(name):
    CASES[name].hold(Build.ADDRESS)


@pytest.mark.parametrize("name", ["several CTAs", "touched between calls", "four ranks, summed"])
def test_races(name):
    CASES[name].hold(Build.RACE)
