"""Operators with gradients: three graphs of a ``Computation``, and the autograd formula that joins them.

Users call ``graphfuse::NAME``. Without gradients, its inference graph runs. With gradients, autograd sees
``NAME_training`` run instead, and ``NAME_backward`` for the gradients.

``torch.library.register_autograd`` would make the same formula with wrappers that take longer than a launch.
``forward`` and ``backward`` are generated for the operator's arguments, and try the fast path of their last call first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from graphfuse.base.errors import VariantPackTypeError
from graphfuse.functional.declaration import Columns
from graphfuse.functional.operator import LIBRARY
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED, Lines, text, when, written
from graphfuse.torch.operators.computation import Computation
from graphfuse.torch.operators.graph_operator import (
    GraphOperator,
    declare,
    define_operator,
    direct_call,
    once_differentiable,
    within_dispatcher,
)

_observed = torch_private.needs_dispatcher()


@dataclass(frozen=True)
class Operator:
    """An operator with an autograd formula.

    tensors: names of its tensors, which come before its numbers. run: the operator, called with (*tensors, *numbers,
    *options). inference, training, gradients: functions of its graphs, for calls without autograd that no mode, tracer
    or transform observes.
    """

    tensors: tuple[str, ...]
    run: Callable[..., object]
    inference: Callable[..., object]
    training: Callable[..., object]
    gradients: Callable[..., object]


def differentiable(
    name: str, of: Computation, forward: Columns | None = None, backward: Columns | None = None
) -> Operator:
    """Operator (*of.tensors, *of.numbers, *of.options) -> of.results. Defines torch's operators ``graphfuse::NAME...``.
    forward, backward: how the graphs run if columns are split over ranks."""
    given, asked = (*of.numbers, *of.options), [a.asked for a in of.gradients if a is not None and a.asked]
    inference = define_operator(declare(name, of.inference, given, of.options, forward), has_formula=True)
    training = define_operator(declare(f"{name}_training", of.training, given, of.options, forward))
    read = *of.numbers_kept, *of.options, *asked
    gradients = define_operator(declare(f"{name}_backward", of.backward, read, of.options, backward))
    watched = (*(a.name for a in of.differentiated), *of.numbers)
    observed, unobserved = (formula(name, of, training, gradients, one) for one in (False, True))
    apply_unobserved, names = torch_private.single_level_apply(unobserved), tuple(a.name for a in of.tensors)
    run = within_dispatcher(name, inference, observed.apply, apply_unobserved, watched)

    def below_autograd(keyset, *values):
        return run(values, lambda: torch_private.below_autograd(inference.operator, keyset, *values))

    LIBRARY.impl(name, below_autograd, "Autograd", with_keyset=True)
    entry = direct_call(name, inference, apply_unobserved, watched)
    return Operator(names, entry, inference.function, training.function, gradients.function)


def formula(
    name: str, of: Computation, training: GraphOperator, gradients: GraphOperator, unobserved: bool
) -> type[torch.autograd.Function]:
    """Autograd function of an operator: it keeps tensors of a forward call, and makes the gradients from them in one
    graph.

    unobserved: whether forward is called only if no mode, tracer or transform observes the call.
    """
    # Fast paths of the last calls. They decline calls that differ.
    recent = SimpleNamespace(forward=lambda *values: DECLINED, backward=lambda *values: DECLINED)

    def train(ctx, *values):
        for number, needed in zip(of.numbers, ctx.needs_input_grad[len(of.tensors) :], strict=False):
            if needed:
                raise VariantPackTypeError(f"{number} is a tensor that requires a gradient; accepted: a number")
        made = training(*values)
        if not _observed():
            recent.forward = training.function.last() or recent.forward
        return made

    def differentiate(*values):
        made = gradients(*_in_rows(of, values))
        if not _observed():
            recent.backward = gradients.function.last() or recent.backward
        return made

    once = once_differentiable(name, gradients)
    names = {
        "observed": _observed,
        "declined": DECLINED,
        "recent": recent,
        "train": train,
        "differentiate": differentiate,
        "grad_enabled": torch.is_grad_enabled,
        "once": lambda *values: once(*_in_rows(of, values)),
    }
    texts = {"forward": _forward(of, unobserved), "backward": _backward(of)}
    methods = {step: staticmethod(written(f"{step} of {name}", step, made, names)) for step, made in texts.items()}
    # torch names the autograd node after the class, in errors and profiles.
    return type(name, (torch.autograd.Function,), methods)


def _forward(of: Computation, unobserved: bool) -> str:
    arguments = ", ".join((*(a.name for a in of.tensors), *of.numbers, *of.options))
    given = *of.numbers_kept, *of.options
    return text(
        "forward",
        ("ctx", arguments),
        f"made = recent.forward({arguments})" if unobserved else "made = declined",
        when(["made is declined"], f"made = train(ctx, {arguments})"),
        f"{', '.join(a.name for a in (*of.results, *of.statistics))} = made",
        ["ctx.set_materialize_grads(False)"] if len(of.results) > 1 else [],
        _without_gradients(of),
        [f"ctx.zeros = {result}.shape, {result}.dtype" for result in _needed(of)],
        [f"ctx.given = {', '.join(given)},"] if given else [],
        f"ctx.save_for_backward({', '.join(of.kept)})",
        f"return {', '.join(a.name for a in of.results)}",
    )


def _without_gradients(of: Computation) -> Lines:
    """Lines that mark results without a gradient for torch: those that never have one, and those that depend on no
    tensor whose gradient is needed. A residual sum, for example, does not depend on the norm's weight."""
    never = [f"{a.name}," for a in of.results if not of.sources[a.name]]
    lines = [f"others = {' '.join(never) or '()'}"]
    for result in (a.name for a in of.results):
        if 0 < len(of.sources[result]) < len(of.differentiated):
            needed = " or ".join(
                f"ctx.needs_input_grad[{n}]" for n, a in enumerate(of.tensors) if a.name in of.sources[result]
            )
            lines += when([f"not ({needed})"], f"others += {result},")
    return [*lines, *when(["others"], "ctx.mark_non_differentiable(*others)")] if never or len(lines) > 1 else []


