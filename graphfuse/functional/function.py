"""Makes functions from declarations: a first call is checked and planned, repeated calls take a fast path."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.functional import operator, option, sharding
from graphfuse.functional.call import AcceptedCall
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.tensor_parameter import complete
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, text, trying, when, written
from graphfuse.runtime.kept import make_room

_KEPT = 1024
_FORMS_KEPT = 8
_tracing = torch_private.tracing()

DeclarationT = TypeVar("DeclarationT", bound=Callable[..., object])


def function(
    variants: Variant | Mapping[tuple[object, ...], Variant],
    *results: str,
    chosen_by: tuple[str, ...] = (),
    name: str = "",
    without: Sequence[str] = (),
) -> Callable[[DeclarationT], DeclarationT]:
    """Decorator: makes the function of the signature and documentation decorated, and its operator ``graphfuse::NAME``.

    variants: one, or by the values of the options that `chosen_by` names. results: the names of what is returned. name:
    where it is not that of what is decorated. without: parameters that it lacks.
    """

    def declare(declaration: DeclarationT) -> DeclarationT:
        parameters = {n: p for n, p in inspect.signature(declaration).parameters.items() if n not in without}
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        called = name or declaration.__name__
        made = Function(called, tuple(parameters), defaults, chosen_by, variants, results)
        call = functools.wraps(declaration)(define(made))
        call.__defaults__ = tuple(defaults.values())
        packet = getattr(torch.ops.graphfuse, made.name)
        for overload in packet.overloads():
            operator.pass_by_autograd(made, getattr(packet, overload))
        return call

    return declare


def define(f: Function) -> Callable[..., object]:
    """The function that `f` declares, without defaults for its parameters, and its operators of torch. What autograd
    does with the operators is left to the caller."""
    call = entry(f, functools.partial(_dispatched, f))
    operator.define(f, call)
    call.__globals__["run"] = getattr(torch.ops.graphfuse, f.name).default
    return call


def entry(f: Function, dispatched: Callable[..., object]) -> Callable[..., object]:
    """The function as users call it, without operators of torch. It looks up the fast path and runs it. Generated, as
    this is part of every call. dispatched: runs a call by way of torch's dispatcher.

    problems: fast paths by key, and the last one that was taken under "last", which is asked first. last: tells that
    one, None before there is any.
    """
    problems: dict[tuple, Callable[..., object]] = {}
    names = {
        "compiling": is_dynamo_compiling,
        "declined": DECLINED,
        "first": functools.partial(_first, f, dispatched, problems, {}),
        "dispatched": dispatched,
        "run": dispatched,
        "problems": problems,
        "spread": _spread,
    }
    new, others = operator.ports(f)
    usual = " and ".join(f"{name} is None" for name in new) or "True"
    parameters = ", ".join(f.parameters)
    made = text(
        "call",
        f.parameters,
        # Every object that is touched is guarded at every call: few where nothing is given that may be left out.
        when(["compiling()"], f"return run({', '.join(others)}) if {usual} else dispatched({parameters})"),
        "last = problems.get('last')",
        when(["last is not None"], f"result = last({parameters})", *when(["result is not declined"], "return result")),
        trying(
            [f"key = ({_key(f)})", "fast = problems.get(key)"],  # what tells fast paths apart; each compares the rest
            "AttributeError, IndexError, RuntimeError, TypeError",  # of what is no tensor, or has no strides
            "key = fast = None",
        ),
        when(
            ["fast is not None and fast is not last"],
            f"result = fast({parameters})",
            *when(["result is not declined"], "problems['last'] = fast", "return result"),
        ),
        f"return first(key, {parameters})",
    )
    call = written(f.name, "call", made, names)
    call.declaration = f
    call.problems = problems
    call.last = functools.partial(problems.get, "last")
    return call


def _key(f: Function) -> str:
    """The key of a call, as Python.

    It has the data type of each tensor and the value of each option. Of a tensor whose layout follows from no other's
    it also has the device, the rank, the last extent (the last two where a function has several such tensors), and
    whether it is contiguous, else all its strides and all extents but the first.
    """
    free = any(a.free for a in f.arguments)
    parts = []
    for a in f.arguments:
        if a is f.arguments[0] or a.free:
            extents = f"(shape := {a.name}.shape)" + ("[-2:]" if free else "[-1]")
            parts += [extents, "len(shape)", f"{a.name}.is_contiguous() or spread({a.name})"]
            parts += [f"{a.name}.dtype", f"{a.name}.get_device()"]
        elif a.name not in f.parameters:
            continue
        elif a.optional or a.name in f.defaults:
            parts.append(f"None if {a.name} is None else {a.name}.dtype")
        else:
            parts.append(f"{a.name}.dtype")
    return ", ".join((*parts, *f.options))


def _spread(t: torch.Tensor) -> tuple:
    """Key that distinguishes layouts that are not contiguous."""
    return t.stride(), t.shape[1:]


def _dispatched(f: Function, *values) -> object:
    """A call by way of torch's dispatcher: what torch.compile traces, and calls of tensors whose class wants to see
    operators."""
    given = dict(zip(f.parameters, values, strict=True))
    option.check({name: given[name] for name in f.options})
    new, others = operator.ports(f)
    packet = getattr(torch.ops.graphfuse, f.name)
    if all(given[name] is None for name in new):
        return packet.default(*(given[name] for name in others))
    tensors = complete(f.variant(given).arguments, given)
    packet.out(*(given[name] for name in others), **{name: tensors.get(name) for name in new})
    return f.returned(tensors)


FastPath = Callable[..., object]


def _first(
    f: Function,
    dispatched: Callable[..., object],
    problems: dict[tuple, FastPath],
    forms: dict[tuple, tuple[FastPath, ...]],
    key: tuple | None,
    *values,
) -> object:
    """A call unlike the last one of its key: like an earlier one, or looked at in full and remembered for others.

    forms: fast paths of a key, that of the last call first.
    """
    known = forms.get(key, ()) if key in problems else ()
    for form in known:
        made = form(*values)
        if made is not DECLINED:
            problems[key] = problems["last"] = form
            forms[key] = (form, *(other for other in known if other is not form))
            return made
    if _tracing() or not all(map(torch_private.is_plain, values)):
        sharding.prepare()
        return dispatched(*values)
    given = dict(zip(f.parameters, values, strict=True))
    option.check({name: given[name] for name in f.options})
    call = AcceptedCall.of(f, given)
    call.run()
    fast = call.fast() if key is not None else None
    if fast is not None:
        if key not in problems:
            for kept in (problems, forms):
                make_room(kept, _KEPT)
        if call.planned.counted:
            forms[key] = (fast, *known[: _FORMS_KEPT - 1])
        else:
            fast = _by_shape(problems.get(key), values[0], fast)
        problems[key] = problems["last"] = fast
    return f.returned(call.tensors)


def _by_shape(known: object, first: torch.Tensor, fast: Callable[..., object]) -> Callable[..., object]:
    """A fast path that chooses another one by the shape of the first tensor: one of `known`, or `fast`. Plans that
    serve one number of rows are kept so."""
    shapes = getattr(known, "shapes", {})
    make_room(shapes, _KEPT)
    shapes[first.shape] = fast

    def call(*values):
        try:
            found = shapes.get(values[0].shape)
        except (AttributeError, RuntimeError, TypeError):  # as of `problems`
            found = None
        return DECLINED if found is None else found(*values)

    call.shapes = shapes
    return call
