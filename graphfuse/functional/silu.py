"""RMSNorm followed by SiLU, with or without a gate."""

import torch

from graphfuse.base.dtypes import data_type
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import INPUT, OUT, WEIGHT, norm_of_input
from graphfuse.functional.tensor_parameter import FLOATS, FORMATS, PAIRS, TensorParameter, blocks, like, type_of, types
from graphfuse.ops import block_size

_BLOCK = block_size(data_type.FP4_E2M1)


def _build_silu(d: GraphBuilder) -> None:
    z = d.graph.swish(norm_of_input(d))
    if "block_scale" in d:
        z, scales = d.graph.block_scale_quantize(z, block_size=_BLOCK, axis=d.rank - 1)
        d.store("block_scale", scales)
    d.store("out", z)


_SILU = Variant(
    (
        INPUT,
        WEIGHT,
        TensorParameter("out", FORMATS | types(data_type.FP4_E2M1), like("input"), written=True, new=type_of("input")),
        TensorParameter(
            "block_scale",
            types(data_type.FP8_E4M3),
            blocks("input", _BLOCK),
            written=True,
            new=torch.float8_e4m3fn,
            only=("out", PAIRS),
        ),
    ),
    _build_silu,
)
_GATE = Variant(
    (INPUT, WEIGHT, TensorParameter("gate", FLOATS, like("input")), OUT),
    lambda d: d.store("out", d.graph.mul(d.graph.swish(norm_of_input(d)), d["gate"])),
)


@function(_SILU, "out", "block_scale")
def fused_rmsnorm_silu(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SiLU(RMSNorm(input, weight, eps)) over the last dimension.

    input, weight, eps, out: as for ``rmsnorm``; out may be NVFP4, too: float4_e2m1fn_x2 of shape
    (..., hidden / 2), hidden a multiple of 16. block_scale: with NVFP4, float8_e4m3fn of shape (..., hidden / 16),
    allocated if None; ignored with other formats.

    Returns out, or (out, block_scale) for NVFP4. Errors as in ``rmsnorm``.
    """


@function(_GATE, "out")
def rmsnorm_silu_gate(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """SiLU(RMSNorm(input, weight, eps)) * gate, both factors in float32.

    input, weight, eps, enable_pdl: as for ``rmsnorm``. gate: of input's shape; bfloat16, float16 or float32.
    out: as for ``rmsnorm``; it may be gate itself, too.

    Returns out. Errors as in ``rmsnorm``.
    """
