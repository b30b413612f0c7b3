"""Operators with gradients for training, and modules that replace torch's: norms, rotary embedding, softmax, attention
and cross entropy.

Each operator is ``graphfuse::NAME``. It computes in float32, or in float64 if a tensor is float64. It runs one graph in
forward and one in backward. For backward it keeps what the backward graph reads: for norms the normalized tensor, the
weight, the gate and the statistics of each row; for softmax the result. Attention with sinks calls torch's kernels
instead of a graph. ``fuse`` puts the operators into models. Users read docs/training.md and docs/models.md.
"""

from graphfuse.torch import sharding
from graphfuse.torch.attention.sinks import attention_with_sinks
from graphfuse.torch.compile_backend import compile_report, inductor_pass
from graphfuse.torch.modules.norms import AddRMSNorm, LayerNorm, RMSNorm, RMSNormSiLU
from graphfuse.torch.operators.definitions import (
    ada_layer_norm,
    add_layer_norm,
    add_rms_norm,
    gemma_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    llama_add_rms_norm,
    llama_rms_norm,
    log_softmax,
    normalize,
    rms_norm,
    rms_norm_silu,
    rms_norm_silu_gate,
    softmax,
)
from graphfuse.torch.operators.losses import CrossEntropyLoss, cross_entropy
from graphfuse.torch.operators.rope import QKNormRope, qk_norm_rope, qk_norm_rope_across_heads
from graphfuse.torch.override import override
from graphfuse.torch.whole_models import fuse, kernel_mapping, unfuse

__all__ = [
    "AddRMSNorm",
    "CrossEntropyLoss",
    "LayerNorm",
    "QKNormRope",
    "RMSNorm",
    "RMSNormSiLU",
    "ada_layer_norm",
    "add_layer_norm",
    "add_rms_norm",
    "attention_with_sinks",
    "compile_report",
    "cross_entropy",
    "fuse",
    "gemma_add_rms_norm",
    "gemma_rms_norm",
    "inductor_pass",
    "kernel_mapping",
    "layer_norm",
    "llama_add_rms_norm",
    "llama_rms_norm",
    "log_softmax",
    "normalize",
    "override",
    "qk_norm_rope",
    "qk_norm_rope_across_heads",
    "rms_norm",
    "rms_norm_silu",
    "rms_norm_silu_gate",
    "sharding",
    "softmax",
    "unfuse",
]


def __dir__() -> list[str]:
    return __all__
