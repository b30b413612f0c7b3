"""Functions made from text: Python that is written out for a function's parameters, where loops would take too long."""

import linecache
from collections.abc import Callable, Mapping


def written(what: str, name: str, text: str, names: Mapping[str, object] | None = None) -> Callable[..., object]:
    """The function `name` of a text, whose globals are `names`. what: how tracebacks call the text, which they show."""
    file = f"<graphfuse.functional {what}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(names or {})
    exec(compile(text, file, "exec"), space)
    return space[name]
