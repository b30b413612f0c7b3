"""Functions made from their declarations: checked and planned once for each problem, then compared and started."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import VariantPackError
from graphfuse.functional import operator, option
from graphfuse.functional.argument import Argument, complete
from graphfuse.functional.layout import check_given, layout
from graphfuse.functional.problem import Variant, plan
from graphfuse.functional.shortcut import DECLINED, Shortcut, shortcut
from graphfuse.functional.written import written
from graphfuse.tables import store

_KEPT = 4096

NUMBERS = frozenset({"eps"})
"""Parameters that are numbers, passed by value: they tell no problems apart."""

DeclarationT = TypeVar("DeclarationT", bound=Callable[..., object])


@dataclass(frozen=True, eq=False)
class Function:
    """One function. parameters: all, in order, some with defaults. numbers: those that each call may change.
    options: those that are neither tensors nor numbers.

    variants: by the values of the options named in `chosen_by`. results: the arguments that are returned, None for
    one that was not asked for. Arguments that are no parameters are allocated.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, object]
    chosen_by: tuple[str, ...]
    variants: Mapping[tuple[object, ...], Variant]
    results: tuple[str, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Those of any variant: names, and which are written and optional, are the same in all."""
        return next(iter(self.variants.values())).arguments

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if name in NUMBERS)

    @property
    def options(self) -> tuple[str, ...]:
        tensors = [a.name for a in self.arguments]
        return tuple(name for name in self.parameters if name not in tensors and name not in NUMBERS)

    @property
    def asked(self) -> frozenset[str]:
        """The arguments that an option asks for."""
        return frozenset(a.name for a in self.arguments if a.asked is not None)

    def variant(self, values: Mapping[str, object]) -> Variant:
        chosen = tuple(values[name] for name in self.chosen_by)
        if chosen not in self.variants:
            accepted = " or ".join(map(repr, self.variants))
            raise VariantPackError(f"({', '.join(self.chosen_by)}) is {chosen}; accepted: {accepted}")
        return self.variants[chosen]

    def returned(self, tensors: Mapping[str, torch.Tensor]) -> object:
        found = tuple(tensors.get(name) for name in self.results if name in tensors or name in self.asked)
        return found if len(found) > 1 else found[0] if found else None


def function(
    variants: Variant | Mapping[tuple[object, ...], Variant], *results: str, chosen_by: tuple[str, ...] = ()
) -> Callable[[DeclarationT], DeclarationT]:
    """Makes the function whose signature and documentation it decorates, and its operator ``graphfuse::NAME``.

    variants: by the values of the options that `chosen_by` names. results: the names of what is returned.
    """
    variants = {(): variants} if isinstance(variants, Variant) else variants

    def declare(declaration: DeclarationT) -> DeclarationT:
        signature = inspect.signature(declaration).parameters
        defaults = {name: p.default for name, p in signature.items() if p.default is not p.empty}
        made = Function(declaration.__name__, tuple(signature), defaults, chosen_by, variants, results)
        call = functools.wraps(declaration)(define(made))
        call.__defaults__ = declaration.__defaults__
        packet = getattr(torch.ops.graphfuse, made.name)
        for overload in packet.overloads():
            operator.pass_by_autograd(getattr(packet, overload))
        return call

    return declare


def define(f: Function) -> Callable[..., object]:
    """The function that `f` says, without defaults, and its operators, of which autograd knows nothing yet."""
    call = _written(f)
    operator.define(f, call)
    call.__globals__["run"] = getattr(torch.ops.graphfuse, f.name).default
    return call


_TEXT = """
def call({parameters}):
    if compiling() or tracing():
        # Every object that is touched is guarded at every call: few where nothing is given that may be left out.
        return run({others}) if {usual} else dispatched({parameters})
    try:
        # What tells problems apart; whether a call is like the first one of its problem, the problem tells.
        key = ({key})
        short = problems.get(key)
    except (AttributeError, RuntimeError, TypeError):  # of what is no tensor, or has no strides
        key = short = None
    result = declined if short is None else short({parameters})
    return first(key, {parameters}) if result is declined else result
"""


def _written(f: Function) -> Callable[..., object]:
    """The function itself, written out for its parameters: it is all that a call costs besides its shortcut."""
    problems: dict[tuple, Shortcut] = {}
    names = {
        "compiling": is_dynamo_compiling,
        "tracing": torch._C._is_tracing,
        "declined": DECLINED,
        "first": functools.partial(_first, f, problems),
        "dispatched": functools.partial(_dispatched, f),
        "problems": problems,
        "store": store,
    }
    new, others = operator.ports(f)
    ignored = [name for name in f.options if name not in others]
    text = _TEXT.format(
        parameters=", ".join(f.parameters),
        others=", ".join(others),
        usual=" and ".join(f"{name} is {f.defaults[name]}" for name in (*new, *ignored)) or "True",
        key=_key(f),
    )
    call = written(f.name, "call", text, names)
    call.problems = problems
    return call


def _key(f: Function) -> str:
    parts = ["store.generation"]
    for a in f.arguments:
        if a is f.arguments[0] or a.free:
            parts += [f"{a.name}.shape", f"{a.name}.stride()", f"{a.name}.dtype", f"{a.name}.get_device()"]
        elif a.name not in f.parameters:
            continue
        elif a.name in f.defaults:
            parts.append(f"None if {a.name} is None else {a.name}.dtype")
        else:
            parts.append(f"{a.name}.dtype")
    return ", ".join((*parts, *f.options))


def _dispatched(f: Function, *values) -> object:
    """A call by way of the operators: what torch.compile traces, and one of tensors whose class wants to see it."""
    given = dict(zip(f.parameters, values, strict=True))
    option.check({name: given[name] for name in f.options})
    new, others = operator.ports(f)
    packet = getattr(torch.ops.graphfuse, f.name)
    if all(given[name] is None for name in new):
        return packet.default(*(given[name] for name in others))
    tensors = complete(f.variant(given).arguments, given)
    packet.out(*(given[name] for name in others), **{name: tensors.get(name) for name in new})
    return f.returned(tensors)


def _is_plain(value: object) -> bool:
    """Whether nobody else wants to see what is done to a tensor: a class of its own, as that of fake tensors, or the
    vmap that autograd has for ``is_grads_batched``, which is not one of torch.func's transforms."""
    hook = getattr(type(value), "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
    return hook is torch._C._disabled_torch_dispatch_impl and not (
        isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)
    )


def _first(f: Function, problems: dict[tuple, Shortcut], key: tuple | None, *values) -> object:
    """A call that checks every argument, and remembers for others of its key what they need to know."""
    if not all(map(_is_plain, values)):
        return _dispatched(f, *values)
    given = dict(zip(f.parameters, values, strict=True))
    options = {name: given[name] for name in f.options}
    option.check(options)
    variant = f.variant(options)
    for a in variant.arguments:
        check_given(a, given.get(a.name))
    tensors = complete(variant.arguments, given)
    layouts = tuple((a.name, layout(a, tensors[a.name])) for a in variant.arguments if a.name in tensors)
    problem = plan(f.name, variant, layouts, store.generation)
    dependent = options.get("enable_pdl", False) is not False and problem.executable.undependable is None
    values = tensors | {name: given[name] for name in f.numbers}
    pack = {key: values[name] for key, name in problem.pack.items()}
    workspace = problem.new_workspace() if problem.workspace_bytes else None
    problem.graph.execute(pack, workspace, programmatic_dependent_launch=dependent)
    ignored = [a.name for a in variant.arguments if given.get(a.name) is not None and a.name not in tensors]
    if key is not None and not ignored:
        short = shortcut(f, given, tensors, problem, dependent)
        if short is not None:
            if len(problems) >= _KEPT:
                problems.clear()
            problems[key] = short
    return f.returned(tensors)
