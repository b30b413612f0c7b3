"""Headers as host code: a piece of C++ that includes them, compiled with g++ to a shared library."""

import ctypes
import subprocess

import pytest

from graphfuse.codegen.render import render


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    """C++ text (with includes of our headers) -> ctypes library."""
    folder = tmp_path_factory.mktemp("headers")

    def build(text: str, generated: str = "") -> ctypes.CDLL:
        unit = folder / f"unit{len(list(folder.iterdir()))}.cpp"
        unit.write_text(render('#include "generated.cuh"\n' + text if not generated else text, generated))
        library = unit.with_suffix(".so")
        flags = "-std=c++17 -O2 -fPIC -shared -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas".split()
        done = subprocess.run(["g++", *flags, str(unit), "-o", str(library), "-lm"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))

    return build
