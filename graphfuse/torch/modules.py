"""Modules that take the place of ``torch.nn.RMSNorm``: its parameters, its state dict, its arguments."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.errors import VariantPackError, VariantPackTypeError
from graphfuse.runtime import torch_private
from graphfuse.runtime.fastcall import DECLINED
from graphfuse.torch.formula import Operator
from graphfuse.torch.operators import ADD_RMS_NORM, RMS_NORM, RMS_NORM_SILU, epsilon

_grad_enabled, _differentiates_forward = torch.is_grad_enabled, torch_private.differentiates_forward()


def _declines(*values: object) -> object:
    return DECLINED


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by ``rms_norm``: normalized_shape, eps, elementwise_affine, device and dtype as there."""

    _operator: ClassVar[Operator] = RMS_NORM
    # The fast path of the last call without gradients, the weight and epsilon that the module had then, and the epsilon
    # as a number.
    _last: tuple[Callable[..., object], torch.Tensor | None, float | None, float] = (_declines, None, None, 0.0)

    def __init__(self, normalized_shape, *arguments, **options):
        if isinstance(normalized_shape, torch.Tensor):
            raise VariantPackTypeError(
                "normalized_shape must be an int or a sequence of ints, got Tensor; give tensors to the module made"
            )
        super().__init__(normalized_shape, *arguments, **options)

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

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def _run(self, tensors: tuple[torch.Tensor, ...]):
        """The operator over all dimensions of normalized_shape as one."""
        operator, weight, count = self._operator, self._parameters.get("weight"), len(self.normalized_shape)
        if weight is None:  # or something else computes it
            self._check(tensors)
            weight = self.weight
        eps = self.eps if self.eps is not None else epsilon(None, tensors[0])
        if count == 1:
            try:
                return operator.run(*tensors, weight, eps)
            except VariantPackError:
                self._check(tensors)  # says it in the module's words
                raise
        self._check(tensors)
        weight = None if weight is None else weight.flatten()
        made = operator.run(*(t.flatten(-count) for t in tensors), weight, eps)
        shape = self.normalized_shape
        return tuple(y.unflatten(-1, shape) for y in made) if isinstance(made, tuple) else made.unflatten(-1, shape)

    def _run_and_keep(self, tensors: tuple[torch.Tensor, ...]):
        """`_run`, keeping its fast path for the next call, unless the weight is computed (as by a parametrization)."""
        made = self._run(tensors)
        if len(self.normalized_shape) == 1 and self.weight is self._parameters.get("weight", self):
            fast = self._operator.inference.last() or _declines
            self.__dict__["_last"] = (fast, self.weight, self.eps, epsilon(self.eps, tensors[0]))
        return made

    def _check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        shape = self.normalized_shape
        for name, t in zip(self._operator.tensors, tensors, strict=False):  # a weight comes behind
            if not isinstance(t, torch.Tensor):
                raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
            if t.is_nested:  # whose shape torch would not tell
                raise VariantPackTypeError(f"{name} is a nested tensor; accepted: layout torch.strided")
            if t.shape[-len(shape) :] != shape:
                accepted = ", ".join(map(str, shape))
                raise VariantPackError(f"{name} has shape {tuple(t.shape)}; accepted: (..., {accepted})")


class RMSNormSiLU(RMSNorm):
    """SiLU of RMSNorm, by ``rms_norm_silu``."""

    _operator = RMS_NORM_SILU


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum, by ``add_rms_norm``."""

    _operator = ADD_RMS_NORM

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
