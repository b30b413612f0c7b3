"""Makes functions from generated Python, which tracebacks show. Their bodies are data: lines, and blocks of these."""

import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType

from graphfuse.runtime.kept import make_room

Lines = Sequence["str | Lines"]
"""Lines of Python; a sequence among them is a block, one level further in."""


def when(conditions: Sequence[str], *block: str) -> Lines:
    """Lines that run where one of the conditions holds; none where there are no conditions."""
    return [f"if {' or '.join(conditions)}:", block] if conditions else []


def trying(block: Lines, errors: str, *otherwise: str) -> Lines:
    """Lines that run, and others that run instead after one of these errors."""
    return ["try:", block, f"except ({errors}):", otherwise]


def misaligned(addresses: Sequence[str], alignment: int) -> str:
    """The condition that one of the addresses is no multiple of an alignment."""
    return f"({' | '.join(addresses)}) % {alignment}"


def clashing(n: int, apart: str, near: tuple[object, object], beside: str = "", *more: str) -> str:
    """The condition that two tensors share memory that they may not, which the name ``clashN`` tells exactly. apart:
    their distance. near: between which distances it is asked. beside: a further condition. more: what it is given
    before the distance."""
    return f"{near[0]} < {apart} < {near[1]}{beside} and clash{n}({', '.join((*more, apart))})"


def text(name: str, parameters: Sequence[str], *body: str | Lines) -> str:
    """The function as Python. body: its lines, of which some may come in sequences at the same level."""
    flat = itertools.chain.from_iterable([part] if isinstance(part, str) else part for part in body)
    return "".join(f"{line}\n" for line in [f"def {name}({', '.join(parameters)}):", *_indented([*flat])])


def _indented(lines: Lines) -> Iterator[str]:
    for line in lines:
        yield from [f"    {line}"] if isinstance(line, str) else (f"    {inner}" for inner in _indented(line))


def written(what: str, name: str, text: str, names: Mapping[str, object]) -> Callable[..., object]:
    """The function `name` that a text of Python defines. names: its globals. what: names the text in tracebacks, which
    show its lines."""
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
