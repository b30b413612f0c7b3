"""Makes functions from generated Python. Their bodies are given as lines and blocks of lines. Tracebacks show them."""

import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType

from graphfuse.runtime.bounded_dict import make_room

Lines = Sequence["str | Lines"]
"""Lines of Python. A sequence among them is a block that is indented by one level."""


def when(conditions: Sequence[str], *block: str) -> Lines:
    """Lines of an if statement: `block` runs if one of the conditions holds. Empty without conditions."""
    return [f"if {' or '.join(conditions)}:", block] if conditions else []


def trying(block: Lines, errors: str, *otherwise: str) -> Lines:
    """Lines of a try statement: `otherwise` runs if `block` raises one of these errors."""
    return ["try:", block, f"except ({errors}):", otherwise]


def misaligned(addresses: Sequence[str], alignment: int) -> str:
    """Python condition that one of the addresses is no multiple of an alignment."""
    return f"({' | '.join(addresses)}) % {alignment}"


def clashing(n: int, apart: str, near: tuple[object, object], beside: str = "", *more: str) -> str:
    """Python condition that two tensors share memory that they may not. The function ``clashN`` checks that exactly.

    apart: expression of their distance. near: distances between which ``clashN`` is called. beside: a further
    condition. more: arguments of ``clashN`` before the distance."""
    return f"{near[0]} < {apart} < {near[1]}{beside} and clash{n}({', '.join((*more, apart))})"


def text(name: str, parameters: Sequence[str], *body: str | Lines) -> str:
    """Python text of a function. body: lines, or sequences of lines at the same level."""
    flat = itertools.chain.from_iterable([part] if isinstance(part, str) else part for part in body)
    return "".join(f"{line}\n" for line in [f"def {name}({', '.join(parameters)}):", *_indented([*flat])])


def _indented(lines: Lines) -> Iterator[str]:
    for line in lines:
        yield from [f"    {line}"] if isinstance(line, str) else (f"    {inner}" for inner in _indented(line))


def written(what: str, name: str, text: str, names: Mapping[str, object]) -> Callable[..., object]:
    """The function `name` that a Python text defines. names: its globals. what: the name of the text in tracebacks,
    which show its lines."""
    space = dict(names)
    exec(_compiled(what, text), space)
    return space[name]


_TEXTS_KEPT = 1024
_codes: dict[str, CodeType] = {}
_numbers = itertools.count()


def _compiled(what: str, text: str) -> CodeType:
    code = _codes.get(text)
    if code is None:
        file = f"<graphfuse {what}, {next(_numbers)}>"
        code = compile(text, file, "exec")
        for oldest in make_room(_codes, _TEXTS_KEPT):
            linecache.cache.pop(oldest.co_filename, None)
        _codes[text] = code
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return code
