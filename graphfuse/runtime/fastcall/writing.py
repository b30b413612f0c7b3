"""Makes functions from generated Python text, which tracebacks show."""

import itertools
import linecache
from collections.abc import Callable, Mapping
from types import CodeType

from graphfuse.runtime.kept import make_room


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
