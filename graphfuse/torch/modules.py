"""Modules that take the place of ``torch.nn.RMSNorm``: its parameters, its state dict, its arguments."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import VariantPackError, VariantPackTypeError
from graphfuse.runtime.fastcall import DECLINED
from graphfuse.torch.formula import Operator
from graphfuse.torch.operators import ADD_RMS_NORM, RMS_NORM, RMS_NORM_SILU, epsilon


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by ``rms_norm``: normalized_shape, eps, elementwise_affine, device and dtype as there."""

    _operator: ClassVar[Operator] = RMS_NORM
    _like_last: tuple[Callable[..., object], float] | None = None  # the fast path of the last call without gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        return self._over_rows(x)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_like_last"}

    def _over_rows(self, *tensors: torch.Tensor):
        """The operator over all dimensions of normalized_shape as one."""
        if is_dynamo_compiling() or torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return self._checked(tensors)[0]
        weight = self._parameters.get("weight")
        if self._like_last is not None:
            fast, eps = self._like_last
            made = fast(*tensors, weight, eps if self.eps is None else self.eps)
            if made is not DECLINED:
                return made
        made, eps = self._checked(tensors)
        if len(self.normalized_shape) == 1 and weight is self.weight:  # not a weight that something else computes
            fast = self._operator.inference.known(*tensors, weight, eps)
            self.__dict__["_like_last"] = None if fast is None else (fast, eps)
        return made

    def _checked(self, tensors: tuple[torch.Tensor, ...]) -> tuple[object, float]:
        """What the operator makes, and the epsilon it was given."""
        shape, operator = self.normalized_shape, self._operator
        for name, t in zip(operator.tensors, tensors, strict=False):
            if not isinstance(t, torch.Tensor):
                raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
            if t.shape[-len(shape) :] != shape:
                accepted = ", ".join(map(str, shape))
                raise VariantPackError(f"{name} has shape {tuple(t.shape)}; accepted: (..., {accepted})")
        eps, weight = epsilon(self.eps, tensors[0]), self.weight
        if len(shape) == 1:
            return operator.run(*tensors, weight, eps), eps
        weight = None if weight is None else weight.flatten()
        made = operator.run(*(t.flatten(-len(shape)) for t in tensors), weight, eps)
        unflat = tuple(y.unflatten(-1, shape) for y in made) if isinstance(made, tuple) else made.unflatten(-1, shape)
        return unflat, eps


class RMSNormSiLU(RMSNorm):
    """SiLU of RMSNorm, by ``rms_norm_silu``."""

    _operator = RMS_NORM_SILU


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum, by ``add_rms_norm``."""

    _operator = ADD_RMS_NORM

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (..., *normalized_shape). Returns (norm of the sum in x's type, sum in residual's type)."""
        return self._over_rows(x, residual)
