"""The RMSNorm kernel's own source, run by the emulator: results against float64, bits across knobs."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.engines.rows.by_row import ByRowKnobs
from support import oracle
from support.rmsnorm_problem import DEVICE, ENGINE, NUMPY, RMS, SCALED, SCALES, B, Problem, W, X, Y, assert_close

pytestmark = pytest.mark.emulate

SHAPES = [(1, 1), (3, 7), (130, 16), (3, 17), (1, 48), (130, 64), (3, 111), (3, 1024), (2, 3420)]


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_float32_result(rows, columns):
    problem = Problem(rows, columns)
    assert_close(problem.run(), problem.expected(), problem.y)


@pytest.mark.parametrize(
    "options",
    [
        dict(x=data_type.FLOAT, w=data_type.FLOAT, y=data_type.BFLOAT16),
        dict(x=data_type.HALF, w=data_type.FLOAT, y=data_type.HALF),
        dict(x=data_type.BFLOAT16, w=data_type.HALF, y=data_type.BFLOAT16, bias=data_type.FLOAT),
        dict(x=data_type.FLOAT, w=data_type.BFLOAT16, y=data_type.FLOAT, bias=data_type.HALF, inverse_rms=True),
        dict(y=data_type.HALF, program=SCALED, inverse_rms=True),
        dict(y=data_type.BFLOAT16, gap=8, program=()),
        dict(y=data_type.BFLOAT16, gap=3),
        dict(y=data_type.BFLOAT16, offset=1, bias=data_type.BFLOAT16),
        dict(x=data_type.FLOAT, y=data_type.HALF, offset=2, gap=2),
    ],
    ids=str,
)
def test_types_and_layouts(options):
    problem = Problem(5, 96, **options)
    expected = problem.expected()
    assert_close(problem.run(), expected, problem.y)
    if problem.inverse_rms:
        np.testing.assert_allclose(problem.buffers[RMS], problem.expected_inverse, rtol=1e-6)


@pytest.mark.parametrize("dtype", [data_type.FP8_E4M3, data_type.FP8_E5M2])
@pytest.mark.parametrize("columns, largest", [(16, 4.0), (111, 4.0), (256, 1e4)])
def test_fp8_is_the_float32_result_rounded(dtype, columns, largest):
    options = dict(largest=largest, x=data_type.FLOAT, w=data_type.FLOAT, bias=data_type.FLOAT)
    exact = Problem(3, columns, **options)
    problem = Problem(3, columns, y=dtype, **options)
    for p in (exact, problem):
        p.buffers[B][:] = np.linspace(-6e4, 6e4, columns)  # some beyond what FP8 holds
        p.buffers[B][0] = np.inf
        p.buffers[B][-1] = np.nan
    limit = dtype.facts.max
    values = exact.run()
    expected = np.clip(values, -limit, limit).astype(NUMPY[dtype]).view(np.uint8)
    expected[np.isnan(values)] = 0x7F
    np.testing.assert_array_equal(problem.run().view(np.uint8), expected)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "rows, columns, x", [(1, 16, "BFLOAT16"), (3, 48, "FLOAT"), (3, 64, "HALF"), (2, 1040, "FLOAT")]
)
def test_nvfp4_is_the_float32_result_quantized(rows, columns, x):
    options = dict(x=data_type[x], w=data_type.FLOAT, program=())
    exact = Problem(rows, columns, **options)
    problem = Problem(rows, columns, y=data_type.FP4_E2M1, **options)
    for p in (exact, problem):
        p.buffers[X][0, :16] = 0
        if rows > 1:
            p.buffers[W][16:32] = np.geomspace(1e-6, 1e-3, 16)  # scales around the smallest
            p.buffers[X][1, 5] = np.nan
    values = exact.run()
    packed, scales = oracle.nvfp4(values)
    for knobs in every_knob(problem):
        np.testing.assert_array_equal(problem.run(knobs), packed)
        np.testing.assert_array_equal(problem.buffers[SCALES], scales)

    # The bound that the engine's notes state.
    stored = oracle.from_nvfp4(torch.from_numpy(packed), torch.from_numpy(scales)).numpy().reshape(rows, -1, 16)
    blocks, scale = values.reshape(rows, -1, 16), scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    amax, error = np.abs(blocks).max(axis=2), np.abs(stored - blocks).max(axis=2)
    finite = ~np.isnan(amax)
    assert (error <= np.maximum(scale, amax - 6 * scale) * (1 + 2e-6))[finite].all()


def every_knob(problem: Problem) -> list[ByRowKnobs]:
    """Every number of threads a row with every number of chunks, as far as legal."""
    knobs = [ByRowKnobs(1 << p, max(64, 1 << p), chunks) for p in range(11) for chunks in (1, 2, 4)]
    return [k for k in knobs if ENGINE.illegal(problem.facts, k, DEVICE) is None]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "x, columns, least",
    [("BFLOAT16", 111, 8), ("BFLOAT16", 992, 23), ("BFLOAT16", 1024, 23), ("FLOAT", 3424, 8), ("HALF", 40, 11)],
)
def test_bits_do_not_depend_on_knobs_or_rows(x, columns, least):
    problem = Problem(5, columns, x=data_type[x], inverse_rms=True)
    knobs = every_knob(problem)
    results = {(problem.run(choice).tobytes(), problem.buffers[RMS].tobytes()) for choice in knobs}
    assert len(knobs) >= least
    assert len(results) == 1

    alone = Problem(1, columns, x=data_type[x], inverse_rms=True)
    alone.buffers[X][:], alone.buffers[W][:] = problem.buffers[X][3], problem.buffers[W]
    assert alone.run().tobytes() == problem.buffers[Y][3].tobytes()


@pytest.mark.parametrize("x, columns", [("BFLOAT16", 24593), ("BFLOAT16", 49160), ("FLOAT", 32768)])
def test_rows_that_are_read_twice(x, columns):
    problem = Problem(24, columns, x=data_type[x], w=data_type.FLOAT, y=data_type.FLOAT)
    # Nearly all of the sum is one thread's, so that the order in which it adds shows.
    chunk = math.gcd(columns, 8)
    problem.buffers[X][1:, np.arange(columns) // chunk % 1024 != 7] = 0
    twice, spread = ByRowKnobs(1024, 1024), ByRowKnobs(4096, 512)
    assert any("read again" in note for note in ENGINE.notes(problem.facts, twice, DEVICE))
    result = problem.run(twice)
    assert_close(result[:1], problem.expected()[:1], problem.y)
    assert problem.run(spread).tobytes() == result.tobytes()  # a cluster's, of which each CTA holds a part


@pytest.mark.parametrize("columns", [1024, 32768])
def test_in_place(columns):
    problem = Problem(2, columns, x=data_type.FLOAT)
    knobs = ENGINE.propose(problem.facts, DEVICE, heur_mode.A)[0]
    assert ENGINE.in_place(problem.facts, knobs) == ((X, Y),)
    apart = problem.run()
    problem.buffers[Y] = problem.buffers[X]
    assert problem.run().tobytes() == apart.tobytes()


def test_nothing_between_rows_is_written():
    problem = Problem(4, 24, y=data_type.BFLOAT16, gap=8)
    problem.run()
    whole = np.lib.stride_tricks.as_strided(problem.buffers[Y].view(np.uint16), (3, 32), (64, 2))
    assert (whole[:, 24:] == 0x5A5A).all()


def test_no_rows_launches_nothing():
    problem = Problem(0, 64)
    assert ENGINE.launch(problem.facts, ByRowKnobs(8, 128)).grid == 0
