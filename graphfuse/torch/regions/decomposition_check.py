"""Comparison of an operator with the parts that torch decomposes it into: whether both compute the same.

torch decomposes operators for compilers after autograd. So a part may divide by 0 where the operator's gradient does
not, or give a gradient to the other of two equal elements; some parts are less exact. Both are computed at points where
functions have limits, once for all calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.aten_calls import Call, given
from graphfuse.torch.analysis.meaning import as_sequence, tensors

_POINTS = frozenset((0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 30.0, 200.0))
"""Points for all comparisons, with their negatives and the numbers in the call: usual limits, and values that overflow
on the way."""
_MOST, _COLUMNS = 3, 2
"""Most tensors of the highest rank for which all combinations of points are compared, and columns of their rows."""
_OF_VALUES, _OF_GRADIENTS = {"rtol": 1e-5, "atol": 1e-12}, {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor among the arguments of a call."""

    rank: int
    has_gradient: bool


def is_equivalent(call: Call, graded: Set[torch.Tensor]) -> bool:
    """True if the parts of a call make the same results and gradients. If that cannot be compared, True if no argument
    has a gradient. graded: tensors that have a gradient."""
    if call.overload.namespace == "prims":  # its part is the same operator in aten
        return True

    def described(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return _Tensor(value.dim(), value in graded)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    read = tensors(call.arguments)
    leaves, form = pytree.tree_flatten(pytree.tree_map(described, given(call)))
    is_known = all(t.is_floating_point() for t in read)
    is_known &= not any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in leaves)
    found = _is_equivalent(call.computed, (*leaves,), form) if is_known else None
    return graded.isdisjoint(read) if found is None else found


@functools.lru_cache(maxsize=256)
def _is_equivalent(overload: torch._ops.OpOverload, leaves: tuple[object, ...], form: pytree.TreeSpec) -> bool | None:
    """True if both make the same; None if they cannot be computed at such points."""
    ranks = [v.rank for v in leaves if isinstance(v, _Tensor)]
    rank = max(ranks, default=0)
    numbers = {abs(float(v)) for v in leaves if isinstance(v, int | float)}
    points = [sign * n for n in sorted(_POINTS | numbers) for sign in (1, -1)]
    if not rank or ranks.count(rank) > _MOST:
        return None
    grid = zip(*itertools.product(points, repeat=ranks.count(rank)), strict=True)

    def made(value: object) -> object:
        if not isinstance(value, _Tensor):
            return value
        t = torch.ones((1,) * value.rank, device="cpu")
        if value.rank == rank:
            t = torch.tensor(next(grid), device="cpu").view(-1, *t.shape[1:])
            t = t if rank == 1 else t.expand(*t.shape[:-1], _COLUMNS).clone()
        return t.requires_grad_(value.has_gradient)

    with torch_private.without_modes(), torch.inference_mode(False), torch.enable_grad(), _Primitives():
        args, named = pytree.tree_unflatten([made(v) for v in leaves], form)
        read = [t for t in tensors((args, named)) if t.requires_grad]
        try:
            of_call, of_parts = (
                as_sequence(f(*args, **named))[0] for f in (overload, torch_private.decomposition(overload))
            )
            is_number = of_call.isfinite()
            gradients = zip(*(_gradients(one, read, is_number) for one in (of_call, of_parts)), strict=True)
        except Exception:
            return None
        is_near = functools.partial(torch.allclose, equal_nan=True)
        return is_near(of_call, of_parts, **_OF_VALUES) and all(is_near(*pair, **_OF_GRADIENTS) for pair in gradients)


def _gradients(made: torch.Tensor, read: list[torch.Tensor], is_number: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of what is read, with respect to the elements of the result that are finite."""
    if not made.requires_grad:
        return [torch.zeros_like(t) for t in read]
    found = torch.autograd.grad(made, read, is_number.to(made.dtype), materialize_grads=True)
    return [g.where(is_number, 0.0) if g.shape == is_number.shape else g for g in found]


class _Primitives(TorchFunctionMode):
    """Context in which the primitives of torch's references, which have no gradients, run as their operators in
    aten."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return getattr(function, "impl_aten", function)(*args, **kwargs or {})
