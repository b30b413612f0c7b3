"""Names of cuDNN's frontend (1.32) that graphfuse does not have, each with a substitute, and the errors that name it.

A test fails if graphfuse has a listed name.
"""

import enum
import re
from collections.abc import Mapping
from typing import NoReturn

from graphfuse.base.errors import NotOfferedError

_CAPTURE = "capture execute in a CUDA graph, with torch.cuda.graph or the driver: it allocates nothing"
_KNOBS = "the type of a knob is its name, a text"
_INSPECT = "graph.explanation() has nodes, tensors and regions as data, print(graph) the graph as Python"
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention; graphfuse.functional.qk_rmsnorm norms queries and keys"
_RECURRENCE = "there are no recurrences over a sequence; norms and gates around one are graphs of their own"
_RECURRENCES = tuple(
    f"{name}{step}"
    for name in ("gdn", "gdn2", "gdp", "kda", "mamba2")
    for step in ("", "_bwd", "_summary", "_summary_bwd")
)
_MATMUL = "torch.matmul, and the operations around it as a graph of their own"

MODULE: Mapping[str, str] = {
    "DeviceInfo": "Handle.device has what is known of a device",
    "FRONTEND_KNOB_TYPE_BASE": _KNOBS,
    "GraphContext": "pygraph's constructor takes the data types",
    "Node": _INSPECT,
    "NodeType": _INSPECT,
    "cuda_graph_retention": _CAPTURE,
    "datatypes": "data types may be given as torch's or numpy's",
    "experimental": "graphfuse.functional and graphfuse.torch have functions ready to call",
    "fla": _RECURRENCE,
    "get_last_error_string": "errors are exceptions, GraphfuseError, whose messages say it all",
    "graph_types": _INSPECT,
    "handle": "its type is graphfuse.Handle",
    "is_frontend_knob_type": _KNOBS,
    "jax": "arrays of JAX can be given to execute by DLPack",
    "knob_type": _KNOBS,
    "nodes": _INSPECT,
    "scalar_type": "tensor_scalar makes a constant, tensor(is_pass_by_value=True) what execute is given",
    "sdpa_capabilities": "graph.explain() says which engine runs a node of sdpa, and why others declined",
}

_KERNELS = tuple(
    (re.compile(pattern, re.IGNORECASE), hint)
    for pattern, hint in (
        ("attention|attn|gqa|hca|hstu|sdpa|kv_lengths|mask_plan|^csa|^(bsa|dsa|nsa)$", _ATTENTION),
        ("gemm|moe|mhc_?projection|blockscaledtensor|pack_(back|for)ward_weights", _MATMUL),
        ("conv[13]d", "torch.nn.functional.conv1d or conv3d, and what follows as a graph of its own"),
        ("rms_?norm", "rmsnorm, and what follows, as a graph; graphfuse.functional.fused_rmsnorm_silu is one of them"),
        ("rope", "rotate with torch"),
        ("^gnn", "no operation here goes along the edges of a graph: torch's index_add and scatter_reduce do"),
        ("engram|triangle_?mult", "products with torch; norms and gates around them are graphs of their own"),
    )
)
"""Substitutes for ready-made kernels of cuDNN's frontend. Their names change with each version, so patterns match
families of names; the first match counts."""

PYGRAPH: Mapping[str, str] = {
    **dict.fromkeys(_RECURRENCES, _RECURRENCE),
    "backend_plan_entries": "plans, the one list of all plans: those of the engine named cudnn are its own",
    "selected_engine": "explanation().regions tells the engine of each region",
    "context": "the constructor takes the data types",
    "inspect": _INSPECT,
    "get_cuda_graph_retention": _CAPTURE,
}

TENSOR: Mapping[str, str] = {}

_VECTORS = "there are no vectorized or reordered layouts of integers"

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "data_type": {
        "FAST_FLOAT_FOR_FP8": "FLOAT",
        "FP8_E5M3": "FP8_E4M3, FP8_E5M2 or FP8_E8M0",
        "INT4": "INT8",
        "INT8x32": f"INT8; {_VECTORS}",
        "INT8x4": f"INT8; {_VECTORS}",
        "UINT8x4": f"UINT8; {_VECTORS}",
    },
    "reduction_mode": {"NOT_SET": "name the mode"},
    "tensor_reordering": {"F16x16": "NONE", "INT8x32": f"NONE; {_VECTORS}"},
}
"""Substitutes for members of enumerations, by the enumeration's name."""

KEYWORDS: Mapping[str, tuple[object, str]] = {
    "sm_count": (None, "kernels are planned for the whole device: leave it out"),
    "cuda_graph_retention": (None, _CAPTURE),
    "ctx": (None, "give the handle, whose device and stream count, to the graph's constructor or to execute"),
    "in_place_index": (None, "leave it out: no input shares memory with an output"),
}
"""Arguments of pygraph's methods that are accepted with one value, which has no effect: that value, and a substitute
for all others."""


class Members(enum.EnumMeta):
    """Metaclass of cuDNN's enumerations: a member that graphfuse lacks raises an error with its substitute."""

    def __getattr__(cls, name: str) -> object:
        known = getattr(enum.EnumMeta, "__getattr__", None)  # up to Python 3.11 it looks up the members
        if known is not None:
            try:
                return known(cls, name)
            except AttributeError:
                pass
        refuse(cls.__name__, name, MEMBERS.get(cls.__name__, {}), cls)


def refuse_of_module(name: str, owner: object) -> NoReturn:
    """Raises the error for a missing attribute of the package, with a substitute for a ready-made kernel, too."""
    kernel = next((hint for pattern, hint in _KERNELS if pattern.search(name)), None)
    if kernel is not None and name not in MODULE and not name.startswith("_"):
        raise NotOfferedError(f"graphfuse has no {name!r}, nor others of cuDNN's ready-made kernels; instead: {kernel}")
    refuse("graphfuse", name, MODULE, owner)


def refuse(where: str, name: str, instead: Mapping[str, str], owner: object) -> NoReturn:
    """Raises NotOfferedError with the substitute if cuDNN has the attribute, else AttributeError."""
    if name in instead:
        raise NotOfferedError(f"{where} has no {name!r}, which cuDNN's frontend has; instead: {instead[name]}")
    raise AttributeError(f"{where} has no attribute {name!r}", name=name, obj=owner)
