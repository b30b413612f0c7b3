"""RMSNorm and cross entropy for training: operators that autograd knows, and modules that take the place of torch's.

Each operator is ``graphfuse::NAME``; it computes in float32 (float64 where a tensor is), runs one graph forward and
one backward, and keeps for backward what the backward graph reads: of a norm the normalized tensor, the weight, the
gate and the inverse RMS of each row. docs/training.md is for users.
"""

from graphfuse.torch.losses import CrossEntropyLoss, cross_entropy
from graphfuse.torch.modules import AddRMSNorm, RMSNorm, RMSNormSiLU
from graphfuse.torch.operators import (
    add_rms_norm,
    gemma_add_rms_norm,
    gemma_rms_norm,
    rms_norm,
    rms_norm_silu,
    rms_norm_silu_gate,
)

__all__ = [
    "AddRMSNorm",
    "CrossEntropyLoss",
    "RMSNorm",
    "RMSNormSiLU",
    "add_rms_norm",
    "cross_entropy",
    "gemma_add_rms_norm",
    "gemma_rms_norm",
    "rms_norm",
    "rms_norm_silu",
    "rms_norm_silu_gate",
]


def __dir__() -> list[str]:
    return __all__
