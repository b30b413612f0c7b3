"""From CUDA C++ source to a cubin. Needs NVRTC, but no device."""

import re
from typing import TextIO

from graphfuse.errors import KernelCompileError
from graphfuse.runtime import toolkit

OPTIONS = {"std": "c++17", "fma": False, "lineinfo": True}
"""Options of every program. fma is off: which products the compiler contracts depends on the
code around them, and bits must not; kernels write fmaf where they mean it."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b", re.MULTILINE)
_LINE = re.compile(r'[ \t]*#[ \t]*line[ \t]+(\d+)[ \t]+"([^"]*)"')
_ERROR_PLACE = re.compile(r"^([^\n(]*)\((\d+)\): (?:catastrophic )?error", re.MULTILINE)
_AROUND = 3


def needs(source: str) -> toolkit.Toolkit:
    """The toolkit that compiles `source`: with headers only if it includes any. Raises ToolkitNotFoundError."""
    found = toolkit.find()
    return toolkit.with_headers(found) if _INCLUDE.search(source) else found


def compile(source: str, arch: str, name: str, warnings: TextIO | None = None) -> bytes:
    """Compile to machine code.

    arch: as NVRTC takes it ("sm_90a"). name: what messages and profilers call the source.
    warnings: where NVRTC's go, if it has any.
    Raises ToolkitNotFoundError before compiling, or KernelCompileError with NVRTC's log
    and the lines it is about (attributes `log` and `source` hold all of both).
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
    raise _failure(f"NVRTC {kit.version} did not compile {name!r} for {arch}", source, log, name)


def _failure(what: str, source: str, log: str, name: str) -> KernelCompileError:
    failure = KernelCompileError(f"{what}:\n{log}\n\nsource:\n{_excerpt(source, log, name)}")
    failure.log, failure.source = log, source
    return failure


def _excerpt(source: str, log: str, name: str) -> str:
    """The lines around each error of the log, numbered as the log does; the beginning where it names none."""
    lines = source.splitlines()
    places = _places(lines, name)
    wrong = {number for number, place in enumerate(places) if place in set(_ERROR_PLACE.findall(log))}
    near = {n + d for n in wrong for d in range(-_AROUND, _AROUND + 1)} or set(range(10))
    out: list[str] = []
    before = None
    for number in sorted(near & set(range(len(lines)))):
        file, line = places[number]
        if before is not None and number > before + 1:
            out.append("   ...")
        out.append(f"{'>' if number in wrong else ' '} {file}:{line} | {lines[number]}")
        before = number
    return "\n".join(out)


def _places(lines: list[str], name: str) -> list[tuple[str, str]]:
    """(file, line) that the compiler knows each line by: #line directives move it."""
    file, line, places = name, 1, []
    for text in lines:
        places.append((file, str(line)))
        directive = _LINE.match(text)
        line += 1
        if directive:
            line, file = int(directive[1]), directive[2]
    return places
