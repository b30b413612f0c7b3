"""The RMSNorm kernel's own source, compiled as host code: results against float64, bits across knobs."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from graphfuse.device import for_arch
from graphfuse.dtypes import data_type
from graphfuse.engines.rmsnorm import RmsNormEngine, RmsNormKnobs
from graphfuse.enums import heur_mode
from graphfuse.patterns.rmsnorm import RmsNormFacts, View
from graphfuse.pointwise import Chain, Program, Scalar, Step

ENGINE = RmsNormEngine()
DEVICE = for_arch("sm_90a")
X, W, B, EPS, Y, RMS, SCALES, FACTOR, OFFSET = range(9)

NUMPY = {
    data_type.FLOAT: np.dtype(np.float32),
    data_type.HALF: np.dtype(np.float16),
    data_type.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    data_type.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    data_type.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    data_type.FP4_E2M1: np.dtype(np.uint8),
}
SWISH = Program((Step("swish", (("input", Chain(0)),), (("swish_beta", 1.5),)),))
# y * factor (float16 in device memory) + offset (by value)
SCALED = Program(
    (
        *SWISH.steps,
        Step("scale", (("input", Chain(1)), ("scale", Scalar(FACTOR, "factor", data_type.HALF, False)))),
        Step("add", (("a", Chain(2)), ("b", Scalar(OFFSET, "offset", data_type.FLOAT, True)))),
    )
)


@dataclasses.dataclass
class Problem:
    """Random operands of one RMSNorm and where its results go. gap: unused columns between
    rows. offset: elements by which the tensors miss 16-byte alignment."""

    rows: int
    columns: int
    x: data_type = data_type.BFLOAT16
    w: data_type = data_type.BFLOAT16
    y: data_type = data_type.FLOAT
    bias: data_type | None = None
    inverse_rms: bool = False
    program: Program = SWISH
    gap: int = 0
    offset: int = 0
    largest: float = 4.0

    def __post_init__(self):
        random = np.random.default_rng([self.rows, self.columns])
        fp4 = self.y is data_type.FP4_E2M1
        self.buffers = {
            X: self.matrix(self.x, self.columns),
            W: self.matrix(self.w, self.columns, 1)[0],
            Y: self.matrix(self.y, self.columns // 2 if fp4 else self.columns),
            FACTOR: np.array([0.75], np.float16),
        }
        self.buffers[X][:] = random.uniform(-self.largest, self.largest, (self.rows, self.columns))
        self.buffers[W][:] = random.uniform(0.5, 3, self.columns)
        if self.bias:
            self.buffers[B] = self.matrix(self.bias, self.columns, 1)[0]
            self.buffers[B][:] = random.uniform(-1, 1, self.columns)
        if self.inverse_rms:
            self.buffers[RMS] = np.zeros(self.rows, np.float32)
        if fp4:
            self.buffers[SCALES] = np.zeros((self.rows, self.columns // 16), np.uint8)
        self.scalars = {EPS: np.float32(1e-5), OFFSET: np.float32(0.125)}
        row = 2 if fp4 else 1
        self.facts = RmsNormFacts(
            node="norm",
            rows=self.rows,
            columns=self.columns,
            input=self.view(X, self.x),
            weight=dataclasses.replace(self.view(W, self.w), rows=()),
            bias=dataclasses.replace(self.view(B, self.bias), rows=()) if self.bias else None,
            epsilon=Scalar(EPS, "epsilon", data_type.FLOAT, True),
            epilogue=self.program,
            output=self.view(Y, self.y, row),
            inverse_rms=View(RMS, "inverse", data_type.FLOAT, ((self.rows, 1),), 1, 16) if self.inverse_rms else None,
            block_scale=self.view(SCALES, data_type.FP8_E4M3) if fp4 else None,
            block_size=16 if fp4 else 0,
        )

    def matrix(self, dtype, columns, rows=None):
        """Rows with the problem's gap between them, `offset` elements after a 16-byte boundary."""
        rows = self.rows if rows is None else rows
        item = NUMPY[dtype]
        raw = np.full((rows * (columns + self.gap) + self.offset + 16) * item.itemsize + 16, 0x5A, np.uint8)
        start = -raw.ctypes.data % 16 + self.offset * item.itemsize
        flat = raw[start : start + rows * (columns + self.gap) * item.itemsize].view(item)
        return flat.reshape(rows, columns + self.gap)[:, :columns]

    def view(self, tensor, dtype, elements_per_item=1):
        array = self.buffers[tensor]
        stride = array.strides[0] // array.itemsize * elements_per_item if array.ndim == 2 else 0
        return View(tensor, "t", dtype, ((self.rows, stride),), 1, array.ctypes.data & -array.ctypes.data)

    def expected(self):
        """Values before storage, in float64."""
        x, w = self.buffers[X].astype(np.float64), self.buffers[W].astype(np.float64)
        self.expected_inverse = 1 / np.sqrt((x * x).mean(axis=1) + 1e-5)
        y = x * self.expected_inverse[:, None] * w
        if self.bias:
            y = y + self.buffers[B].astype(np.float64)
        if self.program.steps:
            y = y / (1 + np.exp(-1.5 * y))
        if self.program is SCALED:
            y = y * 0.75 + 0.125
        return y

    def run(self, run_on_cpu, knobs=None):
        """What the kernel stores, as it is stored."""
        assert ENGINE.why_not(self.facts, DEVICE) is None
        knobs = knobs or ENGINE.propose(self.facts, DEVICE, heur_mode.A)[0]
        assert ENGINE.illegal(self.facts, knobs, DEVICE) is None
        buffers = {t: self.buffers[t] for t in self.buffers if t != FACTOR or self.program is SCALED}
        run_on_cpu(ENGINE, self.facts, knobs, buffers, self.scalars, {Y, RMS, SCALES})
        return self.buffers[Y].copy()


