"""A launch's arguments as bytes, packed as C lays out a structure of them."""

import struct
from collections.abc import Callable

from graphfuse import engine

CTYPES = {"pointer": "Q", "int32": "i", "int64": "q", "float32": "f"}
"""What arguments may be in C, by name: codes of ``struct``."""

_CODES = {engine.Address: "pointer", engine.HostScalar: "float32", engine.Scratch: "pointer", engine.RowCount: "int64"}

Value = Callable[[engine.Buffers, int, int], float | int]


class Packing:
    """How the arguments of one launch are packed. layout: of all together. offsets: where each begins, in bytes."""

    def __init__(self, launch: engine.Launch):
        codes = [_code(a) for a in launch.arguments]
        self.layout = struct.Struct("@" + "".join(codes))
        self._rows = launch.by_rows.rows if launch.by_rows else 0
        self._values = tuple(_VALUES[type(a)](a) for a in launch.arguments)
        self.size = self.layout.size
        self.offsets = tuple(
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(code) for i, code in enumerate(codes)
        )

    def into(self, memory: object, buffers: engine.Buffers, scratch: int) -> None:
        """Fill `memory`, of at least `size` bytes, for the number of rows that the launch was planned for.

        scratch: the address that Scratch offsets count from.
        """
        self.layout.pack_into(memory, 0, *[value(buffers, scratch, self._rows) for value in self._values])


def _address(argument: engine.Address) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch, rows: buffers.address(tensor)


def _host_scalar(argument: engine.HostScalar) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch, rows: buffers.scalar(tensor)


def _scratch(argument: engine.Scratch) -> Value:
    offset = argument.offset
    return lambda buffers, scratch, rows: scratch + offset


def _constant(argument: engine.Constant) -> Value:
    number = argument.value
    return lambda buffers, scratch, rows: number


def _row_count(argument: engine.RowCount) -> Value:
    return lambda buffers, scratch, rows: rows


_VALUES = {
    engine.Address: _address,
    engine.HostScalar: _host_scalar,
    engine.Scratch: _scratch,
    engine.Constant: _constant,
    engine.RowCount: _row_count,
}


def ctype(argument: engine.Argument) -> str:
    """What the argument is in C."""
    return argument.ctype if isinstance(argument, engine.Constant) else _CODES[type(argument)]


def _code(argument: engine.Argument) -> str:
    return CTYPES[ctype(argument)]
