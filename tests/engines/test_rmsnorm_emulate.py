"""Every kind of RMSNorm kernel under sanitizers: nothing is found, and the bits are those of a plain run.

AddressSanitizer and UndefinedBehaviorSanitizer see all of them, ThreadSanitizer those that
differ in how threads meet.
"""

import ctypes

import emulation
import numpy as np
import pytest
from rmsnorm_problem import DEVICE, ENGINE, RMS, SCALED, SCALES, X, Y, Problem, assert_close

from graphfuse.dtypes import data_type
from graphfuse.emulator.compiler import Build
from graphfuse.engines.rmsnorm import RmsNormKnobs
from graphfuse.pointwise import Chain, Program, Scalar, Step

pytestmark = pytest.mark.emulate

FLOAT, HALF, BF16 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16
E4M3, E5M2, FP4 = data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1
FLOATS = (FLOAT, HALF, BF16)
PLAIN = Program()
OPS = Program(
    (
        Step("gelu", (("input", Chain(0)),)),
        Step("tanh", (("input", Chain(1)),)),
        Step("relu", (("input", Chain(2)),), (("negative_slope", 0.5), ("upper_clip", 6.0))),
        Step("gelu_approx_tanh", (("input", Chain(3)),)),
        Step("sub", (("a", Scalar(8, "offset", FLOAT, True)), ("b", Chain(4)))),
    )
)


def both(problem: Problem, knobs: RmsNormKnobs | None, builds) -> None:
    """Clean in every schedule, with the bits that a plain run leaves everywhere."""
    plan = problem.plan(knobs)
    before = {n: a.copy() for n, a in problem.buffers.items()}
    found = emulation.checked(*plan, builds)
    problem.run(knobs)
    for number, array in plan[3].items():
        assert found[number] == ctypes.string_at(*emulation.extent(array)), f"argument {number}"
        if number not in (Y, RMS, SCALES):
            np.testing.assert_array_equal(array.view(np.uint8), before[number].view(np.uint8))
    if problem.y in FLOATS and problem.program is not OPS:
        assert_close(problem.buffers[Y], problem.expected(), problem.y)
    if problem.inverse_rms:
        problem.expected()
        np.testing.assert_allclose(problem.buffers[RMS], problem.expected_inverse, rtol=1e-6)


def types():
    """Each type in each role, with and without bias, scalars and inverse RMS."""
    for n, x in enumerate(FLOATS):
        for m, y in enumerate((*FLOATS, E4M3, E5M2, FP4)):
            w = FLOATS[(n + m) % 3]
            bias = (None, *FLOATS)[(2 * n + m) % 4]
            program = (PLAIN, None, SCALED, OPS)[(n + m) % 4]
            options = dict(x=x, w=w, y=y, bias=bias, inverse_rms=(n + m) % 2 == 0)
            if program is not None:
                options["program"] = program
            yield pytest.param(options, id=f"{x.name} {w.name} {bias and bias.name} to {y.name}")


@pytest.mark.parametrize("options", list(types()))
def test_types(options):
    both(Problem(3, 176, **options), None, [Build.ADDRESS])


# offset and gap in elements: addresses, or rows, that are multiples of 16, 8, 4, 2 and 1 bytes.
ALIGNMENTS = {
    "8 bytes": dict(offset=4),
    "4 bytes": dict(offset=2),
    "2 bytes": dict(offset=1),
    "rows 8 bytes apart": dict(gap=4),
    "rows 2 bytes apart": dict(gap=1),
    "float": dict(x=FLOAT, w=FLOAT, y=FLOAT, offset=1, gap=2),
    "float to 1 byte": dict(x=FLOAT, w=FLOAT, y=E4M3, offset=3, gap=1),
    "1 byte": dict(y=E5M2, offset=5, gap=3),
    "fp4": dict(y=FP4, gap=8, offset=1),
    "bias": dict(y=BF16, bias=BF16, offset=1, inverse_rms=True),
}


@pytest.mark.parametrize("options", ALIGNMENTS.values(), ids=ALIGNMENTS)
def test_alignments(options):
    both(Problem(5, 96, **{"y": BF16, **options}), None, [Build.ADDRESS])


