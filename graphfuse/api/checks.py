"""Checks of arguments that several of a graph's methods have."""

from collections.abc import Mapping
from typing import Any

from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphNotSupportedError, GraphTypeError


def check_flag(what: str, value: object) -> None:
    if value is not True and value is not False:
        raise GraphTypeError(f"{what}: give True or False, got {value!r}")


def several(what: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise GraphTypeError(f"{what}: give a list, got {values!r}")
    return tuple(values)


def modes(what: str, given: object) -> tuple[heur_mode, ...]:
    """One mode, or a list of them."""
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not found or not all(isinstance(mode, heur_mode) for mode in found):
        raise GraphTypeError(f"{what} must be a heur_mode or a list of them, got {given!r}")
    return found


def check_unasked(where: str, refused: Mapping[str, tuple[object, str]], given: Mapping[str, object]) -> None:
    """GraphNotSupportedError for an argument of cuDNN's that asks for what is not here.

    refused: by argument the value beside None that asks for nothing, and what takes the place of any other.
    """
    for argument, (nothing, instead) in refused.items():
        value = given.get(argument)
        if value is not None and (type(value) is not type(nothing) or value != nothing):
            raise GraphNotSupportedError(f"{where}: {argument} is {value!r}; instead: {instead}")