def _needed(of: Computation) -> list[str]:
    """Result whose gradient backward requires, even if only other results were used."""
    needed = {a.name for a in of.read_backward if not a.optional} - {_certain(of)}
    several = sum(grad is not None for grad in of.incoming) > 1
    return [a.name for a, grad in zip(of.results, of.incoming, strict=True) if several and grad in needed]


def _certain(of: Computation) -> str | None:
    """Name of the gradient that is always given when backward reaches its graph: if only the other result was used,
    backward has returned before. None if there is no such gradient."""
    others = [grad for a, grad in zip(of.results, of.incoming, strict=True) if grad and a.name not in of.passed]
    return others[0] if of.passed and len(others) == 1 else None


def _backward(of: Computation) -> str:
    pairs = [*zip(of.tensors, of.gradients, strict=True)]
    found = [_given_as_it_is(of, a.name) if grad is None else grad.name for a, grad in pairs]
    needs = [f"needs_d{a.name}" if a.name in of.as_given else (grad and grad.asked) or "_" for a, grad in pairs]
    others = ["None"] * (len(of.numbers) + len(of.options))
    given = *of.numbers_kept, *of.options
    shared = {f"d{name}" for names in of.shared for name in names}
    asked = (f"asks_{a.name}" if a.name in shared else a.asked for a in of.gradients if a is not None and a.asked)
    read = ", ".join((*of.read, *given, *asked))
    return text(
        "backward",
        ("ctx", *(grad or f"_{n}" for n, grad in enumerate(of.incoming))),
        [f"{', '.join(of.kept)}, = ctx.saved_tensors"] if of.kept else [],
        f"{', '.join(needs + ['_'] * len(others))}, = ctx.needs_input_grad",
        [f"{', '.join(given)}, = ctx.given"] if given else [],
        _used(of, others) if len(of.results) > 1 else [],
        _without_kernel(of, others) if of.as_given else [],
        *(_asked_once(n, names, condition) for n, (names, condition) in enumerate(of.shared.items())),
        "if grad_enabled():",
        [[f"made = once({read})"]],
        "else:",
        [[f"made = declined if observed() else recent.backward({read})"]],
        when(["made is declined"], f"made = differentiate({read})"),
        f"{', '.join(a.name for a in of.gradients if a is not None)} = made",
        *(_given_to_each(n, names) for n, names in enumerate(of.shared)),
        f"return {', '.join(found + others)}",
    )


