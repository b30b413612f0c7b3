"""``explain``: the plan of a call, without running it."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from graphfuse.base.errors import GraphNotSupportedError, VariantPackTypeError
from graphfuse.explain import Explanation, explained, fallback
from graphfuse.functional import operator, option, problem
from graphfuse.functional.call import AcceptedCall
from graphfuse.functional.declaration import Function
from graphfuse.functional.tensor_parameter import complete
from graphfuse.runtime import torch_private


def explain(function: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Explanation of the plan of a call. function: of ``graphfuse.functional``, or a function or module of
    ``graphfuse.torch``.

    args, kwargs: those of the call. The call is checked and its outputs are allocated as usual, but nothing is
    compiled, run or written. Calls with similar row counts share a plan, so that knobs may be those of up to an eighth
    more rows. A call that autograd would record is explained by its forward graph.

    Returns an explanation: print it, or end a notebook's cell with it. Raises the errors that the call would raise
    before it runs, and VariantPackTypeError for any other callable.
    """
    f = getattr(function, "declaration", None)
    if isinstance(f, Function):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return _planned(f, dict(bound.arguments))
    of = type(function) if isinstance(function, torch.nn.Module) else function
    if not callable(function) or not str(getattr(of, "__module__", "")).startswith("graphfuse.torch."):
        raise VariantPackTypeError(
            f"explain: {function!r} is none of ours; accepted: functions of graphfuse.functional, functions and "
            "modules of graphfuse.torch"
        )
    found: list[Explanation] = []
    with _watch(found):
        function(*args, **kwargs)
    (only,) = found
    return only


def _watch(found: list[Explanation]) -> AbstractContextManager[object]:
    """Context that appends explanations of graphfuse operators to `found` instead of running them. While it is active,
    every call goes through the dispatcher."""

    def planned(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        f = operator.FUNCTIONS.get(func._schema.name)
        if f is None:
            return func(*args, **kwargs)
        names = [a.name for a in func._schema.arguments]
        given = dict.fromkeys(f.parameters) | dict(f.defaults) | dict(zip(names, args, strict=False)) | kwargs
        found.append(_planned(f, given))
        return f.returned(complete(f.variant(given).arguments, given))

    watching = torch_private.dispatched_to(planned)
    if watching is None:
        raise GraphNotSupportedError(
            "explain: this torch does not show which operators a function calls; accepted: functions of "
            "graphfuse.functional"
        )
    return watching


def _planned(f: Function, given: dict[str, object]) -> Explanation:
    option.check({name: given[name] for name in f.options})
    call = AcceptedCall.of(f, given)
    found = _explained(f.name, call)
    if call.strided and fallback(found) is not None:
        on_copies = _explained(f"{f.name} of contiguous copies of {', '.join(call.strided)}", call.packed())
        return found if fallback(on_copies) is not None else on_copies
    return found


def _explained(name: str, call: AcceptedCall) -> Explanation:
    _, planner = call.split.planned(lambda layouts: problem.planned(name, call.variant, dict(layouts), call.device))
    return explained(planner)
