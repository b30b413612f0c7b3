"""Softmax and its like, layer norm and L2 normalization by their kernels' own source, for every length of a row."""

import dataclasses

import pytest

from graphfuse.emulator.compiler import Build
from support.emulation import Planned
from support.variants import ROW_FUNCTIONS, TARGETS

pytestmark = pytest.mark.emulate

H200 = TARGETS["sm_90a"]


def planned(name: str, rows: int):
    """The kernel of a variant for so many rows, with what it reads and writes."""
    variant = ROW_FUNCTIONS[name]
    problem = dataclasses.replace(variant.problem, rows=rows)
    pack, outputs = problem.inputs(), problem.outputs()
    return variant, Planned(problem.graph("emulator"), pack | outputs, variant.knobs_on(H200)), pack, outputs


@pytest.mark.some(18)
@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_values(name):
    for rows in ROW_FUNCTIONS[name].row_counts(H200):
        variant, kernel, pack, outputs = planned(name, rows)
        kernel.run()
        variant.hold(rows, pack, outputs)


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE], ids=lambda build: build.name)
@pytest.mark.parametrize("name", ["softmax of 1000", "logsumexp of 1000", "layer norm of pieces"])
def test_under_sanitizers_in_all_schedules(name, build):
    _, kernel, _, _ = planned(name, 3)
    found = kernel.check(build)
    kernel.run()
    assert found["out"] == kernel.contents()["out"]