def _given_as_it_is(of: Computation, name: str) -> str:
    """Expression of the gradient of a tensor that no graph makes."""
    return f"{of.as_given[name]} if needs_d{name} else None" if name in of.as_given else "None"


def _without_kernel(of: Computation, others: Sequence[str]) -> Lines:
    """Lines that return if no gradient is needed that the graph makes. others: return values after the gradients."""
    made = [a.asked for a in of.gradients if a is not None]
    given = [_given_as_it_is(of, a.name) for a in of.tensors]
    return when([f"not ({' or '.join(made)})"], f"return {', '.join((*given, *others))}")


def _used(of: Computation, others: Sequence[str]) -> Lines:
    """Lines that handle results that were not used: they have no gradient, and contribute to none. others: return
    values after the gradients."""
    grads = {a.name: grad for a, grad in zip(of.results, of.incoming, strict=True) if grad}
    nothing = f"return {', '.join(['None'] * len(of.gradients) + [*others])}"
    lines = [] if of.passed else when([" and ".join(f"{grad} is None" for grad in grads.values())], nothing)
    for result, names in of.passed.items():
        alone = " and ".join(f"{grad} is None" for other, grad in grads.items() if other != result) or "True"
        each = [f"{grads[result]} if needs_d{a.name} else None" if a.name in names else "None" for a in of.tensors]
        lines += when([alone], f"return {', '.join(each + [*others])}")
    narrowed = []
    for name in (a.name for a in of.differentiated):
        used = [grad for result, grad in grads.items() if name in of.sources[result]]
        if len(used) < len(grads) and _certain(of) not in used:
            condition = " or ".join(f"{grad} is not None" for grad in used)
            narrowed.append(f"needs_d{name} = needs_d{name} and ({condition})")
    if narrowed:
        lines += [*narrowed, *when([f"not ({' or '.join(f'needs_d{a.name}' for a in of.differentiated)})"], nothing)]
    for result in _needed(of):
        *more, last = (grad for name, grad in grads.items() if name != result)
        other = "".join(f"{grad} if {grad} is not None else " for grad in more) + last
        zeros = f"{grads[result]} = ({other}).new_zeros(shape, dtype=dtype)"
        lines += when([f"{grads[result]} is None"], "shape, dtype = ctx.zeros", zeros)
    return lines


def _asked_once(n: int, names: Sequence[str], condition: str) -> Lines:
    """Lines that request a gradient that several tensors share only once, if their data types are equal."""
    first, *others = names
    wanted = " or ".join(f"needs_d{name}" for name in others)
    return [
        f"is_shared{n} = {condition}",
        f"asks_d{first} = needs_d{first} or is_shared{n} and ({wanted})",
        *(f"asks_d{name} = needs_d{name} and not is_shared{n}" for name in others),
    ]


def _given_to_each(n: int, names: Sequence[str]) -> Lines:
    """Lines that return the shared gradient for each tensor that needs it."""
    each = ", ".join(f"d{names[0]} if needs_d{name} else None" for name in names)
    return when([f"is_shared{n}"], f"{', '.join(f'd{name}' for name in names)} = {each}")


def _in_rows(of: Computation, values: Sequence[object]) -> list[object]:
    """Tensors that the backward graph reads, with gradients of results contiguous along rows, as kernels require.

    The gradient of ``sum()``, for example, is one expanded element. If y has the strides of x, dy gets them, too. If
    there are sums over rows, x and dy are made contiguous along rows: no kernel makes such sums of other layouts.
    """
    found = dict(zip(of.read, values, strict=False))
    others = values[len(found) :]
    following = [a for a in of.results if a.strides is not None]
    like = next((n for a in following for n in (a.strides, a.name) if n in found), None)
    x = None
    if like is not None:
        asked = [a for a in of.gradients if a is not None and a.asked]
        sums = any(needed and a.over_rows for a, needed in zip(asked, others[-len(asked) :], strict=True))
        x = found[like]
        x = found[like] = x.contiguous() if sums and x.stride(-1) != 1 else x
    for name in of.incoming:
        grad = found.get(name)
        if grad is None or not grad.dim():
            continue
        if x is None or grad.shape != x.shape:
            found[name] = grad if grad.stride(-1) == 1 else grad.contiguous()
        elif grad.stride(-1) != x.stride(-1):
            found[name] = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    return [*found.values(), *others]
