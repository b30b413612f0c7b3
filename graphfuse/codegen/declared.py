"""True if the functions that scalar forms call are declared, for a GPU and for a plain C++ compiler."""

import re
from functools import cache

from graphfuse.base.errors import MalformedError
from graphfuse.codegen.render import template

INCLUDED = ("math.cuh", "platform.cuh")
"""What declares them in every kernel; C's own functions, too."""
HEADERS = (*INCLUDED, "c_functions.cuh")

_COMMENT = re.compile(r"//.*")
_DECLARED = re.compile(r"^(?:GF_DEVICE (?:constexpr )?)?\w+ (\w+)\(", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w}])((?:\w+::)*[A-Za-z_]\w*)\(")


@cache
def check_form(name: str, form: str) -> None:
    """MalformedError where the scalar form of op `name` calls what no header declares."""
    if unknown := sorted(set(_CALLED.findall(form)) - _functions().keys()):
        raise MalformedError(
            f"op {name!r}: its scalar form {form!r} calls {', '.join(unknown)}, which codegen/headers/math.cuh does "
            f"not declare; accepted: {', '.join(sorted(_functions()))}. It declares functions of C's own, too"
        )


@cache
def headers(form: str) -> frozenset[str]:
    """Headers that declare what a form calls, beyond those that kernels include."""
    return frozenset(_functions()[name] for name in _CALLED.findall(form) if name in _functions()) - {*INCLUDED}


@cache
def _functions() -> dict[str, str]:
    """The headers that declare functions, by the function as forms write it."""
    found: dict[str, str] = {}
    for header in HEADERS:
        outside, *inside = _COMMENT.sub("", template("graphfuse.codegen.headers", header)).split("namespace gf {")
        found |= dict.fromkeys(_DECLARED.findall(outside), header)
        found |= {f"gf::{name}": header for part in inside for name in _DECLARED.findall(part)}
    return found
