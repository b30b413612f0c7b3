"""From CUDA C++ source to a cubin. Needs NVRTC, but no device."""

import re

from graphfuse.errors import KernelCompileError
from graphfuse.runtime import toolkit

OPTIONS = {"std": "c++17", "fma": False, "lineinfo": True}
"""Options of every program. fma is off: which products the compiler contracts depends on the
code around them, and bits must not; kernels write fmaf where they mean it."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b", re.MULTILINE)
_ERROR_LINE = re.compile(r"^[^\n]*?\((\d+)\): (?:catastrophic )?error", re.MULTILINE)
_AROUND = 3


def needs(source: str) -> toolkit.Toolkit:
    """The toolkit that compiles `source`: with headers only if it includes any. Raises ToolkitNotFoundError."""
    found = toolkit.find()
    return toolkit.with_headers(found) if _INCLUDE.search(source) else found


def compile(source: str, arch: str, name: str) -> bytes:
    """Compile to machine code.

    arch: as NVRTC takes it ("sm_90a"). name: what messages and profilers call the source.
    Raises ToolkitNotFoundError before compiling, or KernelCompileError with NVRTC's log
    and the lines it is about (attributes `log` and `source` hold all of both).
    """
    toolkit.load()
    kit = needs(source)
    from cuda.core import Program, ProgramOptions

    headers: dict[str, object] = {}
    if kit.include_dirs:
        headers["include_path"] = [str(path) for path in kit.include_dirs]
    elif kit.bundled:
        headers["use_bundled_headers"] = True
    try:
        program = Program(source, "c++", ProgramOptions(name=name, arch=arch, **OPTIONS, **headers))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core's classes and NVRTC's own; whichever, no cubin came out
        log = str(error).strip()
    # Out here `error` is gone: it holds the program in its frames, and cuda.core complains
    # on standard error when the garbage collector has to free one.
    raise _failure(f"NVRTC {kit.version} did not compile {name!r} for {arch}", source, log)


def _failure(what: str, source: str, log: str) -> KernelCompileError:
    failure = KernelCompileError(f"{what}:\n{log}\n\nsource:\n{_excerpt(source, log)}")
    failure.log, failure.source = log, source
    return failure


def _excerpt(source: str, log: str) -> str:
    """The lines around each error of the log, numbered; the beginning where the log names none."""
    lines = source.splitlines()
    wrong = {int(number) for number in _ERROR_LINE.findall(log)} & set(range(1, len(lines) + 1))
    near = {n + d for n in wrong for d in range(-_AROUND, _AROUND + 1)} or set(range(1, 11))
    shown = sorted(near & set(range(1, len(lines) + 1)))
    out = []
    for before, number in zip([None, *shown], shown, strict=False):
        if before is not None and number > before + 1:
            out.append("   ...")
        out.append(f"{'>' if number in wrong else ' '} {number:5d} | {lines[number - 1]}")
    return "\n".join(out)
