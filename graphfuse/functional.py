"""Ready-made calls on torch tensors: a graph is built and planned once per problem, then only executed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.dtypes import data_type, from_foreign
from graphfuse.enums import heur_mode, norm_forward_phase
from graphfuse.errors import VariantPackError, VariantPackTypeError
from graphfuse.graph import pygraph

if TYPE_CHECKING:
    import torch

_BLOCK = 16


def fused_rmsnorm_silu(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SiLU(RMSNorm(input, weight, eps)) over the last dimension.

    input: (..., hidden), bfloat16, float16 or float32, any strides of the leading
    dimensions. weight: (hidden,), of any of these types. out: its dtype selects the
    format: a 16- or 32-bit float or float8 type of shape (..., hidden) (default: input's
    dtype, newly allocated), or float4_e2m1fn_x2 of shape (..., hidden / 2) for NVFP4.
    block_scale: only with NVFP4, float8_e4m3fn of shape (..., hidden / 16), allocated if
    None.

    Returns out, or (out, block_scale) for NVFP4. On CPU tensors the reference engine
    runs. Not differentiable. Raises VariantPackError / VariantPackTypeError for tensors
    that do not fit, naming the argument.
    """
    import torch

    _check(torch, "input", input)
    _check(torch, "weight", weight)
    if input.dim() < 1 or weight.shape != input.shape[-1:]:
        raise VariantPackError(
            f"weight must have shape (hidden,) with input's last extent, got {tuple(weight.shape)} "
            f"for input {tuple(input.shape)}"
        )
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    _check(torch, "out", out)
    quantized = out.dtype is getattr(torch, "float4_e2m1fn_x2", None)
    if quantized and block_scale is None:
        shape = (*input.shape[:-1], input.shape[-1] // _BLOCK)
        block_scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=input.device)
    tensors = {"input": input, "weight": weight, "out": out}
    if quantized:
        _check(torch, "block_scale", block_scale)
        tensors["block_scale"] = block_scale
    for name, tensor in tensors.items():
        if tensor.device != input.device:
            raise VariantPackError(f"{name} is on {tensor.device}, input is on {input.device}; one device is accepted")
    graph = _planned(str(input.device), tuple((name, _layout(t)) for name, t in tensors.items()))
    graph.execute({**tensors, "epsilon": eps})
    return (out, block_scale) if quantized else out


@dataclass(frozen=True)
class _Layout:
    """What a plan depends on in a tensor: not its address, but what that is a multiple of."""

    dtype: data_type
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    alignment: int


def _layout(tensor: torch.Tensor) -> _Layout:
    address = tensor.data_ptr()
    alignment = min(16, address & -address) if address else 16
    return _Layout(from_foreign(tensor.dtype), tuple(tensor.shape), tensor.stride(), alignment)


@functools.lru_cache(maxsize=1024)
def _planned(device: str, layouts: tuple[tuple[str, _Layout], ...]) -> pygraph:
    """The built graph of one problem. The row count is part of the problem but never of a kernel."""
    from graphfuse.runtime.handle import create_handle

    tensors = dict(layouts)
    graph = pygraph(
        "fused_rmsnorm_silu", intermediate_data_type=data_type.FLOAT, handle=create_handle(device)
    )
    x = _declare(graph, "input", tensors["input"])
    rank = len(tensors["input"].dim)
    weight = tensors["weight"]
    scale = graph.tensor(
        (*(1,) * (rank - 1), *weight.dim),
        (*(weight.dim[0] * weight.stride[0],) * (rank - 1), *weight.stride),
        weight.dtype,
        name="weight",
        byte_alignment=weight.alignment,
    )
    epsilon = graph.tensor([1] * rank, data_type=data_type.FLOAT, is_pass_by_value=True, name="epsilon")
    y = graph.rmsnorm(x, scale, epsilon, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    z = graph.swish(y)
    if "block_scale" in tensors:
        z, scales = graph.block_scale_quantize(z, block_size=_BLOCK, axis=rank - 1)
        _set_layout(scales.set_output().set_name("block_scale"), tensors["block_scale"])
    _set_layout(z.set_output().set_name("out"), _unpacked(tensors["out"]))
    graph.build([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    return graph


def _declare(graph: pygraph, name: str, layout: _Layout):
    return graph.tensor(layout.dim, layout.stride, layout.dtype, name=name, byte_alignment=layout.alignment)


def _set_layout(tensor, layout: _Layout) -> None:
    tensor.set_dim(layout.dim).set_stride(layout.stride).set_data_type(layout.dtype)
    tensor.set_byte_alignment(layout.alignment)


def _unpacked(layout: _Layout) -> _Layout:
    """A layout in elements, for a type of which torch counts pairs."""
    if layout.dtype is not data_type.FP4_E2M1:
        return layout
    dim = (*layout.dim[:-1], layout.dim[-1] * 2)
    stride = (*(s * 2 for s in layout.stride[:-1]), layout.stride[-1])
    return _Layout(layout.dtype, dim, stride, layout.alignment)


def _check(torch, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise VariantPackTypeError(f"{name} must be of a floating-point type, got {value.dtype}")
