"""Kernels that read the memory of other ranks, on the emulator: several ranks at the same time, in all schedules."""

import pytest

from graphfuse.base.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rows.by_row import ByRowKnobs
from support.sums_over_ranks import SumOverRanks

pytestmark = pytest.mark.emulate

E4M3 = data_type.FP8_E4M3
CASES = {
    "one row": SumOverRanks(rows=1),
    "several CTAs": SumOverRanks(rows=9, knobs=ByRowKnobs(8, 32)),
    "four ranks": SumOverRanks(ranks=4, rows=3, calls=2, knobs=ByRowKnobs(8, 32, 1)),
    "odd columns": SumOverRanks(rows=3, columns=75, calls=2),
    "fp8": SumOverRanks(rows=9, out=E4M3, knobs=ByRowKnobs(8, 32)),
    "fp8 of four ranks": SumOverRanks(ranks=4, rows=5, out=E4M3, calls=2),
    "input rewritten between calls": SumOverRanks(rows=9, out=E4M3, knobs=ByRowKnobs(8, 32), rewritten=True),
    "a row a CTA": SumOverRanks(rows=2, columns=1000, out=E4M3, calls=2, knobs=ByRowKnobs(128, 128)),
    "a row a cluster": SumOverRanks(rows=2, columns=2048, out=E4M3, calls=2, knobs=ByRowKnobs(256, 64)),
    "rows read again": SumOverRanks(rows=1, columns=40960, out=E4M3, calls=2),
}


@pytest.mark.parametrize("name", CASES)
def test_addresses(name):
    CASES[name].hold(Build.ADDRESS)


@pytest.mark.parametrize("name", ["several CTAs", "four ranks", "input rewritten between calls", "a row a CTA"])
def test_races(name):
    CASES[name].hold(Build.RACE)
