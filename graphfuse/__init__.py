"""graphfuse: a graph fusion engine with the API of the cuDNN frontend.

Build a graph with ``pygraph``, ``build`` it, ``execute`` it. Importing this package loads neither torch nor CUDA. Names
that need them are imported on first use.
"""

import sys
from typing import TYPE_CHECKING

from graphfuse.base import cudnn_names
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import (
    attention_implementation,
    behavior_note,
    build_plan_policy,
    convolution_mode,
    diagonal_alignment,
    heur_mode,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    numerical_note,
    reduction_mode,
    reshape_mode,
    tensor_reordering,
)
from graphfuse.base.errors import (
    CheckFailedError,
    CompilerNotFoundError,
    DeviceError,
    GraphfuseError,
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    GraphvizError,
    HomeNotFoundError,
    KernelCompileError,
    KernelFaultError,
    ModelError,
    ModelTypeError,
    NotOfferedError,
    PluginError,
    RankTimeoutError,
    ReferenceEngineWarning,
    SerializedError,
    SettingError,
    ToolkitNotFoundError,
    VariantPackError,
    VariantPackTypeError,
    WorkspaceError,
)

if TYPE_CHECKING:  # what `_LAZY` loads when it is first used
    from graphfuse import engines as engines  # type: ignore[attr-defined]
    from graphfuse import explain as explain
    from graphfuse import functional as functional
    from graphfuse import torch as torch
    from graphfuse.api import pygraph
    from graphfuse.api.building import graph, graph_cache, jit
    from graphfuse.api.wrapper import Graph
    from graphfuse.functional import fused_rmsnorm_silu
    from graphfuse.gradients.differentiate import Differentiated, differentiate
    from graphfuse.op_graph.tensor import Tensor
    from graphfuse.planning.engine_numbers import knob
    from graphfuse.planning.kernel_cache import create_kernel_cache
    from graphfuse.runtime.device_properties import create_device_properties
    from graphfuse.runtime.handle import Handle, create_handle, destroy_handle, get_stream, set_stream

__version__ = "0.1.0"

cudnnGraphNotSupportedError = GraphNotSupportedError  # noqa: N816 - cuDNN's spelling

_BACKEND = (9, 28, 0)


def backend_version() -> int:
    """The version of cuDNN's backend whose graph API this package follows, as cuDNN encodes it.

    It does not depend on a cuDNN on this machine; none is loaded."""
    major, minor, patch = _BACKEND
    return major * 10000 + minor * 100 + patch


def backend_version_string() -> str:
    """``backend_version`` as text with points, such as "9.28.0"."""
    return ".".join(map(str, _BACKEND))


_LAZY = {
    "pygraph": "graphfuse.api",
    "Tensor": "graphfuse.op_graph.tensor",
    "Graph": "graphfuse.api.wrapper",
    "graph": "graphfuse.api.building",
    "graph_cache": "graphfuse.api.building",
    "jit": "graphfuse.api.building",
    "Handle": "graphfuse.runtime.handle",
    "Differentiated": "graphfuse.gradients.differentiate",
    "differentiate": "graphfuse.gradients.differentiate",
    "create_device_properties": "graphfuse.runtime.device_properties",
    "create_handle": "graphfuse.runtime.handle",
    "create_kernel_cache": "graphfuse.planning.kernel_cache",
    "destroy_handle": "graphfuse.runtime.handle",
    "set_stream": "graphfuse.runtime.handle",
    "get_stream": "graphfuse.runtime.handle",
    "engines": "graphfuse.engines",
    "explain": "graphfuse.explain",
    "fused_rmsnorm_silu": "graphfuse.functional",
    "functional": "graphfuse.functional",
    "knob": "graphfuse.planning.engine_numbers",
    "torch": "graphfuse.torch",  # not in __all__: a star import would take torch's own name
}

__all__ = [
    "Graph",
    "CheckFailedError",
    "CompilerNotFoundError",
    "DeviceError",
    "Differentiated",
    "GraphNotSupportedError",
    "GraphStateError",
    "GraphTypeError",
    "GraphValidationError",
    "GraphfuseError",
    "Handle",
    "HomeNotFoundError",
    "GraphvizError",
    "KernelCompileError",
    "KernelFaultError",
    "ModelError",
    "ModelTypeError",
    "NotOfferedError",
    "PluginError",
    "ReferenceEngineWarning",
    "RankTimeoutError",
    "SerializedError",
    "SettingError",
    "Tensor",
    "ToolkitNotFoundError",
    "VariantPackError",
    "VariantPackTypeError",
    "WorkspaceError",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "diagonal_alignment",
    "differentiate",
    "explain",
    "functional",
    "fused_rmsnorm_silu",
    "get_stream",
    "graph",
    "graph_cache",
    "heur_mode",
    "jit",
    "knob",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "pygraph",
    "reduction_mode",
    "reshape_mode",
    "set_stream",
    "tensor_reordering",
]


def __dir__() -> list[str]:
    return [*__all__, "torch"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        cudnn_names.refuse_of_module(name, sys.modules[__name__])
    import importlib

    # Kept as a global, as this lookup at every call would take half as long as the call itself.
    module = importlib.import_module(_LAZY[name])
    found = globals()[name] = getattr(module, name, module)
    return found
