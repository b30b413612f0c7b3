"""graphfuse: a cuDNN-frontend-style graph fusion engine.

Build an op graph with ``pygraph``, ``build`` it, ``execute`` it. Importing this loads
neither torch nor CUDA; names beyond the plain data come in when first used.
"""

from typing import TYPE_CHECKING

from graphfuse.dtypes import data_type
from graphfuse.enums import build_plan_policy, heur_mode, norm_forward_phase, reduction_mode, tensor_reordering
from graphfuse.errors import (
    CompilerNotFoundError,
    DeviceError,
    GraphfuseError,
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    HomeNotFoundError,
    KernelCompileError,
    KernelFaultError,
    PluginError,
    SettingError,
    ToolkitNotFoundError,
    VariantPackError,
    VariantPackTypeError,
    WorkspaceError,
)

if TYPE_CHECKING:  # what `_LAZY` loads when it is first used
    from graphfuse import functional as functional
    from graphfuse import torch as torch
    from graphfuse.functional import fused_rmsnorm_silu
    from graphfuse.graph import pygraph
    from graphfuse.runtime.handle import Handle, create_handle, destroy_handle, get_stream, set_stream
    from graphfuse.tensor import Tensor

__version__ = "0.1.0"

cudnnGraphNotSupportedError = GraphNotSupportedError  # noqa: N816 - cuDNN's spelling

_LAZY = {
    "pygraph": "graphfuse.graph",
    "Tensor": "graphfuse.tensor",
    "Handle": "graphfuse.runtime.handle",
    "create_handle": "graphfuse.runtime.handle",
    "destroy_handle": "graphfuse.runtime.handle",
    "set_stream": "graphfuse.runtime.handle",
    "get_stream": "graphfuse.runtime.handle",
    "fused_rmsnorm_silu": "graphfuse.functional",
    "functional": "graphfuse.functional",
    "torch": "graphfuse.torch",  # not in __all__: a star import would take torch's own name
}

__all__ = [
    "CompilerNotFoundError",
    "DeviceError",
    "GraphNotSupportedError",
    "GraphStateError",
    "GraphTypeError",
    "GraphValidationError",
    "GraphfuseError",
    "Handle",
    "HomeNotFoundError",
    "KernelCompileError",
    "KernelFaultError",
    "PluginError",
    "SettingError",
    "Tensor",
    "ToolkitNotFoundError",
    "VariantPackError",
    "VariantPackTypeError",
    "WorkspaceError",
    "build_plan_policy",
    "create_handle",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "functional",
    "fused_rmsnorm_silu",
    "get_stream",
    "heur_mode",
    "norm_forward_phase",
    "pygraph",
    "reduction_mode",
    "set_stream",
    "tensor_reordering",
]


def __dir__() -> list[str]:
    return [*__all__, "torch"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'graphfuse' has no attribute {name!r}")
    import importlib

    # Kept: looking it up so at each call would cost half of what the call does.
    module = importlib.import_module(_LAZY[name])
    found = globals()[name] = getattr(module, name, module)
    return found
