"""Norms, softmax and cross entropy for training: operators that autograd knows, and modules that take the place of
torch's.

Each operator is ``graphfuse::NAME``; it computes in float32 (float64 where a tensor is), runs one graph forward and
one backward, and keeps for backward what the backward graph reads: the normalized tensor, the weight, the gate and
the statistics of each row; of softmax the result. docs/training.md is for users.
"""

from graphfuse.torch import sharding
from graphfuse.torch.losses import CrossEntropyLoss, cross_entropy
from graphfuse.torch.modules import AddRMSNorm, LayerNorm, RMSNorm, RMSNormSiLU
from graphfuse.torch.operators import (
    ada_layer_norm,
    add_layer_norm,
    add_rms_norm,
    gemma_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    log_softmax,
    normalize,
    rms_norm,
    rms_norm_silu,
    rms_norm_silu_gate,
    softmax,
)
from graphfuse.torch.override import override

__all__ = [
    "AddRMSNorm",
    "CrossEntropyLoss",
    "LayerNorm",
    "RMSNorm",
    "RMSNormSiLU",
    "ada_layer_norm",
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "gemma_add_rms_norm",
    "gemma_rms_norm",
    "layer_norm",
    "log_softmax",
    "normalize",
    "override",
    "rms_norm",
    "rms_norm_silu",
    "rms_norm_silu_gate",
    "sharding",
    "softmax",
]


def __dir__() -> list[str]:
    return __all__
