"""Keywords of cuDNN's frontend (1.32) for parameters that have another name here."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from graphfuse.base.errors import GraphTypeError

P = ParamSpec("P")
T = TypeVar("T")


def also(**theirs: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for methods to accept cuDNN's keywords. theirs: cuDNN's keyword -> name of the parameter."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in theirs.keys() & kwargs.keys():
                # args[0] is `self`. With further positional arguments, the parameter itself may be among them.
                if len(args) > 1 or theirs[name] in kwargs:
                    raise GraphTypeError(
                        f"{method.__name__}: {name} is cuDNN's name of {theirs[name]}; give one of them"
                    )
                kwargs[theirs[name]] = kwargs.pop(name)
            return method(*args, **kwargs)

        called.also = theirs  # type: ignore[attr-defined]
        return called

    return decorate
