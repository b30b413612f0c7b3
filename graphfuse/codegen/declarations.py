"""Check that the functions that scalar forms call are declared in headers, for GPUs and for plain C++."""

import re
from functools import cache

from graphfuse.base.errors import MalformedError
from graphfuse.codegen.render import template

INCLUDED = ("math.cuh", "platform.cuh")
"""Headers that every kernel includes. They also declare functions of C."""
HEADERS = (*INCLUDED, "c_functions.cuh")

_COMMENT = re.compile(r"//.*")
_DECLARED = re.compile(r"^(?:GF_DEVICE (?:constexpr )?)?\w+ (\w+)\(", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w}])((?:\w+::)*[A-Za-z_]\w*)\(")


@cache
def check_form(name: str, form: str) -> None:
    """Raises MalformedError if the scalar form of op `name` calls a function that no header declares."""
    if unknown := sorted(set(_CALLED.findall(form)) - _functions().keys()):
        raise MalformedError(
            f"op {name!r}: its scalar form {form!r} calls {', '.join(unknown)}, which codegen/headers/math.cuh does "
            f"not declare; accepted: {', '.join(sorted(_functions()))}. It declares functions of C's own, too"
        )


@cache
def headers(form: str) -> frozenset[str]:
    """Headers that a form needs in addition to `INCLUDED`."""
    return frozenset(_functions()[name] for name in _CALLED.findall(form) if name in _functions()) - {*INCLUDED}


@cache
def _functions() -> dict[str, str]:
    """Name of a function, as forms write it -> header that declares it."""
    found: dict[str, str] = {}
    for header in HEADERS:
        outside, *inside = _COMMENT.sub("", template("graphfuse.codegen.headers", header)).split("namespace gf {")
        found |= dict.fromkeys(_DECLARED.findall(outside), header)
        found |= {f"gf::{name}": header for part in inside for name in _DECLARED.findall(part)}
    return found
