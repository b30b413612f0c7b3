"""Rendering of a kernel file and its generated prelude to one self-contained translation unit.

A ``.cu`` is plain C++. ``#include "generated.cuh"`` stands for the prelude, and ``#include "graphfuse/NAME.cuh"`` for a
header of ``codegen.headers``. Each is inlined once, at its first include. There are no other includes. So compiling
needs no search path, and the text alone is the cache key.
"""

import re
from functools import cache, lru_cache
from importlib import resources

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]*)[">].*$')
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b")
_GENERATED = "generated.cuh"
_PREFIX = "graphfuse/"


@cache
def template(package: str, name: str) -> str:
    """The text of a file that is installed with a package. Raises FileNotFoundError if there is none."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def render(text: str, generated: str, name: str = "kernel.cu") -> str:
    """`text` with its includes inlined. generated: the prelude. name: of the file, for compile errors.

    Raises ValueError if an include is unknown, or if the prelude is not included exactly once.
    """
    lines: list[str] = []
    done: set[str] = set()

    def put(text: str, name: str) -> None:
        lines.append(f'#line 1 "{name}"')
        for passage, path, number in _passages(text):
            lines.extend(passage)
            if path:
                put_include(path, f"{name}:{number}")
                lines.append(f'#line {number + 1} "{name}"')

    def put_include(path: str, where: str) -> None:
        if path in done:
            if path == _GENERATED:
                raise ValueError(f"{where} includes {_GENERATED} a second time")
            return
        done.add(path)
        if path == _GENERATED:
            put(generated, path)
        elif path in headers():
            put(template("graphfuse.codegen.headers", path.removeprefix(_PREFIX)), path)
        else:
            raise ValueError(f"{where} includes {path!r}; known: {', '.join((_GENERATED, *headers()))}")

    put(text, name)
    if _GENERATED not in done:
        raise ValueError(f"{name} does not include {_GENERATED}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=128)
def _passages(text: str) -> tuple[tuple[tuple[str, ...], str, int], ...]:
    """(lines before an include, its path, its line number) for each include; last the lines after it, with path ""."""
    found, lines, number = list[tuple[tuple[str, ...], str, int]](), list[str](), 0
    for number, line in enumerate(text.splitlines(), start=1):
        if (include := _INCLUDE.match(line) if "#" in line else None) is not None:
            found.append((tuple(lines), include[1], number))
            lines = []
        else:  # an empty line replaces `#pragma once`, which a main file must not have, to keep line numbers
            lines.append("" if "#" in line and _ONCE.match(line) else line)
    return (*found, (tuple(lines), "", number))


@cache
def headers() -> tuple[str, ...]:
    """Paths of the headers that a kernel may include."""
    names = (entry.name for entry in resources.files("graphfuse.codegen.headers").iterdir())
    return tuple(sorted(_PREFIX + name for name in names if name.endswith(".cuh")))