# One row, rows that fill no CTA, tails of a chunk and of a pass, all levels of the reduction, rows read twice.
SHAPES = {
    "one element": (1, 1, BF16),
    "one row": (1, 48, BF16),
    "odd": (3, 7, HALF),
    "two to a warp": (3, 111, BF16),
    "many short rows": (130, 16, FLOAT),
    "rows share CTAs": (130, 64, BF16),
    "a chunk more": (3, 264, BF16),
    "tail": (2, 3420, BF16),
    "eight warps": (2, 4097, FLOAT),
    "long": (2, 20480, BF16),
    "read twice": (1, 32768, FLOAT),
    "odd, read twice": (2, 24593, BF16),
}


@pytest.mark.parametrize("y", [FLOAT, E4M3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, y):
    rows, columns, x = shape
    both(Problem(rows, columns, x=x, w=FLOAT, y=y, inverse_rms=True), None, [Build.ADDRESS])


@pytest.mark.parametrize("columns", [16, 1024, 32768])
def test_blocks(columns):
    both(Problem(3, columns, x=FLOAT, w=FLOAT, y=FP4, program=PLAIN), None, [Build.ADDRESS])


def knobs_of(columns: int, **options):
    """All legal knobs; several rounds of a CTA in half of them."""
    problem = Problem(1, columns, **options)
    powers = [1 << k for k in range(11)]
    choices = (RmsNormKnobs(t, c, (t + c) // 32 % 2) for t in powers for c in powers[5:])
    return [k for k in choices if ENGINE.illegal(problem.facts, k, DEVICE) is None]


@pytest.mark.parametrize("knobs", knobs_of(1000), ids=lambda k: f"{k.threads_per_row} of {k.threads}")
def test_knobs(knobs):
    both(Problem(5, 1000, y=BF16), knobs, [Build.ADDRESS])


@pytest.mark.parametrize("knobs", knobs_of(64, y=FP4), ids=lambda k: f"{k.threads_per_row} of {k.threads}")
def test_knobs_of_blocks(knobs):
    both(Problem(5, 64, y=FP4), knobs, [Build.ADDRESS])


# How threads meet: within a warp, over warps with one barrier and with two, round after round.
RACES = {
    "rows share warps": (dict(rows=9, columns=64), RmsNormKnobs(8, 64, 1)),
    "one warp": (dict(rows=5, columns=500), RmsNormKnobs(32, 64, 1)),
    "two warps": (dict(rows=7, columns=500), RmsNormKnobs(64, 128, 1)),
    "eight warps": (dict(rows=3, columns=2600), RmsNormKnobs(256, 256, 1)),
    "sixteen warps": (dict(rows=3, columns=2600), RmsNormKnobs(512, 512, 1)),
    "sixteen warps, two rows": (dict(rows=3, columns=2600), RmsNormKnobs(512, 1024, 1)),
    "blocks": (dict(rows=5, columns=64, y=FP4), RmsNormKnobs(8, 64, 1)),
    "many CTAs": (dict(rows=40, columns=111, y=E4M3, inverse_rms=True), RmsNormKnobs(16, 32)),
    "unaligned": (dict(rows=3, columns=111, gap=3, offset=1, y=BF16), RmsNormKnobs(128, 128, 2)),
    "scalars": (dict(rows=3, columns=256, program=SCALED, bias=HALF), RmsNormKnobs(32, 32)),
    "read twice": (dict(rows=2, columns=24593), RmsNormKnobs(1024, 1024, 1)),
}


@pytest.mark.parametrize(("options", "knobs"), RACES.values(), ids=RACES)
def test_races(options, knobs):
    both(Problem(**options), knobs, [Build.RACE])


@pytest.mark.parametrize("build", [Build.ADDRESS, Build.RACE])
@pytest.mark.parametrize("columns", [1024, 32768])
def test_in_place(columns, build):
    problem = Problem(2, columns, x=FLOAT)
    apart = problem.run()
    problem.buffers[Y] = problem.buffers[X]
    plan = problem.plan()
    assert emulation.checked(*plan, [build])[Y] == apart.tobytes()
