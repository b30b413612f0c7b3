"""Checks of arguments that several of a graph's methods have."""

from typing import Any

from graphfuse.errors import GraphTypeError


def check_flag(what: str, value: object) -> None:
    if value is not True and value is not False:
        raise GraphTypeError(f"{what}: give True or False, got {value!r}")


def several(what: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise GraphTypeError(f"{what}: give a list, got {values!r}")
    return tuple(values)
