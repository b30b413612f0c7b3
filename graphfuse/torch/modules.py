"""Modules that take the place of ``torch.nn.RMSNorm``: its parameters, its state dict, its arguments."""

from collections.abc import Callable

import torch

from graphfuse.errors import VariantPackError, VariantPackTypeError
from graphfuse.torch.operators import add_rms_norm, rms_norm, rms_norm_silu


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by ``rms_norm``: normalized_shape, eps, elementwise_affine, device and dtype as there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        return _over_rows(self, rms_norm, x)


class RMSNormSiLU(RMSNorm):
    """SiLU of RMSNorm, by ``rms_norm_silu``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., *normalized_shape). Returns a tensor of x's shape and type."""
        return _over_rows(self, rms_norm_silu, x)


class AddRMSNorm(RMSNorm):
    """RMSNorm of a residual sum, by ``add_rms_norm``."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (..., *normalized_shape). Returns (norm of the sum in x's type, sum in residual's type)."""
        return _over_rows(self, add_rms_norm, x, residual)


def _over_rows(module: torch.nn.RMSNorm, operator: Callable[..., object], *tensors: torch.Tensor):
    """The operator over all dimensions of normalized_shape as one."""
    shape = module.normalized_shape
    for n, t in enumerate(tensors):  # torch 2.8 cannot trace zip(..., strict=False)
        name = ("x", "residual")[n]
        if not isinstance(t, torch.Tensor):
            raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
        if t.shape[-len(shape) :] != shape:
            raise VariantPackError(f"{name} has shape {tuple(t.shape)}; accepted: (..., {', '.join(map(str, shape))})")
    if len(shape) == 1:
        return operator(*tensors, module.weight, module.eps)
    weight = None if module.weight is None else module.weight.flatten()
    made = operator(*(t.flatten(-len(shape)) for t in tensors), weight, module.eps)
    return tuple(y.unflatten(-1, shape) for y in made) if isinstance(made, tuple) else made.unflatten(-1, shape)
