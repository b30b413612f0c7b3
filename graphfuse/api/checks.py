"""Checks of arguments that several methods of a graph have in common."""

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
    """Heuristic modes that were given as one mode or a list. Raises GraphTypeError for anything else."""
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not found or not all(isinstance(mode, heur_mode) for mode in found):
        raise GraphTypeError(f"{what} must be a heur_mode or a list of them, got {given!r}")
    return found


def check_not_offered(where: str, refused: Mapping[str, tuple[object, str]], given: Mapping[str, object]) -> None:
    """Raises GraphNotSupportedError if an argument of cuDNN's requests a feature that is not offered.

    refused: for each argument, the value besides None that requests nothing, and what to use instead of other values.
    """
    for argument, (nothing, instead) in refused.items():
        value = given.get(argument)
        if value is not None and (type(value) is not type(nothing) or value != nothing):
            raise GraphNotSupportedError(f"{where}: {argument} is {value!r}; instead: {instead}")
