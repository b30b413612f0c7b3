"""Functions for which torch has separate kernels, written in operations that programs have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Optional = torch.Tensor | None


def _normalized(x: torch.Tensor, first: int, weight: Optional, bias: Optional, eps: float) -> torch.Tensor:
    """x less its mean over dimensions from `first` on, divided by its deviation, times weight and plus bias of each
    channel."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, [*range(first, x.dim())], correction=0, keepdim=True)
    made = ((wide - mean) * torch.rsqrt(variance + eps)).movedim(1, -1)
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias).movedim(-1, 1).to(x.dtype)


def _instance_norm(
    input: torch.Tensor,
    running_mean: Optional = None,
    running_var: Optional = None,
    weight: Optional = None,
    bias: Optional = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if running_mean is None and running_var is None and use_input_stats and input.dim() > 2:
        return _normalized(input, 2, weight, bias, eps)
    return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _group_norm(
    input: torch.Tensor, num_groups: int, weight: Optional = None, bias: Optional = None, eps: float = 1e-5
) -> torch.Tensor:
    """Group norm. With one group, or one for each channel, it is written in operations."""
    if input.dim() > 2 and num_groups in (1, input.shape[1]):
        return _normalized(input, 1 + (num_groups != 1), weight, bias, eps)
    return F.group_norm(input, num_groups, weight, bias, eps)


DECOMPOSITIONS: dict[object, Callable[..., torch.Tensor]] = {F.instance_norm: _instance_norm, F.group_norm: _group_norm}
"""Functions that are recorded in place of others."""
