"""Packing of a launch's arguments to bytes, in the layout of a C structure."""

import struct

from graphfuse.contract import engine

CTYPES = {"pointer": "Q", "int32": "i", "int64": "q", "float32": "f"}
"""C types of arguments: name -> format code of ``struct``."""

_CODES = {engine.Address: "pointer", engine.HostScalar: "float32", engine.Scratch: "pointer", engine.RowCount: "int64"}


class Packing:
    """Packing of one launch's arguments. layout: ``struct`` of all. offsets: first byte of each."""

    def __init__(self, launch: engine.Launch):
        codes = [CTYPES[ctype(a)] for a in launch.arguments]
        self.layout = struct.Struct("@" + "".join(codes))
        self.size = self.layout.size
        self.offsets = tuple(
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(code) for i, code in enumerate(codes)
        )


def ctype(argument: engine.Argument) -> str:
    """Name of an argument's C type, a key of `CTYPES`."""
    return argument.ctype if isinstance(argument, engine.Constant) else _CODES[type(argument)]
