"""Creation of functions from declarations. The first call is checked and planned; repeated calls take a fast path."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.functional import operator, option, sharding
from graphfuse.functional.call import AcceptedCall
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.problem import warn_of_fallback
from graphfuse.functional.tensor_parameter import complete
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room
from graphfuse.runtime.fastcall import DECLINED, text, trying, when, written

_KEPT = 1024
_FORMS_KEPT = 8
_tracing, _modes = torch_private.tracing(), torch_private.dispatch_modes()

DeclarationT = TypeVar("DeclarationT", bound=Callable[..., object])


def function(
    variants: Variant | Mapping[tuple[object, ...], Variant],
    *results: str,
    chosen_by: tuple[str, ...] = (),
    name: str = "",
    without: Sequence[str] = (),
) -> Callable[[DeclarationT], DeclarationT]:
    """Decorator that replaces a declaration by its function, and defines the operator ``graphfuse::NAME``.

    variants: one, or one for each combination of the options in `chosen_by`. results: names of the returned arguments.
    name: the function's, if it differs from the declaration's. without: parameters of the declaration that the function
    does not have.
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
    """The function that `f` declares, without defaults for its parameters, and its operators of torch. The caller sets
    the operators' autograd behavior."""
    call = entry(f, functools.partial(_dispatched, f))
    operator.define(f, call)
    call.__globals__["run"] = getattr(torch.ops.graphfuse, f.name).default
    return call


def entry(f: Function, dispatched: Callable[..., object]) -> Callable[..., object]:
    """The function that users call, without operators of torch. It looks up the fast path and runs it. It is generated
    code, because every call runs it. dispatched: runs a call through torch's dispatcher. problems: fast paths by key;
    "last" is the last one that ran, which is tried first. last: returns it; None if there is none, or if it calls the
    function with copies."""
    problems: dict[tuple, Callable[..., object]] = {}
    names = {
        "compiling": is_dynamo_compiling,
        "declined": DECLINED,
        "first": functools.partial(_first, f, dispatched, lambda *values: call(*values), problems, {}),
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
        # torch.compile guards every object that is read here at every call: there are few if no optional argument is
        # given.
        when(["compiling()"], f"return run({', '.join(others)}) if {usual} else dispatched({parameters})"),
        "last = problems.get('last')",
        when(["last is not None"], f"result = last({parameters})", *when(["result is not declined"], "return result")),
        trying(
            [f"key = ({_key(f)})", "fast = problems.get(key)"],  # the key selects a fast path
            "AttributeError, IndexError, RuntimeError, TypeError",  # for values that are not tensors or have no strides
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
    call.last = functools.partial(_last, problems)
    return call


def _last(problems: Mapping[object, Callable[..., object]]) -> Callable[..., object] | None:
    found = problems.get("last")
    return None if hasattr(found, "is_on_copies") else found


def _key(f: Function) -> str:
    """The key of a call, as Python source.

    It has the data type of each tensor and the value of each option. For a tensor whose layout follows from no other's
    it also has the device, the rank and the last extent (the last two if a function has several such tensors). If that
    tensor is not contiguous, the key has all its strides and all extents but the first.
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
    """A call through torch's dispatcher: for torch.compile, and for tensors whose class intercepts operators."""
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
    again: Callable[..., object],
    problems: dict[tuple, FastPath],
    forms: dict[tuple, tuple[FastPath, ...]],
    key: tuple | None,
    *values,
) -> object:
    """A call that the last fast path of its key declined. It runs another fast path, or is checked in full and gets its
    own. again: the function. forms: fast paths of a key, the most recent first."""
    known = forms.get(key, ()) if key in problems else ()
    for form in known:
        made = form(*values)
        if made is not DECLINED:
            problems[key] = problems["last"] = form
            forms[key] = (form, *(other for other in known if other is not form))
            return made
    if _tracing() or _modes() or not all(map(torch_private.is_plain, values)):
        sharding.prepare()
        return dispatched(*values)
    given = dict(zip(f.parameters, values, strict=True))
    option.check({name: given[name] for name in f.options})
    call = AcceptedCall.of(f, given)
    if call.planned.problem.fallback is not None:
        if call.strided and call.packed().planned.problem.fallback is None:
            fast = _on_copies([(f.parameters.index(name), _spread(given[name])) for name in call.strided], again)
            if key is not None:
                make_room(problems, _KEPT)
                problems[key] = fast
            return fast(*values)
        if next(iter(call.tensors.values())).numel():
            warn_of_fallback(f.name, call.planned.problem)
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


def _on_copies(layouts: Sequence[tuple[int, tuple]], again: Callable[..., object]) -> FastPath:
    """A fast path that calls the function with contiguous copies of tensors of these layouts, given by their places
    among the parameters."""

    def call(*values):
        copies = list(values)
        for place, spread in layouts:
            t = values[place]
            if not isinstance(t, torch.Tensor) or _spread(t) != spread:
                return DECLINED
            copies[place] = t.contiguous()
        return again(*copies)

    call.is_on_copies = True  # it compares little: the function that it calls checks the copies in full
    return call


def _by_shape(known: object, first: torch.Tensor, fast: Callable[..., object]) -> Callable[..., object]:
    """A fast path that selects another one by the shape of the first tensor: one of `known`, or `fast`. It is for plans
    that serve a single row count."""
    shapes = getattr(known, "shapes", {})
    make_room(shapes, _KEPT)
    shapes[first.shape] = fast

    def call(*values):
        try:
            found = shapes.get(values[0].shape)
        except (AttributeError, RuntimeError, TypeError):  # as in the lookup of `problems`
            found = None
        return DECLINED if found is None else found(*values)

    call.shapes = shapes
    return call
