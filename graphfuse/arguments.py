"""A launch's arguments as bytes, packed as C lays out a structure of them."""

import struct
from collections.abc import Callable, Sequence

from graphfuse import engine

_CTYPES = {"pointer": "Q", "int32": "i", "int64": "q", "float32": "f"}  # codes of `struct`
_CODES = {engine.Address: "pointer", engine.HostScalar: "float32", engine.Scratch: "pointer"}

Value = Callable[[engine.Buffers, int], float | int]


class Packing:
    """How the arguments of one launch are packed. offsets: where each begins, in bytes."""

    def __init__(self, arguments: Sequence[engine.Argument]):
        codes = [_code(a) for a in arguments]
        self._layout = struct.Struct("@" + "".join(codes))
        self._values = tuple(_VALUES[type(a)](a) for a in arguments)
        self.size = self._layout.size
        self.offsets = tuple(
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(code) for i, code in enumerate(codes)
        )

    def into(self, memory: object, buffers: engine.Buffers, scratch: int) -> None:
        """Fill `memory`, of at least `size` bytes. scratch: the address that Scratch offsets count from."""
        self._layout.pack_into(memory, 0, *[value(buffers, scratch) for value in self._values])


def _address(argument: engine.Address) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch: buffers.address(tensor)


def _host_scalar(argument: engine.HostScalar) -> Value:
    tensor = argument.tensor
    return lambda buffers, scratch: buffers.scalar(tensor)


def _scratch(argument: engine.Scratch) -> Value:
    offset = argument.offset
    return lambda buffers, scratch: scratch + offset


def _constant(argument: engine.Constant) -> Value:
    number = argument.value
    return lambda buffers, scratch: number


_VALUES = {
    engine.Address: _address,
    engine.HostScalar: _host_scalar,
    engine.Scratch: _scratch,
    engine.Constant: _constant,
}


def _code(argument: engine.Argument) -> str:
    return _CTYPES[argument.ctype if isinstance(argument, engine.Constant) else _CODES[type(argument)]]