def assert_close(stored, expected, dtype):
    """Within one unit of the stored type, or a few of float32, of the float64 result."""
    digits = {data_type.FLOAT: 2.0**-19, data_type.HALF: 2.0**-10, data_type.BFLOAT16: 2.0**-7}[dtype]
    np.testing.assert_allclose(stored.astype(np.float64), expected, rtol=digits, atol=2.0**-24)


SHAPES = [(1, 1), (3, 7), (130, 16), (3, 17), (1, 48), (130, 64), (3, 111), (3, 1024), (2, 3420)]


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_float32_result(run_on_cpu, rows, columns):
    problem = Problem(rows, columns)
    assert_close(problem.run(run_on_cpu), problem.expected(), problem.y)


@pytest.mark.parametrize(
    "options",
    [
        dict(x=data_type.FLOAT, w=data_type.FLOAT, y=data_type.BFLOAT16),
        dict(x=data_type.HALF, w=data_type.FLOAT, y=data_type.HALF),
        dict(x=data_type.BFLOAT16, w=data_type.HALF, y=data_type.BFLOAT16, bias=data_type.FLOAT),
        dict(x=data_type.FLOAT, w=data_type.BFLOAT16, y=data_type.FLOAT, bias=data_type.HALF, inverse_rms=True),
        dict(y=data_type.HALF, program=SCALED, inverse_rms=True),
        dict(y=data_type.BFLOAT16, gap=8, program=Program()),
        dict(y=data_type.BFLOAT16, gap=3),
        dict(y=data_type.BFLOAT16, offset=1, bias=data_type.BFLOAT16),
        dict(x=data_type.FLOAT, y=data_type.HALF, offset=2, gap=2),
    ],
    ids=str,
)
def test_types_and_layouts(run_on_cpu, options):
    problem = Problem(5, 96, **options)
    expected = problem.expected()
    assert_close(problem.run(run_on_cpu), expected, problem.y)
    if problem.inverse_rms:
        np.testing.assert_allclose(problem.buffers[RMS], problem.expected_inverse, rtol=1e-6)


@pytest.mark.parametrize("dtype", [data_type.FP8_E4M3, data_type.FP8_E5M2])
@pytest.mark.parametrize("columns, largest", [(16, 4.0), (111, 4.0), (256, 1e4)])
def test_fp8_is_the_float32_result_rounded(run_on_cpu, dtype, columns, largest):
    options = dict(largest=largest, x=data_type.FLOAT, w=data_type.FLOAT, bias=data_type.FLOAT)
    exact = Problem(3, columns, **options)
    problem = Problem(3, columns, y=dtype, **options)
    for p in (exact, problem):
        p.buffers[B][:] = np.linspace(-6e4, 6e4, columns)  # some beyond what FP8 holds
        p.buffers[B][0] = np.inf
        p.buffers[B][-1] = np.nan
    limit = dtype.facts.max
    values = exact.run(run_on_cpu)
    expected = np.clip(values, -limit, limit).astype(NUMPY[dtype]).view(np.uint8)
    expected[np.isnan(values)] = 0x7F
    np.testing.assert_array_equal(problem.run(run_on_cpu).view(np.uint8), expected)


