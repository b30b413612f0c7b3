"""Kinds of values that a traced function reads: what can be called, counted or changed."""

import inspect
from types import FunctionType

import torch

from graphfuse.torch.analysis.symbols import Named


def is_fixed(value: object) -> bool:
    """True for a value that cannot be changed in place."""
    try:
        return hash(value) is not None
    except TypeError:
        return False


def called_by(value: object) -> FunctionType | None:
    """Function that runs if an object is called, for a class with Python's usual attribute lookup; None for any
    other."""
    cls = type(value)
    usual = cls.__getattribute__ is object.__getattribute__ and not hasattr(cls, "__getattr__")
    found = inspect.getattr_static(cls, "__call__", None)
    return found if usual and isinstance(found, FunctionType) and not isinstance(value, torch.nn.Module) else None


def count_of_arguments(function: object) -> int | None:
    """Number of arguments of a function without defaults; None for any other."""
    value = function.value if isinstance(function, Named) and not function.is_method else function
    if not isinstance(value, FunctionType):
        return None
    code, is_open = value.__code__, inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    has_all = not code.co_flags & is_open and not code.co_kwonlyargcount and not value.__defaults__
    return code.co_argcount if has_all else None


def makes_activations(value: object) -> bool:
    """True if a value is transformers' table of activations, which makes a new module each time it is indexed."""
    return type(value).__module__ == "transformers.activations" and isinstance(value, dict)


def is_torchs(function: FunctionType) -> bool:
    return function.__module__.split(".")[0] == "torch" and "forward" not in function.__qualname__
