"""True if the functions that scalar forms call are declared, for a GPU and for a plain C++ compiler."""

import re
from functools import cache

from graphfuse.base.errors import MalformedError
from graphfuse.codegen.render import template

HEADERS = ("math.cuh", "platform.cuh")
"""What declares them; C's own functions, too."""

_COMMENT = re.compile(r"//.*")
_DECLARED = re.compile(r"^(?:GF_DEVICE (?:constexpr )?)?\w+ (\w+)\(", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w}])((?:\w+::)*[A-Za-z_]\w*)\(")


@cache
def check_form(name: str, form: str) -> None:
    """MalformedError where the scalar form of op `name` calls what no header declares."""
    if unknown := sorted(set(_CALLED.findall(form)) - _functions()):
        raise MalformedError(
            f"op {name!r}: its scalar form {form!r} calls {', '.join(unknown)}, which codegen/headers/math.cuh does "
            f"not declare; accepted: {', '.join(sorted(_functions()))}. It declares functions of C's own, too"
        )


@cache
def _functions() -> frozenset[str]:
    """The functions that headers declare, as forms write them."""
    found: set[str] = set()
    for header in HEADERS:
        outside, *inside = _COMMENT.sub("", template("graphfuse.codegen.headers", header)).split("namespace gf {")
        found |= {*_DECLARED.findall(outside), *(f"gf::{name}" for part in inside for name in _DECLARED.findall(part))}
    return frozenset(found)
