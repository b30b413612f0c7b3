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

_grad_enabled = torch.is_grad_enabled
_dual_levels = torch_private.dual_levels()


def _declines(*values: object) -> object:
    return DECLINED


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by ``rms_norm``: normalized_shape, eps, elementwise_affine, device and dtype as there."""

    _operator: ClassVar[Operator] = RMS_NORM
    # The fast path of the last call without gradients, the weight and epsilon that the module had, and the epsilon as a
    # number.
    _last: tuple[Callable[..., object], torch.Tensor | None, float | None, float] = (_declines, None, None, 0.0)

    def __init__(self, normalized_shape, *arguments, **options):
        if isinstance(normalized_shape, torch.Tensor):
            raise VariantPackTypeError(
                "normalized_shape must be an int or a sequence of ints, got Tensor; give tensors to the module made"
            )
        super().__init__(normalized_shape, *arguments, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        if is_dynamo_compiling() or _grad_enabled() or _dual_levels._current_level >= 0:
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
        operator, weight = self._operator, self.weight
        if weight is None or len(self.normalized_shape) > 1:
            self._check(tensors)
        try:
            if len(self.normalized_shape) == 1:
                return operator.run(*tensors, weight, epsilon(self.eps, tensors[0]))
        except VariantPackError:
            self._check(tensors)  # says it in the module's words
            raise
        count = len(self.normalized_shape)
        weight = None if weight is None else weight.flatten()
        made = operator.run(*(t.flatten(-count) for t in tensors), weight, epsilon(self.eps, tensors[0]))
        shape = self.normalized_shape
        return tuple(y.unflatten(-1, shape) for y in made) if isinstance(made, tuple) else made.unflatten(-1, shape)

    def _run_and_keep(self, tensors: tuple[torch.Tensor, ...]):
        """`_run`, and its fast path for the next call, unless something else computes the weight."""
        made = self._run(tensors)
        if len(self.normalized_shape) == 1 and self.weight is self._parameters.get("weight", self):
            eps = epsilon(self.eps, tensors[0])
            fast = self._operator.inference.known(*tensors, self.weight, eps)
            self.__dict__["_last"] = (fast or _declines, self.weight, self.eps, eps)
        return made

    def _check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        shape = self.normalized_shape
        for name, t in zip(self._operator.tensors, tensors):  # noqa: B905 - a weight comes behind; torch 2.8 traces no more
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
        if is_dynamo_compiling() or _grad_enabled() or _dual_levels._current_level >= 0:
            return self._run((x, residual))
        fast, weight, given, eps = self._last
        if weight is self._parameters.get("weight", self) and self.eps == given:
            made = fast(x, residual, weight, eps)
            if made is not DECLINED:
                return made
        return self._run_and_keep((x, residual))
