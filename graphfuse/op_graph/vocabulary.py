"""Graph methods generated from the op table, for the user's graph and for pattern templates."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from graphfuse.base.errors import GraphTypeError
from graphfuse.op_graph.positions import TRAILING
from graphfuse.ops import OPS, SPELLINGS, Op, Spelling

_POSITIONAL, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def methods(call: Callable[..., object], trailing: Mapping[str, object]) -> Callable[[type], type]:
    """Class decorator that adds a method for each op and spelling. A method calls `call(self, op, given, **trailing)`,
    with the ports and attributes given.

    trailing: extra parameters of every method, with their defaults.
    """

    def decorate(cls: type) -> type:
        for op in OPS.values():
            setattr(cls, op.name, _of_op(op, op.name, op.doc, call, trailing))
        for spelling in SPELLINGS.values():
            if spelling.parameters is None:
                method = _of_op(OPS[spelling.op], spelling.name, spelling.doc, call, trailing)
            else:
                method = _of_spelling(spelling, dict(spelling.parameters), call, trailing)
            setattr(cls, spelling.name, method)
        return cls

    return decorate


def _of_op(
    op: Op, name: str, doc: str, call: Callable[..., object], trailing: Mapping[str, object]
) -> Callable[..., object]:
    # In the table's order. Python requires defaults for all parameters after an optional port; `needed` has those that
    # must be given all the same.
    in_order = [port for port in op.inputs if not port.by_name]
    optional = next((i for i, p in enumerate(in_order) if p.optional), len(in_order))
    required = [a for a in op.attributes if a.required]
    rest = [a for a in op.attributes if not a.required]
    defaults = {**trailing, **op.inert_options}
    trailing_names = _trailing_names(op.name, defaults, trailing)
    parameters = [
        *(inspect.Parameter(p.name, _POSITIONAL) for p in in_order[:optional]),
        *(inspect.Parameter(p.name, _POSITIONAL, default=None) for p in in_order[optional:]),
        *(inspect.Parameter(a.name, _POSITIONAL, default=a.default) for a in (*required, *rest)),
        *(inspect.Parameter(name, _POSITIONAL, default=defaults[name]) for name in trailing_names),
        *(
            inspect.Parameter(name, _KEYWORD, default=only)
            for name, only in op.inert_options.items()
            if name not in trailing_names
        ),
        *(inspect.Parameter(name, _KEYWORD, default=None) for name in (*op.tuples, *op.given, *op.by_name)),
    ]
    needed = [p.name for p in op.inputs if not p.optional]
    return _method(
        name,
        doc,
        parameters,
        needed,
        trailing,
        lambda self, given, extra: call(self, op, _split_tuples(op, given), **extra),
    )


def _split_tuples(op: Op, given: Mapping[str, object]) -> dict[str, object]:
    """The given arguments, with tuples divided into their parts by name."""
    found = {name: value for name, value in given.items() if name not in op.tuples}
    for name in op.tuples:
        value = given.get(name)
        if value is None:
            continue
        forms = op.tuples[name]
        form = next((form for form in forms if _fits(op, form, value)), None)
        if form is None:
            accepted = " or ".join(f"({', '.join(part or 'unused' for part in form)})" for form in forms)
            raise GraphTypeError(f"{op.name}: {name} must be {accepted}, got {value!r}")
        found |= {part: one for part, one in zip(form, value, strict=True) if part}
    return found


def _fits(op: Op, form: tuple[str, ...], value: object) -> bool:
    """True if a tuple has as many parts as the form, and values of the right types for attributes."""
    if not isinstance(value, tuple | list) or len(value) != len(form):
        return False
    kinds = {a.name: a.types for a in op.attributes}
    return all(isinstance(one, kinds.get(part, object)) for part, one in zip(form, value, strict=True))


def _trailing_names(method: str, known: Mapping[str, object], trailing: Mapping[str, object]) -> list[str]:
    """Names of the positional parameters after a method's ports and attributes, of those that are known."""
    return [name for name in TRAILING.get(method, trailing) if name in known]


def _of_spelling(
    spelling: Spelling, names: Mapping[str, str], call: Callable[..., object], trailing: Mapping[str, object]
) -> Callable[..., object]:
    op = OPS[spelling.op]
    parameters = [
        *(inspect.Parameter(name, _POSITIONAL) for name in names),
        *(
            inspect.Parameter(n, _POSITIONAL, default=trailing[n])
            for n in _trailing_names(spelling.name, trailing, trailing)
        ),
    ]

    def add(self, given: Mapping[str, object], extra: Mapping[str, object]):
        return call(self, op, {names[name]: value for name, value in given.items()}, **extra)

    return _method(spelling.name, spelling.doc, parameters, (), trailing, add)


def _method(
    name: str,
    doc: str,
    parameters: Sequence[inspect.Parameter],
    needed: Sequence[str],
    trailing: Mapping[str, object],
    add: Callable[..., object],
) -> Callable[..., object]:
    """Method that calls `add(self, given, extra)`. needed: parameters that must be given in spite of a default."""
    signature = inspect.Signature([inspect.Parameter("self", _POSITIONAL), *parameters])
    accepted = ", ".join(str(p) for p in parameters)

    def method(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
            absent = next((n for n in needed if n not in bound.arguments), None)
            if absent is not None:
                raise TypeError(f"missing a required argument: {absent!r}")
        except TypeError as error:
            raise GraphTypeError(f"{name}: {error}; accepted: {accepted}") from None
        given = dict(bound.arguments)
        self = given.pop("self")
        extra = {name: given.pop(name, default) for name, default in trailing.items()}
        return add(self, given, extra)

    method.__name__ = name
    method.__qualname__ = f"pygraph.{name}"
    method.__doc__ = doc
    method.__signature__ = signature
    return method
