"""Compares torch tensors with those of an earlier call, in everything but their memory."""

import sys
from collections.abc import Sequence

from graphfuse.runtime import torch_private


def comparable(value: object) -> bool:
    """True if a guard can compare a value: it is a plain torch tensor or parameter, not nested and of no subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested


def guard(tensors: Sequence[object]) -> torch_private.Check:
    """Tells whether tensors are like these in all but their memory."""
    return torch_private.guard(tensors, [t.shape for t in tensors], [t.stride() for t in tensors])
