"""A provider for Hugging Face's ``kernels``: layers by the names that model files declare them with.

``kernelize`` sets the forward of a layer on each module whose class declares its name. One name stands for classes that
round differently, so the operator is chosen by what the module's own class computes (`module.recognized`), and a module
that no operator computes runs its class's own.
"""

import weakref
from dataclasses import dataclass
from types import FunctionType

import torch

from graphfuse.errors import ModelError
from graphfuse.torch.fusion.forward import forward_of
from graphfuse.torch.fusion.module import Norm, recognized

_NAMES = ("RMSNorm", "RMSNormZeroCentered")
_DEVICES = ("cuda", "cpu")

_functions: "weakref.WeakKeyDictionary[torch.nn.Module, FunctionType]" = weakref.WeakKeyDictionary()


def kernel_mapping(*devices: str) -> dict[str, dict[str, "Repository"]]:
    """What ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping`` take, for norms on these devices:
    "cuda" unless others are named. Layers are for inference and training; with ``Mode.TORCH_COMPILE`` ``kernels``
    keeps the model's own.

    ModelError for a device that nothing serves.
    """
    for device in devices:
        if device not in _DEVICES:
            raise ModelError(f"kernel_mapping: device {device!r}; accepted: {', '.join(map(repr, _DEVICES))}")
    return {name: {device: Repository() for device in devices or ("cuda",)} for name in _NAMES}


@dataclass(frozen=True)
class Repository:
    """Where ``kernels`` takes a layer from: here it is this package."""

    def load(self) -> type[torch.nn.Module]:
        return FusedNorm


class FusedNorm(torch.nn.Module):
    """Has forward alone, as ``kernels`` asks of a layer: it is called with the model's module."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        function = _functions.get(self)
        if function is None:
            found, cls = recognized(self), type(self)
            function = forward_of(found, cls) if isinstance(found, Norm) else cls.forward
            _functions[self] = function
        return function(self, hidden_states)
