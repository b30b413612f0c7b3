"""Compiles CUDA C++ source to a cubin. It requires NVRTC, but no device."""

import re
from typing import TextIO

from graphfuse.base.errors import KernelCompileError
from graphfuse.runtime import toolkit

OPTIONS = {"std": "c++17", "fma": False, "lineinfo": True}
"""Options of every program. fma is off, as the compiler's choice of products to contract would depend on the code
around them, and bits must not. Kernels call fmaf explicitly."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b", re.MULTILINE)


def needs(source: str) -> toolkit.Toolkit:
    """The toolkit that compiles `source`: with headers only if it includes any. Raises ToolkitNotFoundError."""
    found = toolkit.find()
    return toolkit.with_headers(found) if _INCLUDE.search(source) else found


def compile(source: str, arch: str, name: str, warnings: TextIO | None = None) -> bytes:
    """Compile to machine code.

    arch: as NVRTC accepts it ("sm_90a"). name: the name of the source in messages and profilers. warnings: the file
    that NVRTC's warnings are written to. Raises ToolkitNotFoundError before compiling, or KernelCompileError with
    NVRTC's log and its source lines (attributes `log` and `source`).
    """
    toolkit.load()
    kit = needs(source)
    from graphfuse.runtime.cuda_core import Program, ProgramOptions

    headers: dict[str, object] = {}
    if kit.include_dirs:
        headers["include_path"] = [str(path) for path in kit.include_dirs]
    elif kit.bundled:
        headers["use_bundled_headers"] = True
    try:
        program = Program(source, "c++", ProgramOptions(name=name, arch=arch, **OPTIONS, **headers))
        return bytes(program.compile("cubin", logs=warnings).code)
    except Exception as error:  # classes of cuda.core and of NVRTC
        log = str(error).strip("\0 \n")
    # The failure is raised outside of the except block and without a local: `error` or such a local would keep the
    # program in a reference cycle, and cuda.core prints an error when the garbage collector frees one.
    raise _failure(f"NVRTC {kit.version} did not compile {name!r} for {arch}:\n{log}", log, source)


def _failure(what: str, log: str, source: str) -> KernelCompileError:
    failure = KernelCompileError(what)
    failure.log, failure.source = log, source
    return failure
