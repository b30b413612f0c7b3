"""A provider for Hugging Face's ``kernels``: layers by the names that model files declare them with.

``kernelize`` sets the forward of a layer on each module whose class declares its name. One name stands for classes that
round differently, so what a kernel computes is what the module's own class does (`forward.recognized`), and a module
that none computes runs its class's own.
"""

import weakref
from dataclasses import dataclass
from types import FunctionType

import torch

from graphfuse.base.errors import ModelError
from graphfuse.torch.whole_models.forward import forward_of, recognized
from graphfuse.torch.whole_models.fused_calls import FusedCalls

_DEVICES = ("cuda", "cpu")

_functions: "weakref.WeakKeyDictionary[torch.nn.Module, FunctionType]" = weakref.WeakKeyDictionary()


def kernel_mapping(*devices: str) -> dict[str, dict[str, "Repository"]]:
    """Mapping for ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping``, for norms on these devices:
    "cuda" unless others are named. Layers are for inference and training; with ``Mode.TORCH_COMPILE`` ``kernels``
    keeps the model's own.

    ModelError for a device that nothing serves.
    """
    for device in devices:
        if device not in _DEVICES:
            raise ModelError(f"kernel_mapping: device {device!r}; accepted: {', '.join(map(repr, _DEVICES))}")
    return {name: dict.fromkeys(devices or ("cuda",), Repository(layer)) for name, layer in _LAYERS.items()}


@dataclass(frozen=True)
class Repository:
    """Source that ``kernels`` takes a layer from: here it is this package."""

    layer: type[torch.nn.Module]

    def load(self) -> type[torch.nn.Module]:
        return self.layer


class FusedNorm(torch.nn.Module):
    """Has forward alone, as ``kernels`` asks of a layer: it is called with the model's module."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _function_of(self)(self, hidden_states)


class FusedGatedNorm(torch.nn.Module):
    """Norm as ``FusedNorm``, with a gate."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return _function_of(self)(self, hidden_states, gate)


def _function_of(module: torch.nn.Module) -> FunctionType:
    """Function that runs in place of a module's forward: an operator, or its class's own."""
    function = _functions.get(module)
    if function is None:
        found, cls = recognized(module), type(module)
        function = _functions[module] = forward_of(found, cls) if isinstance(found, FusedCalls) else cls.forward
    return function


_LAYERS = {"RMSNorm": FusedNorm, "RMSNormZeroCentered": FusedNorm, "RMSNormGated": FusedGatedNorm}
