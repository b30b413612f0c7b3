"""Kernels as host code: renders an engine's source, compiles it with g++ and runs it on numpy buffers."""

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np
import pytest

from graphfuse.engine import Address, Constant, HostScalar

_SHIM = Path(__file__).with_name("cpu_threads.cpp")
_CTYPES = {"pointer": ctypes.c_void_p, "int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """source, entry -> shared library that runs the kernel; one compile per distinct source."""
    folder = tmp_path_factory.mktemp("kernels")
    libraries: dict[str, ctypes.CDLL] = {}

    def compile_(source: str, entry: str) -> ctypes.CDLL:
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        if key not in libraries:
            unit = folder / f"{key}.cpp"
            unit.write_text(f'{source}\n#define KERNEL {entry}\n#line 1 "{_SHIM.name}"\n{_SHIM.read_text()}')
            library = unit.with_suffix(".so")
            flags = "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas".split()
            flags.append("-Wno-unused-parameter")  # of pointers that the problem does not have
            done = subprocess.run(["g++", *flags, str(unit), "-o", str(library), "-lm"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            libraries[key] = ctypes.CDLL(str(library))
        return libraries[key]

    return compile_


@pytest.fixture(scope="session")
def run_on_cpu(compiled):
    """Runs engine.source on numpy arrays by tensor id. Bytes outside them are out of bounds;
    only ids in `outputs` may be written."""

    def run(engine, facts, knobs, buffers, scalars, outputs):
        launch = engine.launch(facts, knobs)
        library = compiled(engine.source(facts, knobs), engine.entry)
        library.forget_buffers()
        for tensor, array in buffers.items():
            address, nbytes = _extent(array)
            library.allow_buffer(ctypes.c_void_p(address), ctypes.c_uint64(nbytes), tensor in outputs)

        def box(argument):
            match argument:
                case Address(tensor):
                    return ctypes.c_void_p(buffers[tensor].ctypes.data)
                case HostScalar(tensor):
                    return ctypes.c_float(scalars[tensor])
                case Constant(ctype, value):
                    return _CTYPES[ctype](value)
            raise AssertionError(argument)

        boxes = [box(argument) for argument in launch.arguments]
        pointers = (ctypes.c_void_p * len(boxes))(*(ctypes.addressof(b) for b in boxes))
        library.run(launch.grid, launch.block, pointers)

    return run


def _extent(array: np.ndarray) -> tuple[int, int]:
    """First byte and number of bytes from the first element to the end of the last."""
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    return low, high - low