@pytest.mark.parametrize(
    "rows, columns, x", [(1, 16, "BFLOAT16"), (3, 48, "FLOAT"), (3, 64, "HALF"), (2, 1040, "FLOAT")]
)
def test_nvfp4_is_the_float32_result_quantized(run_on_cpu, rows, columns, x):
    options = dict(x=data_type[x], w=data_type.FLOAT, program=Program())
    exact = Problem(rows, columns, **options)
    problem = Problem(rows, columns, y=data_type.FP4_E2M1, **options)
    for p in (exact, problem):
        p.buffers[X][0, :16] = 0
        if rows > 1:
            p.buffers[W][16:32] = np.geomspace(1e-6, 1e-3, 16)  # scales around the smallest
            p.buffers[X][1, 5] = np.nan
    values = exact.run(run_on_cpu)
    blocks = values.reshape(rows, -1, 16)
    amax = np.abs(blocks).max(axis=2)
    scales = np.minimum(amax / np.float32(6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    wide = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.clip(np.where(wide == 0, np.float32(0), blocks / wide), -6, 6)
    codes = np.where(np.isnan(quotient), 7, quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)
    codes = codes.reshape(rows, columns).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4

    np.testing.assert_array_equal(problem.run(run_on_cpu), packed)
    bits = np.where(np.isnan(amax), 0x7F, scales.view(np.uint8))
    np.testing.assert_array_equal(problem.buffers[SCALES], bits)

    # The bound that the engine's notes state.
    stored = quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * wide
    error = np.abs(stored.astype(np.float64) - blocks).max(axis=2)
    finite = ~np.isnan(amax)
    assert (error <= np.maximum(wide[..., 0], amax - 6 * wide[..., 0]) * (1 + 1e-6))[finite].all()


@pytest.mark.parametrize("x, columns", [("BFLOAT16", 111), ("BFLOAT16", 1024), ("FLOAT", 3420)])
def test_bits_do_not_depend_on_knobs_or_rows(run_on_cpu, x, columns):
    problem = Problem(5, columns, x=data_type[x], inverse_rms=True)
    knobs = [(1024, 1024, 0), (512, 512, 2), (256, 256, 0), (128, 512, 0), (64, 128, 1), (32, 32, 0), (16, 64, 2)]
    results = []
    for choice in knobs:
        choice = RmsNormKnobs(*choice)
        if ENGINE.illegal(problem.facts, choice, DEVICE) is None:
            results.append((problem.run(run_on_cpu, choice).tobytes(), problem.buffers[RMS].tobytes()))
    assert len(results) >= 5
    assert len(set(results)) == 1

    alone = Problem(1, columns, x=data_type[x], inverse_rms=True)
    alone.buffers[X][:], alone.buffers[W][:] = problem.buffers[X][3], problem.buffers[W]
    assert alone.run(run_on_cpu).tobytes() == problem.buffers[Y][3].tobytes()


@pytest.mark.parametrize("x, columns", [("BFLOAT16", 24593), ("FLOAT", 32768)])
def test_rows_that_are_read_twice(run_on_cpu, x, columns):
    problem = Problem(2, columns, x=data_type[x], w=data_type.FLOAT, y=data_type.FLOAT)
    assert any("read twice" in note for note in ENGINE.notes(problem.facts, None, DEVICE))
    assert_close(problem.run(run_on_cpu), problem.expected(), problem.y)


@pytest.mark.parametrize("columns", [1024, 32768])
def test_in_place(run_on_cpu, columns):
    problem = Problem(2, columns, x=data_type.FLOAT)
    assert ENGINE.in_place(problem.facts, None) == ((X, Y),)
    apart = problem.run(run_on_cpu)
    problem.buffers[Y] = problem.buffers[X]
    assert problem.run(run_on_cpu).tobytes() == apart.tobytes()


def test_nothing_between_rows_is_written(run_on_cpu):
    problem = Problem(4, 24, y=data_type.BFLOAT16, gap=8)
    problem.run(run_on_cpu)
    whole = np.lib.stride_tricks.as_strided(problem.buffers[Y].view(np.uint16), (3, 32), (64, 2))
    assert (whole[:, 24:] == 0x5A5A).all()


def test_no_rows_launches_nothing():
    problem = Problem(0, 64)
    assert ENGINE.launch(problem.facts, RmsNormKnobs(8, 128)).grid == 0
