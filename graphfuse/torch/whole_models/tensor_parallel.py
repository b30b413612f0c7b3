"""Sums over ranks behind the products of tensor-parallel layers, put off until the norm that reads them.

`RowwiseParallel` of torch adds up what a product makes on each rank. A layer adds the residual, and the same layer or
the next one normalizes. Here the product returns a tensor that is not yet added up, adding a residual keeps it so, and
a norm that ``fuse`` has replaced makes one call of all three. Whatever else looks at it gets the sum.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from graphfuse.base.errors import ModelError
from graphfuse.functional import symmetric
from graphfuse.runtime import torch_private
from graphfuse.torch.fusion import set_forward
from graphfuse.torch.fusion.report import Entry
from graphfuse.torch.regions import over_ranks
from graphfuse.torch.whole_models.fused_calls import FusedCalls

_ADDS = (torch.ops.aten.add.Tensor,)


class _RankPart:
    """The part of a rank in sums that are not made, alone or with a residual."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def keep(self) -> None:
        """Copies it, as the next product overwrites its memory."""
        self.tensor = self.tensor.clone()


class DeferredSum(torch.Tensor):
    """A sum over the ranks of a group, with a residual or without, that is made when somebody reads it.

    part: what this rank has of it, None once it is made.
    """

    part: _RankPart | None
    residual: torch.Tensor | None
    group: distributed.ProcessGroup

    @staticmethod
    def __new__(cls, part: _RankPart, group: object, residual: torch.Tensor | None = None) -> DeferredSum:
        t = part.tensor
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device, requires_grad=False)

    def __init__(self, part: _RankPart, group: distributed.ProcessGroup, residual: torch.Tensor | None = None) -> None:
        self.part, self.residual, self.group = part, residual, group
        self._residual_version = None if residual is None or residual.is_inference() else residual._version
        self._total: torch.Tensor | None = None

    __torch_function__ = torch_private.disabled_torch_function()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _ADDS and not kwargs and len(args) == 2 and (made := _added(*args)) is not None:
            return made
        args, kwargs = pytree.tree_map_only(DeferredSum, DeferredSum.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **options: object) -> str:
        return repr(self.made())

    def made(self) -> torch.Tensor:
        """The sum."""
        if self.part is not None:
            total = self.part.tensor.clone()
            distributed.all_reduce(total, group=self.group)
            self.settle(total if self.residual is None else self.kept_residual() + total)
        return self._total

    def kept_residual(self) -> torch.Tensor:
        """The residual. ModelError where somebody wrote to it since it was added."""
        if self._residual_version is not None and self.residual._version != self._residual_version:
            raise ModelError(
                "a residual was changed in place after it was added to what ranks have not yet added up; accepted: "
                "models that leave it as it is until the norm behind, and others after unfuse(model)"
            )
        return self.residual

    def settle(self, total: torch.Tensor) -> None:
        """Sets the sum, which somebody made."""
        self._total, self.part, self.residual = total, None, None


def _added(a: object, b: object) -> DeferredSum | None:
    """The sum of a residual and what is not yet added up; None for other operands."""
    for sum_, other in ((b, a), (a, b)):
        if isinstance(sum_, DeferredSum) and sum_.part is not None and sum_.residual is None:
            other = other.made() if isinstance(other, DeferredSum) and other is not sum_ else other
            fits = type(other) is torch.Tensor and other.shape == sum_.shape and other.dtype is sum_.dtype
            if fits and other.device == sum_.device:
                return DeferredSum(sum_.part, sum_.group, other)
    return None


def normed(of: FusedCalls, module: torch.nn.Module, x: DeferredSum) -> torch.Tensor | None:
    """Result of a module that is given a sum, which is made in the same call; None where no kernel does that."""
    members = [getattr(module, name, None) for _, name in of.members]
    if x.part is None or x.residual is None or not all(type(w) is torch.nn.Parameter for w in members):
        return None
    way = of.ways.get((x.dtype, members[0].dtype if members else x.dtype, x.ndim))
    if way is None or not way.sum_before:
        return None
    if way.autocasts and torch.is_autocast_enabled(x.device.type) or not way.holds_for((module,)):
        return None
    if any(w.shape != of.of.extents for w in members) or way.columns not in (None, x.shape[-1]):
        return None
    inputs = [x.kept_residual(), x.part.tensor, *(members[place - 1] for place in way.places[1:])]
    total, made = over_ranks.run(inputs, way.sum_before, 1, x.group)
    x.settle(total)
    return made


def replaced(name: str, module: torch.nn.Module) -> Entry | None:
    """Entry of a module whose result `RowwiseParallel` adds up over ranks; None for others."""
    style = torch_private.rowwise_style(module) if "torch.distributed.tensor" in sys.modules else None
    if style is None or DeferredSum.__torch_function__ is None:
        return None
    kind = type(module).__name__
    if not style.is_whole_and_local:
        return Entry(name, kind, why="its result is not whole on every rank, or a DTensor")
    if module.weight.device_mesh.ndim != 1:
        return Entry(name, kind, why="it is sharded along several dimensions of a mesh")
    if module.bias is not None:
        return Entry(name, kind, why="its bias is added to the sum over ranks")
    if not set_forward.is_free(module):
        return Entry(name, kind, why="its forward is set on the module already, by something else")
    set_forward.set_on(module, _forward(style.output_layouts))
    return Entry(name, kind, "region_over_ranks", "its sum over ranks, with the residual sum and the norm that follow")


def _forward(layouts: Sequence[object]):
    def forward(self, x):
        weight = self.weight
        asks = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if asks or is_dynamo_compiling() or torch.is_autocast_enabled(x.device.type):
            return type(self).forward(self, x)
        return _Whole(layouts, _product(x.to_local(), weight.to_local(), weight.device_mesh.get_group()))

    return forward


@dataclass(frozen=True, eq=False)
class _Whole:
    """Result of a module as `RowwiseParallel` looks at it, which is whole on every rank already."""

    placements: Any
    local: torch.Tensor

    def to_local(self) -> torch.Tensor:
        return self.local


def _product(x: torch.Tensor, weight: torch.Tensor, group: distributed.ProcessGroup) -> DeferredSum:
    shape = (*x.shape[:-1], weight.shape[0])
    out = symmetric.scratch(group, "products", shape, x.dtype, x.device)
    if out is None:
        return DeferredSum(_RankPart(torch.nn.functional.linear(x, weight)), group)
    # Nothing is sent here: ranks may not agree on what is still alive.
    last = _last.get(group)
    if last is not None and (waiting := last()) is not None:
        waiting.keep()
    torch.mm(x.flatten(0, -2), weight.t(), out=out.view(-1, shape[-1]))
    part = _RankPart(out)
    _last[group] = weakref.ref(part)
    return DeferredSum(part, group)


_last: weakref.WeakKeyDictionary[object, weakref.ref[_RankPart]] = weakref.WeakKeyDictionary()
"""What lies in the memory of each group that the next product writes."""
