"""Sums over ranks after the products of tensor-parallel layers, deferred until the norm that reads them.

torch's `RowwiseParallel` adds up the products of all ranks. A layer adds the residual, and the same layer or the next
one normalizes the sum. Here the product returns a `DeferredSum`, which stays deferred when a residual is added. A norm
that ``fuse`` has replaced computes all three in one call. Any other reader gets the sum.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree

from graphfuse.base.errors import ModelError
from graphfuse.functional import symmetric
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.regions import over_ranks
from graphfuse.torch.whole_models.fused_calls import FusedCalls

_Tensor = torch.Tensor
_observed, _is_tracing = torch_private.needs_dispatcher(), torch_private.tracing()

_ADDS = frozenset({torch.add, _Tensor.add, _Tensor.__add__, _Tensor.__radd__})

_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta "
    "is_nested is_quantized is_sparse _version".split()
)
_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset get_device is_contiguous is_floating_point "
    "is_complex is_signed is_inference __len__ __format__".split()
)
_READ_NO_ELEMENTS = frozenset(
    {
        *(getattr(_Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(_Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.is_inference, torch.numel),
    }
)
"""Functions of torch that read no element, so that the sum is not made for them."""


class _RankPart:
    """One rank's part of deferred sums, alone or with a residual."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def keep(self) -> None:
        """Copies the part, because the next product overwrites its memory."""
        self.tensor = self.tensor.clone()


class DeferredSum(torch.Tensor):
    """A sum over the ranks of a group, with or without a residual, that is made when it is first read. part: this
    rank's part; None after the sum is made."""

    part: _RankPart | None = None
    residual: torch.Tensor | None
    group: distributed.ProcessGroup
    _total: torch.Tensor | None = None
    _is_read = _is_lent = False

    @staticmethod
    def __new__(cls, part: _RankPart, group: object, residual: torch.Tensor | None = None) -> DeferredSum:
        t = part.tensor
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device, requires_grad=False)

    def __init__(self, part: _RankPart, group: distributed.ProcessGroup, residual: torch.Tensor | None = None) -> None:
        self.part, self.residual, self.group = part, residual, group
        self._residual_version = None if residual is None or residual.is_inference() else residual._version

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Intercepts functions here, not at the dispatcher, because many functions of torch read memory without an
        operator."""
        if func in _ADDS and not kwargs and len(args) == 2 and (made := _added(*args)) is not None:
            return made
        if func in _READ_NO_ELEMENTS:
            of, *others = args
            queried = of if of._total is None else of._total
            return super().__torch_function__(func, types, (queried, *others), kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(DeferredSum, DeferredSum.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **options: object) -> str:
        """Text without values if the sum is not made: a rank that prints alone would wait for the others."""
        if self.part is None:
            return repr(self.made())
        about = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"DeferredSum({about}: not yet added up over {self.group.size()} ranks; clone() of all ranks does)"

    def made(self) -> torch.Tensor:
        """The sum, which the caller may change. A sum that is also a residual of others is copied if it is an inference
        tensor. For other tensors torch counts changes, so a change is detected."""
        if self._total is None and (self.part is None or _is_tracing()):  # a trace has a copy without the part
            raise ModelError(
                "torch.jit.trace reads what ranks have not yet added up; accepted: a clone() of it, which is the sum"
            )
        if self.part is not None:
            total = self.part.tensor.clone()
            distributed.all_reduce(total, group=self.group)
            self.settle(total if self.residual is None else self.kept_residual() + total)
        if self._is_lent and self._total.is_inference():
            self._total, self._is_lent = self._total.clone(), False
        self._is_read = True
        return self._total

    def lent(self) -> torch.Tensor:
        """The sum for use as a residual, which is only read."""
        if self._total is None or self._is_read:
            return _unchanged(self.made())
        self._is_lent = True
        return self._total

    def kept_residual(self) -> torch.Tensor:
        """The residual. Raises ModelError if it was changed since it was added."""
        if self._residual_version is not None and self.residual._version != self._residual_version:
            raise ModelError(
                "a residual was changed in place after it was added to what ranks have not yet added up; accepted: "
                "models that leave it unchanged until the next norm, and others after unfuse(model)"
            )
        return self.residual

    def settle(self, total: torch.Tensor) -> None:
        """Sets the sum that another call computed."""
        self._total, self.part, self.residual = total, None, None


def _unchanged(residual: torch.Tensor) -> torch.Tensor:
    """The residual if torch counts its changes; a copy of an inference tensor, for which torch does not."""
    return residual.clone() if residual.is_inference() else residual


def _added(a: object, b: object) -> DeferredSum | None:
    """The deferred sum of a residual and a deferred sum; None for other operands."""
    for sum_, other in ((b, a), (a, b)):
        if isinstance(sum_, DeferredSum) and sum_.part is not None and sum_.residual is None:
            fits = type(other) in (torch.Tensor, DeferredSum) and other is not sum_
            if fits and (other.shape, other.dtype, other.device) == (sum_.shape, sum_.dtype, sum_.device):
                residual = other.lent() if isinstance(other, DeferredSum) else _unchanged(other)
                return DeferredSum(sum_.part, sum_.group, residual)
    return None


def normed(of: FusedCalls, module: torch.nn.Module, x: DeferredSum) -> torch.Tensor | None:
    """Result of a module for a deferred sum, which the same call makes; None if no kernel does that."""
    members = [getattr(module, name, None) for _, name in of.members]
    if x.part is None or x.residual is None or not all(type(w) is torch.nn.Parameter for w in members):
        return None
    spec = of.specs.get((x.dtype, members[0].dtype if members else x.dtype, x.ndim))
    if spec is None or not spec.sum_before:
        return None
    if spec.autocasts and torch.is_autocast_enabled(x.device.type) or not spec.holds_for((module,)):
        return None
    if any(w.shape != of.of.extents for w in members) or spec.columns not in (None, x.shape[-1]):
        return None
    inputs = [x.kept_residual(), x.part.tensor, *(members[place - 1] for place in spec.places[1:])]
    total, made = over_ranks.run(inputs, spec.sum_before, 1, x.group)
    x.settle(total)
    return made


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Entry of a module whose result `RowwiseParallel` adds up over ranks; None for other modules."""
    style = torch_private.rowwise_style(module) if "torch.distributed.tensor" in sys.modules else None
    if style is None:
        return None
    kind = type(module).__name__
    if not style.is_whole_and_local:
        return Entry(name, kind, why="its result is not whole on every rank, or a DTensor")
    if module.weight.device_mesh.ndim != 1:
        return Entry(name, kind, why="it is sharded along several dimensions of a mesh")
    if module.bias is not None:
        return Entry(name, kind, why="its bias is added to the sum over ranks")
    if not set_forward.is_free(module):
        return Entry(name, kind, why=set_forward.ALREADY_SET)
    set_forward.set_on(module, _forward(style.output_layouts))
    return Entry(name, kind, "region_over_ranks", "its sum over ranks, with the residual sum and the norm that follow")


