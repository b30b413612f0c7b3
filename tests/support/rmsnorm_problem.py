"""RMSNorm problems on numpy arrays, and running the kernel on them: in this process, or under sanitizers."""

import dataclasses

import ml_dtypes
import numpy as np

from graphfuse.base.device import for_arch
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.engines.rows import RowEngine
from graphfuse.rows.steps import Chain, Scalar, Step
from support import emulation
from support.described import Described, Tensor

ENGINE = RowEngine()
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
SWISH = (Step("swish", (("input", Chain(0)),), (("swish_beta", 1.5),)),)
# y * factor (float16 in device memory) + offset (by value)
SCALED = (
    *SWISH,
    Step("scale", (("input", Chain(1)), ("scale", Scalar(FACTOR, "factor", data_type.HALF, False)))),
    Step("add", (("a", Chain(2)), ("b", Scalar(OFFSET, "offset", data_type.FLOAT, True)))),
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
    program: tuple[Step, ...] = SWISH
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
        self.facts = Described(
            rows=self.rows,
            columns=self.columns,
            input=self.tensor(X, self.x),
            weight=dataclasses.replace(self.tensor(W, self.w), row_stride=None),
            bias=dataclasses.replace(self.tensor(B, self.bias), row_stride=None) if self.bias else None,
            epsilon=Scalar(EPS, "epsilon", data_type.FLOAT, True),
            epilogue=self.program,
            output=self.tensor(Y, self.y, row),
            inverse_rms=Tensor(RMS, "inverse", data_type.FLOAT, 1) if self.inverse_rms else None,
            block_scale=self.tensor(SCALES, data_type.FP8_E4M3) if fp4 else None,
            block_size=16 if fp4 else 0,
        ).facts()

    def matrix(self, dtype, columns, rows=None):
        """Rows with the problem's gap between them, `offset` elements after a 16-byte boundary."""
        rows = self.rows if rows is None else rows
        item = NUMPY[dtype]
        raw = np.full((rows * (columns + self.gap) + self.offset + 16) * item.itemsize + 16, 0x5A, np.uint8)
        start = -raw.ctypes.data % 16 + self.offset * item.itemsize
        flat = raw[start : start + rows * (columns + self.gap) * item.itemsize].view(item)
        return flat.reshape(rows, columns + self.gap)[:, :columns]

    def tensor(self, tensor, dtype, elements_per_item=1):
        array = self.buffers[tensor]
        stride = array.strides[0] // array.itemsize * elements_per_item if array.ndim == 2 else 0
        return Tensor(tensor, "t", dtype, stride, 1, array.ctypes.data & -array.ctypes.data)

    def expected(self):
        """Values before storage, in float64."""
        x, w = self.buffers[X].astype(np.float64), self.buffers[W].astype(np.float64)
        self.expected_inverse = 1 / np.sqrt((x * x).mean(axis=1) + 1e-5)
        y = x * self.expected_inverse[:, None] * w
        if self.bias:
            y = y + self.buffers[B].astype(np.float64)
        if self.program:
            y = y / (1 + np.exp(-1.5 * y))
        if self.program is SCALED:
            y = y * 0.75 + 0.125
        return y

    def plan(self, knobs=None):
        """(source, entry, launch, arrays, scalars) of the kernel with these knobs, or the ones proposed first."""
        assert ENGINE.why_not(self.facts, DEVICE) is None
        knobs = knobs or ENGINE.propose(self.facts, DEVICE, heur_mode.A)[0]
        assert ENGINE.illegal(self.facts, knobs, DEVICE) is None
        buffers = {t: self.buffers[t] for t in self.buffers if t != FACTOR or self.program is SCALED}
        launch = ENGINE.launch(self.facts, knobs)
        return ENGINE.source(self.facts, knobs), ENGINE.entry, launch, buffers, self.scalars

    def run(self, knobs=None):
        """What the kernel stores, as it is stored."""
        emulation.run(*self.plan(knobs))
        return self.buffers[Y].copy()


def assert_close(stored, expected, dtype):
    """Within one unit of the stored type, or a few of float32, of the float64 result."""
    digits = {data_type.FLOAT: 2.0**-19, data_type.HALF: 2.0**-10, data_type.BFLOAT16: 2.0**-7}[dtype]
    np.testing.assert_allclose(stored.astype(np.float64), expected, rtol=digits, atol=2.0**-22)
