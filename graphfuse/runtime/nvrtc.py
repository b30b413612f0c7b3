"""From CUDA C++ source to a cubin. Needs NVRTC, but no device."""

import re
from typing import TextIO

from graphfuse.base.errors import KernelCompileError
from graphfuse.runtime import toolkit

OPTIONS = {"std": "c++17", "fma": False, "lineinfo": True}
"""Options of every program. fma is off: which products the compiler contracts depends on the
code around them, and bits must not; kernels write fmaf where they mean it."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b", re.MULTILINE)


def needs(source: str) -> toolkit.Toolkit:
    """The toolkit that compiles `source`: with headers only if it includes any. Raises ToolkitNotFoundError."""
    found = toolkit.find()
    return toolkit.with_headers(found) if _INCLUDE.search(source) else found


def compile(source: str, arch: str, name: str, warnings: TextIO | None = None) -> bytes:
    """Compile to machine code.

    arch: as NVRTC takes it ("sm_90a"). name: what messages and profilers call the source.
    warnings: where NVRTC's go, if it has any.
    Raises ToolkitNotFoundError before compiling, or KernelCompileError with NVRTC's log, which shows the lines it is
    about (attributes `log` and `source`).
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
    except Exception as error:  # cuda.core's classes and NVRTC's own; whichever, no cubin came out
        log = str(error).strip("\0 \n")
    # Out here `error` is gone, and no local is the new one: either would hold the program in a
    # cycle, and cuda.core complains on standard error when the garbage collector frees one.
    raise _failure(f"NVRTC {kit.version} did not compile {name!r} for {arch}:\n{log}", log, source)


def _failure(what: str, log: str, source: str) -> KernelCompileError:
    failure = KernelCompileError(what)
    failure.log, failure.source = log, source
    return failure
