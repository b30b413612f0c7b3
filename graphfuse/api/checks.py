"""Checks of arguments that several of a graph's methods have."""

from collections.abc import Mapping
from typing import Any

from graphfuse.base.cudnn_names import KEYWORDS
from graphfuse.base.errors import GraphNotSupportedError, GraphTypeError


def check_flag(what: str, value: object) -> None:
    if value is not True and value is not False:
        raise GraphTypeError(f"{what}: give True or False, got {value!r}")


def several(what: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple | set | frozenset):
        raise GraphTypeError(f"{what}: give a list, got {values!r}")
    return tuple(values)


def check_unasked(where: str, given: Mapping[str, object]) -> None:
    """GraphNotSupportedError for an argument of cuDNN's that asks for what is not here. given: the value of each."""
    for argument, value in given.items():
        asking_for_nothing, instead = KEYWORDS[argument]
        if type(value) is not type(asking_for_nothing) or value != asking_for_nothing:
            raise GraphNotSupportedError(f"{where}: {argument} is {value!r}; instead: {instead}")
