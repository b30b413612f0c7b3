"""A provider for Hugging Face's ``kernels``: layers under the names that model files declare.

``kernelize`` sets the forward of a layer on each module whose class declares its name. Classes that round differently
may share a name. So a kernel is made from the module's own class (`forward.recognized`); a module that no kernel
computes runs its class's own forward.
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
    """Mapping for ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping``, for norms on the given
    devices. devices: "cuda" by default. Layers are for inference and training. With ``Mode.TORCH_COMPILE`` ``kernels``
    keeps the model's own. Raises ModelError for an unsupported device."""
    for device in devices:
        if device not in _DEVICES:
            raise ModelError(f"kernel_mapping: device {device!r}; accepted: {', '.join(map(repr, _DEVICES))}")
    return {name: dict.fromkeys(devices or ("cuda",), Repository(layer)) for name, layer in _LAYERS.items()}


@dataclass(frozen=True)
class Repository:
    """Source from which ``kernels`` loads a layer: this package."""

    layer: type[torch.nn.Module]

    def load(self) -> type[torch.nn.Module]:
        return self.layer


class FusedNorm(torch.nn.Module):
    """Norm with a forward only, as ``kernels`` requires: it is called with the model's module as self."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _function_of(self)(self, hidden_states)


class FusedGatedNorm(torch.nn.Module):
    """Norm like ``FusedNorm``, with a gate."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return _function_of(self)(self, hidden_states, gate)


def _function_of(module: torch.nn.Module) -> FunctionType:
    """Function that replaces a module's forward: an operator, or the class's own forward."""
    function = _functions.get(module)
    if function is None:
        found, cls = recognized(module), type(module)
        function = _functions[module] = forward_of(found, cls) if isinstance(found, FusedCalls) else cls.forward
    return function


_LAYERS = {"RMSNorm": FusedNorm, "RMSNormZeroCentered": FusedNorm, "RMSNormGated": FusedGatedNorm}
