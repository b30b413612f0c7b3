"""Checks of the attributes and functions that a call of an op method is given, against the op table."""

from collections.abc import Callable, Mapping
from typing import Any

from graphfuse.api.checks import check_not_offered
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphTypeError
from graphfuse.op_graph.tensor import checked_number, plain_number
from graphfuse.ops import Attribute, Op


def attributes(where: str, op: Op, given: Mapping[str, object]) -> dict[str, Any]:
    """The value of each attribute of `op`, from the arguments by name or from defaults.

    where: the node that errors name. Raises GraphTypeError for a wrong type, GraphNotSupportedError for an option of
    cuDNN that is not offered.
    """
    check_not_offered(where, op.not_offered, given)
    return {a.name: _value(where, op, a, given.get(a.name, a.default)) for a in op.attributes}


def functions(where: str, op: Op, given: Mapping[str, object]) -> dict[str, Callable[..., object]]:
    """Functions that were given for the arguments of `op` that take functions, by name."""
    found: dict[str, Callable[..., object]] = {}
    for name in op.functions:
        value = given.get(name)
        if callable(value):
            found[name] = value
        elif value is not None:
            raise GraphTypeError(f"{where}: {name} must be a function of the graph and a tensor, got {value!r}")
    return found


def order(op: Op) -> str:
    """Hint for an error about the order of the op's arguments; empty if it is not easily mistaken."""
    return f"; {op.order}" if op.order else ""


def _value(where: str, op: Op, a: Attribute, given: Any) -> Any:
    if given is None and not a.required:  # None is cuDNN's default of all optional attributes
        given = a.default
    if a.several:
        return None if given is None and not a.required else _all_of(where, a, given)
    given = plain_number(given)
    fits = isinstance(given, a.types) and (bool in a.types or not isinstance(given, bool))
    if not fits:
        accepted = " or ".join(t.__name__ for t in a.types)
        raise GraphTypeError(f"{where}: {a.name} must be {accepted}, got {given!r}{order(op)}")
    # Kernels compute with numbers in float32.
    return checked_number(f"{where}: {a.name}", given, data_type.FLOAT) if a.types == (float, int) else given


def _all_of(where: str, a: Attribute, given: object) -> tuple[object, ...]:
    value: Any = given
    try:
        values = tuple(value)
        if a.types == (int,):
            # Integers of numpy are accepted, too; a bool is no extent.
            values = tuple(v if isinstance(v, bool) else v.__index__() for v in values)
        fits = all(isinstance(v, a.types) and not isinstance(v, bool) for v in values)
    except (TypeError, AttributeError):
        fits = False
    if not fits:
        accepted = " or ".join(t.__name__ for t in a.types)
        raise GraphTypeError(f"{where}: {a.name} must be a sequence of {accepted}, got {value!r}")
    return values
