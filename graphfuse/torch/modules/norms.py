"""Modules that replace ``torch.nn.RMSNorm`` and ``torch.nn.LayerNorm``, with the same parameters, state dicts and
arguments."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional import sharding
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED
from graphfuse.torch.operators.definitions import (
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_BIAS,
    RMS_NORM,
    RMS_NORM_SILU,
    epsilon,
)
from graphfuse.torch.operators.formula import Operator

_grad_enabled, _differentiates_forward = torch.is_grad_enabled, torch_private.differentiates_forward()


def _declines(*values: object) -> object:
    return DECLINED


class _Norm:
    """Base of modules that replace torch's norms.

    _last: the fast path of the last call without gradients, and the parameters and epsilon of that call.
    """

    _operators: ClassVar[tuple[Operator, ...]]  # with one parameter, with two
    _affine: ClassVar[tuple[str, ...]]  # names of its parameters
    _last: tuple

    def __init__(self, normalized_shape: int | Sequence[int], *arguments: Any, **options: Any) -> None:
        if isinstance(normalized_shape, torch.Tensor):
            raise VariantPackTypeError(
                "normalized_shape must be an int or a sequence of ints, got Tensor; give tensors to the module made"
            )
        super().__init__(normalized_shape, *arguments, **options)
        sharding.prepare()  # now, as calls of a compiled model do not do it

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def _scales(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Operator, tuple[torch.Tensor | None, ...]]:
        """Operator for the module's parameters, and those of them that it takes."""
        own = self._parameters
        weight, bias = own.get("weight", self), own.get("bias", self) if "bias" in self._affine else None
        computed = weight is self or bias is self  # as by a parametrization
        if computed or weight is None:  # nothing else compares x with normalized_shape
            self._check(tensors)
        if computed:
            weight, bias = self.weight, getattr(self, "bias", None)
        return (self._operators[0], (weight,)) if bias is None else (self._operators[1], (weight, bias))

    def _run(self, tensors: tuple[torch.Tensor, ...]):
        """Result of the operator. All dimensions of normalized_shape are flattened to one."""
        (operator, scales), count = self._scales(tensors), len(self.normalized_shape)
        eps = self.eps if self.eps is not None else epsilon(None, tensors[0])
        if count == 1:
            try:
                return operator.run(*tensors, *scales, eps)
            except VariantPackError:
                self._check(tensors)  # raises the module's own error for wrong shapes
                raise
        self._check(tensors)
        flat = (None if t is None else t.flatten() for t in scales)
        made = operator.run(*(t.flatten(-count) for t in tensors), *flat, eps)
        shape = self.normalized_shape
        return tuple(y.unflatten(-1, shape) for y in made) if isinstance(made, tuple) else made.unflatten(-1, shape)

    def _run_and_keep(self, tensors: tuple[torch.Tensor, ...]):
        """Result of `_run`. Keeps its fast path for the next call, unless a parameter is computed (as by a
        parametrization)."""
        made = self._run(tensors)
        known = (getattr(self, name) is self._parameters.get(name, self) for name in self._affine)
        if len(self.normalized_shape) == 1 and all(known):
            (operator, scales), eps = self._scales(tensors), epsilon(self.eps, tensors[0])
            own = [getattr(self, name) for name in self._affine]
            taken = eps if len(own) == 1 else (*scales, eps)
            self.__dict__["_last"] = (operator.inference.last() or _declines, *own, self.eps, taken)
        return made

    def _check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        shape = self.normalized_shape
        for name, t in zip(self._operators[0].tensors, tensors, strict=False):  # names of parameters come last
            if not isinstance(t, torch.Tensor):
                raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
            if t.is_nested:  # torch does not give the shape of nested tensors
                raise VariantPackTypeError(f"{name} is a nested tensor; accepted: layout torch.strided")
            if t.shape[-len(shape) :] != shape:
                accepted = ", ".join(map(str, shape))
                raise VariantPackError(f"{name} has shape {tuple(t.shape)}; accepted: (..., {accepted})")


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` computed by ``rms_norm``, with the same arguments: normalized_shape, eps,
    elementwise_affine, device and dtype."""

    _operators = (RMS_NORM,)
    _affine = ("weight",)
    # Fast path, weight, epsilon as the module has it, and epsilon as a number.
    _last: tuple[Callable[..., object], torch.Tensor | None, float | None, float] = (_declines, None, None, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        if is_dynamo_compiling() or _grad_enabled() or _differentiates_forward():
            return self._run((x,))
        fast, weight, given, eps = self._last
        if weight is self._parameters.get("weight", self) and self.eps == given:
            made = fast(x, weight, eps)
            if made is not DECLINED:
                return made
        return self._run_and_keep((x,))


class RMSNormSiLU(RMSNorm):
    """SiLU of RMSNorm, computed by ``rms_norm_silu``."""

    _operators = (RMS_NORM_SILU,)


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum, computed by ``add_rms_norm``."""

    _operators = (ADD_RMS_NORM,)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (..., *normalized_shape). Returns (norm of the sum in x's type, sum in residual's type)."""
        if is_dynamo_compiling() or _grad_enabled() or _differentiates_forward():
            return self._run((x, residual))
        fast, weight, given, eps = self._last
        if weight is self._parameters.get("weight", self) and self.eps == given:
            made = fast(x, residual, weight, eps)
            if made is not DECLINED:
                return made
        return self._run_and_keep((x, residual))


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` computed by ``layer_norm``, with the same arguments: normalized_shape, eps,
    elementwise_affine, bias, device and dtype."""

    _operators = (LAYER_NORM, LAYER_NORM_BIAS)
    _affine = ("weight", "bias")
    # Fast path, weight, bias, epsilon, and the fast path's arguments after x.
    _last: tuple[Callable[..., object], torch.Tensor | None, torch.Tensor | None, float | None, tuple] = (
        _declines,
        None,
        None,
        None,
        (),
    )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        if is_dynamo_compiling() or _grad_enabled() or _differentiates_forward():
            return self._run((x,))
        fast, weight, bias, given, arguments = self._last
        own = self._parameters
        if weight is own.get("weight", self) and bias is own.get("bias", self) and self.eps == given:
            made = fast(x, *arguments)
            if made is not DECLINED:
                return made
        return self._run_and_keep((x,))
