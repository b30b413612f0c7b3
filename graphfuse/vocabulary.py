"""Graph methods made from the op table, shared by the user's graph and by pattern templates."""

import inspect
from collections.abc import Callable, Mapping

from graphfuse.errors import GraphTypeError
from graphfuse.ops import OPS, Op


def methods(call: Callable[..., object], trailing: Mapping[str, object]) -> Callable[[type], type]:
    """Class decorator: one method per op, `call(self, op, ports and attributes given, **trailing)`.

    trailing: extra keyword parameters of every method with their defaults.
    """

    def decorate(cls: type) -> type:
        for op in OPS.values():
            setattr(cls, op.name, _method(op, call, trailing))
        return cls

    return decorate


def _method(op: Op, call: Callable[..., object], trailing: Mapping[str, object]) -> Callable[..., object]:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # In the table's order. What stands after an optional port has a default, as Python wants it, and must be
    # given all the same if it is not optional itself.
    optional = next((i for i, p in enumerate(op.inputs) if p.optional), len(op.inputs))
    required = [a for a in op.attributes if a.required]
    rest = [a for a in op.attributes if not a.required]
    parameters = [
        *(inspect.Parameter(p.name, keyword) for p in op.inputs[:optional]),
        *(inspect.Parameter(p.name, keyword, default=None) for p in op.inputs[optional:]),
        *(inspect.Parameter(a.name, keyword, default=a.default) for a in (*required, *rest)),
        *(inspect.Parameter(name, keyword, default=default) for name, default in trailing.items()),
    ]
    signature = inspect.Signature([inspect.Parameter("self", keyword), *parameters])

    accepted = ", ".join(str(p) for p in parameters)

    def method(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
            absent = next((p for p in op.inputs if not p.optional and p.name not in bound.arguments), None)
            if absent is not None:
                raise TypeError(f"missing a required argument: {absent.name!r}")
        except TypeError as error:
            raise GraphTypeError(f"{op.name}: {error}; accepted: {accepted}") from None
        given = dict(bound.arguments)
        self = given.pop("self")
        extra = {name: given.pop(name, default) for name, default in trailing.items()}
        return call(self, op, given, **extra)

    method.__name__ = op.name
    method.__qualname__ = f"pygraph.{op.name}"
    method.__doc__ = op.doc
    method.__signature__ = signature
    return method
