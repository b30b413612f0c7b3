"""A launch's arguments as bytes, packed as C lays out a structure of them."""

import struct

from graphfuse.contract import engine

CTYPES = {"pointer": "Q", "int32": "i", "int64": "q", "float32": "f"}
"""What arguments may be in C, by name: codes of ``struct``."""

_CODES = {engine.Address: "pointer", engine.HostScalar: "float32", engine.Scratch: "pointer", engine.RowCount: "int64"}


class Packing:
    """Packing of one launch's arguments. layout: of all together. offsets: first byte of each."""

    def __init__(self, launch: engine.Launch):
        codes = [CTYPES[ctype(a)] for a in launch.arguments]
        self.layout = struct.Struct("@" + "".join(codes))
        self.size = self.layout.size
        self.offsets = tuple(
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(code) for i, code in enumerate(codes)
        )


def ctype(argument: engine.Argument) -> str:
    """C type of the argument."""
    return argument.ctype if isinstance(argument, engine.Constant) else _CODES[type(argument)]
