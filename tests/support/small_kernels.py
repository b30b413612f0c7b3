"""One small kernel for each header, with a problem, the exact result and where it runs."""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphfuse.codegen.render import render
from graphfuse.contract.engine import Address, Constant, Launch

_FOLDER = Path(__file__).parents[1] / "emulator" / "kernels"


@dataclass(frozen=True)
class Case:
    """A kernel (a file of tests/emulator/kernels) with constants, and numpy arrays by the number of their argument.

    expected: arguments -> what those that the kernel writes hold afterwards. sm: the oldest chip.
    """

    kernel: str
    constants: Mapping[str, int]
    launch: Launch
    arrays: Mapping[int, np.ndarray]
    expected: Callable[[Mapping[int, np.ndarray]], Mapping[int, np.ndarray]]
    sm: int = 80

    @property
    def text(self) -> str:
        return (_FOLDER / f"{self.kernel}.cu").read_text()

    def source(self, text: str | None = None) -> str:
        prelude = "".join(f"constexpr int {name} = {value};\n" for name, value in self.constants.items())
        return render(text or self.text, prelude, f"{self.kernel}.cu")


def _warp() -> Case:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 50, (3, 96), dtype=np.uint32)
    values[1, :32] += 2

    def expected(arrays):
        lanes = arrays[0].reshape(-1, 32)
        index = np.arange(32)
        ballot = ((lanes % 3 == 0).astype(np.uint64) << index.astype(np.uint64)).sum(axis=1, dtype=np.uint64)
        rows = [
            np.repeat(ballot.astype(np.uint32), 32).reshape(-1, 32),
            np.repeat((lanes == 7).any(axis=1), 32).reshape(-1, 32),
            np.repeat((lanes > 1).all(axis=1), 32).reshape(-1, 32),
            lanes[:, index ^ 5],
            lanes[:, np.where(index + 3 < 32, index + 3, index)],
            np.take_along_axis(lanes, lanes.astype(np.int64) % 32, axis=1),
            lanes[:, (index + 1) % 32],
        ]
        return {1: np.stack(rows, axis=2).astype(np.uint32).reshape(arrays[1].shape)}

    return Case(
        "warp",
        {"THREADS": 96},
        Launch(3, 96, (Address(0), Address(1))),
        {0: values, 1: np.zeros((3, 96, 7), np.uint32)},
        expected,
    )


def _async_copy(width: int) -> Case:
    threads, steps, words = 64, 5, width // 4
    row = np.random.default_rng(2).integers(-99, 99, (2, steps, threads * words)).astype(np.float32)
    return Case(
        "async_copy",
        {"THREADS": threads, "STEPS": steps, "BYTES": width},
        Launch(2, threads, (Address(0), Address(1)), shared_bytes=2 * threads * width),
        {0: row, 1: np.zeros((2, threads * words), np.float32)},
        lambda arrays: {1: arrays[0].sum(axis=1)},
    )


def _bulk_copy() -> Case:
    columns, rows = 200, 7
    x = np.random.default_rng(3).integers(-99, 99, (2, rows, columns)).astype(np.float32)
    return Case(
        "bulk_copy",
        {"THREADS": 64, "COLUMNS": columns},
        Launch(2, 64, (Address(0), Address(1), Constant("int32", rows)), shared_bytes=2 * columns * 4 + 16),
        {0: x, 1: np.zeros((2, columns), np.float32)},
        lambda arrays: {1: arrays[0].sum(axis=1)},
        sm=90,
    )


def _cluster() -> Case:
    size, threads = 4, 64
    x = np.random.default_rng(4).integers(-99, 99, (2, size, threads)).astype(np.float32)

    def expected(arrays):
        before = np.float32((np.arange(size) - 1) % size)[None, :, None]
        return {
            1: np.broadcast_to(arrays[0].sum(axis=1, keepdims=True), x.shape),
            2: np.broadcast_to(before, x.shape),
        }

    return Case(
        "cluster",
        {"THREADS": threads},
        Launch(2 * size, threads, (Address(0), Address(1), Address(2)), cluster=size, shared_bytes=threads * 4),
        {0: x, 1: np.zeros_like(x), 2: np.zeros_like(x)},
        expected,
        sm=90,
    )


def _send() -> Case:
    size, threads, rows = 4, 32, 4
    x = np.random.default_rng(5).integers(-99, 99, (2, size, rows, threads)).astype(np.float32)
    weights = np.arange(1, size + 1, dtype=np.float32)[:, None, None]
    return Case(
        "send",
        {"THREADS": threads, "CTAS": size},
        Launch(2 * size, threads, (Address(0), Address(1), Constant("int32", rows)), cluster=size),
        {0: x, 1: np.zeros_like(x)},
        lambda arrays: {1: np.broadcast_to((arrays[0] * weights).sum(axis=1, keepdims=True), x.shape)},
        sm=90,
    )


def _grid() -> Case:
    ctas, threads = 5, 32
    counts = np.frombuffer(struct.pack("@QIIf4x", 3, 4, 0, 1.0), np.uint8).copy()

    def expected(arrays):
        total = arrays[0].sum()
        sums = np.float32([total, total + ctas])
        after = struct.pack("@QIIf4x", 3 + (2 * ctas << 32), 4 + 2 * ctas, 7, 1.0 + ctas)
        return {
            2: np.broadcast_to(sums[:, None, None], arrays[2].shape),
            3: np.frombuffer(after, np.uint8),
        }

    return Case(
        "grid",
        {"THREADS": threads},
        Launch(ctas, threads, tuple(Address(i) for i in range(4)), cooperative=True),
        {
            0: np.arange(ctas, dtype=np.float32),
            1: np.zeros(ctas, np.float32),
            2: np.zeros((2, ctas, threads), np.float32),
            3: counts,
        },
        expected,
    )


CASES = {
    "warp": _warp(),
    "async_copy 4": _async_copy(4),
    "async_copy 8": _async_copy(8),
    "async_copy 16": _async_copy(16),
    "bulk_copy": _bulk_copy(),
    "cluster": _cluster(),
    "send": _send(),
    "grid": _grid(),
}


def changed(case: Case, **fields) -> Case:
    """The case with other fields of its launch."""
    return dataclasses.replace(case, launch=dataclasses.replace(case.launch, **fields))
