"""Ready-made functions of torch tensors. A graph is planned once per problem; later calls only launch it.

Names, argument order and in-place updates are those of FlashInfer if it has the function. Each function is also an
operator of torch, ``graphfuse::NAME``, which torch.compile and torch.export use.
"""

from graphfuse.functional import sharding
from graphfuse.functional.adaptive import adalayernorm, add_adalayernorm, add_layernorm
from graphfuse.functional.all_reduce import all_reduce_add_rmsnorm
from graphfuse.functional.explanation import explain
from graphfuse.functional.fp4 import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from graphfuse.functional.fp8 import (
    fused_add_rmsnorm_quant,
    fused_add_rmsnorm_quant_dynamic,
    layernorm_quant,
    quantize_fp8,
    rmsnorm_quant,
    rmsnorm_quant_dynamic,
    silu_mul_fp8,
)
from graphfuse.functional.grid import cos_sin_of_grid
from graphfuse.functional.losses import cross_entropy, cross_entropy_backward
from graphfuse.functional.norms import (
    fused_add_layernorm,
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    gemma_sandwich_rmsnorm,
    layernorm,
    qk_rmsnorm,
    rmsnorm,
    sandwich_rmsnorm,
)
from graphfuse.functional.rope import qk_norm_rope, qk_norm_rope_across_heads, qk_norm_rope_cache
from graphfuse.functional.sequence_parallel import (
    reduce_scatter_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
    rmsnorm_all_gather,
)
from graphfuse.functional.silu import fused_rmsnorm_silu, rmsnorm_silu_gate
from graphfuse.functional.softmax import log_softmax, logsumexp, normalize, softmax

__all__ = [
    "adalayernorm",
    "add_adalayernorm",
    "add_layernorm",
    "add_rmsnorm_fp4quant",
    "all_reduce_add_rmsnorm",
    "cos_sin_of_grid",
    "cross_entropy",
    "cross_entropy_backward",
    "explain",
    "fused_add_layernorm",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "fused_add_rmsnorm_quant_dynamic",
    "fused_rmsnorm_silu",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "log_softmax",
    "logsumexp",
    "normalize",
    "gemma_sandwich_rmsnorm",
    "qk_norm_rope",
    "qk_norm_rope_across_heads",
    "qk_norm_rope_cache",
    "qk_rmsnorm",
    "quantize_fp8",
    "reduce_scatter_add_rmsnorm",
    "reduce_scatter_add_rmsnorm_all_gather",
    "rmsnorm",
    "rmsnorm_all_gather",
    "rmsnorm_fp4quant",
    "rmsnorm_quant",
    "rmsnorm_quant_dynamic",
    "rmsnorm_silu_gate",
    "softmax",
    "sandwich_rmsnorm",
    "silu_mul_fp8",
]

sharding.prepare()


def __dir__() -> list[str]:
    return __all__
