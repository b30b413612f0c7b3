"""Whether the parts that torch takes an operator apart into have its gradients.

Torch takes apart what autograd is done with. So a part may divide by 0 where the operator does not, or give its
gradient to another of two that are equal. Both are computed at points where functions have limits, once for all calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from graphfuse.runtime import torch_private
from graphfuse.torch.fusion.aten_calls import Call, given

_POINTS = frozenset((0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 30.0, 200.0))
"""Beside their negatives and the numbers that the operator is given: usual limits, and what overflows in between."""
_MOST = 3
"""Tensors of as many dimensions as any. All pairs of points of two are looked at."""
_COLUMNS = 2


@dataclass(frozen=True)
class _Tensor:
    """A tensor in the place of one that a call is given."""

    rank: int
    has_gradient: bool


def have_its_gradients(call: Call, graded: Container[int]) -> bool:
    """True if the parts of a call have its gradients. graded: numbers of tensors that have one."""

    def described(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return _Tensor(value.dim(), id(value) in graded)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, named = pytree.tree_map(described, given(call))
    leaves, form = pytree.tree_flatten((args, named))
    tensors = [t for t in pytree.tree_leaves(call.arguments) if isinstance(t, torch.Tensor)]
    is_known = all(t.is_floating_point() for t in tensors)
    if not is_known or any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in leaves):
        return False
    return _agree(call.computed, tuple(leaves), form)


@functools.lru_cache(maxsize=256)
def _agree(overload: torch._ops.OpOverload, leaves: tuple[object, ...], form: pytree.TreeSpec) -> bool:
    tensors = [v for v in leaves if isinstance(v, _Tensor)]
    rank = max(v.rank for v in tensors)
    numbers = {abs(float(v)) for v in leaves if isinstance(v, int | float)}
    points = [sign * n for n in sorted(_POINTS | numbers) for sign in (1, -1)]
    count = sum(v.rank == rank for v in tensors)
    if count > _MOST:
        return False
    grid = iter(zip(*itertools.product(points, repeat=count), strict=True))

    def made(value: object) -> object:
        if not isinstance(value, _Tensor):
            return value
        if value.rank < rank or not rank:
            return torch.ones((1,) * value.rank, device="cpu", requires_grad=value.has_gradient)
        t = torch.tensor(next(grid), device="cpu").view(-1, *(1,) * (rank - 1))
        t = t if rank == 1 else t.expand(*t.shape[:-1], _COLUMNS)
        return t.clone().requires_grad_(value.has_gradient)

    with torch_private.without_modes(), torch.inference_mode(False), torch.enable_grad():
        args, named = pytree.tree_unflatten([made(v) for v in leaves], form)
        read = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, torch.Tensor) and t.requires_grad]
        try:
            found = [_gradients(f(*args, **named), read) for f in (overload, torch_private.decomposition(overload))]
        except Exception:  # of such tensors it makes nothing
            return False
    return all(torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in zip(*found, strict=True))


def _gradients(made: object, read: list[torch.Tensor]) -> list[torch.Tensor]:
    first = made if isinstance(made, torch.Tensor) else made[0]
    if not first.requires_grad:
        return [torch.zeros_like(t) for t in read]
    return [*torch.autograd.grad(first.sum(), read, materialize_grads=True)]