def _forward(layouts: Sequence[object]):
    def forward(self, x):
        weight = self.weight
        needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if needs_gradient or _observed() or torch.is_autocast_enabled(x.device.type):
            return type(self).forward(self, x)
        return _CompleteResult(layouts, _product(x.to_local(), weight.to_local(), weight.device_mesh.get_group()))

    return forward


@dataclass(frozen=True, eq=False)
class _CompleteResult:
    """Result of a module in the form that `RowwiseParallel` expects: already complete on every rank."""

    placements: Any
    local: torch.Tensor

    def to_local(self) -> torch.Tensor:
        return self.local


def _product(x: torch.Tensor, weight: torch.Tensor, group: distributed.ProcessGroup) -> DeferredSum:
    shape = (*x.shape[:-1], weight.shape[0])
    out = symmetric.scratch(group, "products", shape, x.dtype, x.device)
    if out is None:
        return DeferredSum(_RankPart(torch.nn.functional.linear(x, weight)), group)
    # No communication here: ranks may differ in which tensors are still alive.
    last = _last.get(group)
    if last is not None and (waiting := last()) is not None:
        waiting.keep()
    torch.mm(x.flatten(0, -2), weight.t(), out=out.view(-1, shape[-1]))
    part = _RankPart(out)
    _last[group] = weakref.ref(part)
    return DeferredSum(part, group)


_last: weakref.WeakKeyDictionary[object, weakref.ref[_RankPart]] = weakref.WeakKeyDictionary()
"""Part in the memory that the next product of each group overwrites."""
