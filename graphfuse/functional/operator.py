"""Functions as operators of torch, for graphs of torch.compile and torch.export.

``graphfuse::NAME`` allocates outputs that the caller does not give, and returns them. ``graphfuse::NAME.out`` writes
those that the caller gives. A function that allocates nothing has only the first, which returns nothing. The operators
are defined for all devices. Autograd skips them, but they refuse to write a tensor that requires a gradient.
``torch.library.custom_op`` would add wrappers that take longer than a launch.
"""

from collections.abc import Callable, Mapping

import torch

from graphfuse.functional import autograd_check, option
from graphfuse.functional.declaration import Function
from graphfuse.functional.layout import check, check_given, fake_layout
from graphfuse.functional.tensor_parameter import Shape, TensorParameter, complete
from graphfuse.runtime import torch_private

FUNCTIONS: dict[str, Function] = {}
"""Functions with operators, by the operators' qualified names."""

LIBRARY = torch.library.Library("graphfuse", "FRAGMENT")


def define(f: Function, call: Callable[..., object]) -> None:
    """Define the operators of a function, without their autograd behavior. call: the function itself."""
    FUNCTIONS[f"graphfuse::{f.name}"] = f
    new, others = ports(f)
    returned = ["Tensor" for a in f.arguments if a.name in f.results and a.new is not None and a.only is None]
    _define(f, call, f.name, others, [], f"({', '.join(returned)})" if len(returned) != 1 else returned[0])
    if new:
        _define(f, call, f"{f.name}.out", others, new, "()")


def pass_by_autograd(f: Function, operator: torch._ops.OpOverload) -> None:
    """Make autograd skip an operator of a function: its results have no gradient, and tensors that it writes may not
    require one."""
    parameters = [a.name for a in operator._schema.arguments]
    written = [a.name for a in f.arguments if a.written and a.name in parameters]
    if not written:
        LIBRARY.impl(operator, torch.library.fallthrough_kernel, "Autograd")
        return

    def below_autograd(keyset, *values, **named):
        given = dict(zip(parameters, values, strict=False)) | named
        autograd_check.check_written({name: given.get(name) for name in written})
        return torch_private.below_autograd(operator, keyset, *values, **named)

    LIBRARY.impl(operator, below_autograd, "Autograd", with_keyset=True)


def ports(f: Function) -> tuple[list[str], list[str]]:
    """The parameters that are allocated if the caller omits them, and the others."""
    new = [a.name for a in f.arguments if a.new is not None and a.name in f.parameters]
    return new, [name for name in f.parameters if name not in new]


def _define(f: Function, call, name: str, positional: list[str], keywords: list[str], returned: str) -> None:
    writes_only = returned == "()"

    def run(*values, **named):
        result = call(**dict(zip(positional, values, strict=False)), **named)
        return None if writes_only else result

    # Torch omits trailing arguments that are defaults.
    as_it_is = positional == [*f.parameters] and positional[-1] not in f.defaults and not writes_only

    def fake(*values, **named):
        tensors = fake_tensors(f, f.defaults | dict(zip(positional, values, strict=False)) | named)
        return None if writes_only else f.returned(tensors)

    LIBRARY.define(f"{name}({_parameters(f, positional, keywords)}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, call if as_it_is else run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphfuse::{name}", fake, lib=LIBRARY)


def fake_tensors(f: Function, given: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The fake tensors of a call, including its outputs. Raises the errors of the call."""
    arguments = f.variant(given).arguments
    for a in arguments:
        check_given(a, given.get(a.name))
    tensors = complete(arguments, given)
    layouts = {a.name: fake_layout(a, tensors[a.name]) for a in arguments if a.name in tensors}
    check(arguments, layouts, _may_be_same)
    return tensors


def _may_be_same(a: Shape, b: Shape) -> bool:
    """True if two shapes are equal or may be. The call itself checks extents that are unknown (``mark_unbacked``)."""
    # imports sympy, which fake tensors have already imported
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return len(a) == len(b) and all(guard_or_true(m == n) for m, n in zip(a, b, strict=True))


def _parameters(f: Function, positional: list[str], keywords: list[str]) -> str:
    """Parameters in the syntax of torch.library, with defaults if all later parameters have one."""
    arguments = {a.name: a for a in f.arguments}
    letters = iter("abcdefgh")
    last = max((i for i, name in enumerate(positional) if name not in f.defaults), default=-1)
    found = []
    for i, name in enumerate(positional):
        kind = _tensor(arguments[name], letters) if name in arguments else option.schema(name)
        default = f"={f.defaults[name]!r}" if i > last else ""
        found.append(f"{kind} {name}{default}")
    found += ["*"] * bool(keywords)
    found += [f"{_tensor(arguments[name], letters)} {name}" for name in keywords]
    return ", ".join(found)


def _tensor(a: TensorParameter, letters) -> str:
    maybe = "?" if a.optional or a.only is not None else ""
    return f"Tensor({next(letters)}!){maybe}" if a.written else f"Tensor{maybe}"
