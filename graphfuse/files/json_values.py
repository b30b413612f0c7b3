"""Strict reading of untrusted JSON, with errors that name the place, and encodings of values that JSON lacks.

A float is {"float": its digits in base 16}, which is exact and includes infinities. A member of an enumeration is
{"enum": "KIND.MEMBER"}, a slice {"slice": [start, stop, step]}, a tuple a list. Reading makes no other objects.
"""

import enum
import json
from collections.abc import Sequence
from typing import NoReturn

from graphfuse.base import enums
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import SerializedError

_PLAIN = (bool, int, str, type(None))
_KINDS = {
    kind.__name__: kind
    for kind in (data_type, *vars(enums).values())
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and not kind.__name__.startswith("_")
}
_LONGEST = 60  # characters of a wrong value that an error shows


def parse(where: str, text: str | bytes) -> object:
    """The value of a JSON text. Raises SerializedError for any other text."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError includes JSONDecodeError and UnicodeDecodeError
        raise SerializedError(f"{where} is no JSON: {error}") from None


def text(value: object) -> str:
    """The shortest JSON text of a value, in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def field(where: str, data: object, name: str, *kinds: type) -> object:
    """A field of an object. Raises SerializedError unless its type is exactly one of `kinds`."""
    if type(data) is not dict:
        refuse(where, data, "an object")
    if name not in data:
        raise SerializedError(f"{where} has no {name}")
    value = data[name]
    if type(value) not in kinds:
        refuse(f"{where}: {name}", value, " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds))
    return value


def member(where: str, data: object, name: str, kind: type[enum.Enum]) -> enum.Enum:
    """The member of an enumeration that a field names."""
    value = field(where, data, name, str)
    if value not in kind.__members__:
        refuse(f"{where}: {name}", value, f"a name of {kind.__name__}")
    return kind[value]


def integers(where: str, data: object, name: str) -> tuple[int, ...]:
    """A field that is a list of integers."""
    values = field(where, data, name, list)
    if any(type(value) is not int for value in values):
        refuse(f"{where}: {name}", values, "a list of integers")
    return tuple(values)


def encode(where: str, value: object) -> object:
    """The JSON form of a value. Raises SerializedError if it has none."""
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if _KINDS.get(type(value).__name__) is type(value):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if type(value) is slice:
        return {"slice": [encode(where, part) for part in (value.start, value.stop, value.step)]}
    if type(value) is tuple:
        return [encode(where, part) for part in value]
    refuse(where, value, "bool, int, float, str, None, members of graphfuse's enumerations, and tuples of them")


def decode(where: str, data: object) -> object:
    """The value of a JSON form. Tuples within tuples are not accepted."""
    if type(data) is list:
        return tuple(_decode_one(where, part) for part in data)
    return _decode_one(where, data)


def _decode_one(where: str, data: object) -> object:
    if type(data) in _PLAIN:
        return data
    if type(data) is dict and len(data) == 1:
        ((form, of),) = data.items()
        if form == "float" and type(of) is str:
            try:
                return float.fromhex(of)
            except (ValueError, OverflowError):
                refuse(where, of, "digits of a float in base 16")
        if form == "enum" and type(of) is str:
            kind, _, name = of.partition(".")
            if kind in _KINDS and name in _KINDS[kind].__members__:
                return _KINDS[kind][name]
        if form == "slice" and type(of) is list and len(of) == 3 and all(type(n) in (int, type(None)) for n in of):
            return slice(*of)
    refuse(where, data, "a number, a text, a list, or an object of float, enum or slice")


def refuse(where: str, value: object, accepted: str) -> NoReturn:
    """Raises SerializedError for a value that is not accepted. A long value is shown in part."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # repr fails on integers of thousands of digits and on very deep lists
        shown = f"a very large {type(value).__name__}"
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    raise SerializedError(f"{where} is {shown}; accepted: {accepted}")


def known(where: str, given: Sequence[str], accepted: Sequence[str]) -> None:
    """Raises SerializedError unless all `given` names are accepted."""
    for name in given:
        if name not in accepted:
            refuse(where, name, ", ".join(accepted) or "none")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "an integer",
    bool: "true or false",
    type(None): "null",
}
