"""Group norm, alone or followed by SiLU, in two kernels that use the whole device even for few groups.

The first computes moments of pieces of each channel. The second multiplies x by a factor and adds a summand per
channel, then applies SiLU. Between them, torch operations combine the few moments of each group. No data is rearranged:
channels may be last in memory, or the spatial dimensions.
"""

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.operators.channel_kernels import scaled_channels, scaled_channels_silu
from graphfuse.torch.operators.channel_moments import in_pieces, moments

LEAST = 1 << 23
"""Smallest number of elements for which the kernels run. For half as many, torch's own is faster on an H100: the host's
time for the operations between the kernels exceeds the whole of it."""
BECAME = "group_norm"
_observed = torch_private.needs_dispatcher()


def group_norm(x: torch.Tensor, norm: torch.nn.GroupNorm, silu: bool = False) -> torch.Tensor | None:
    """The group norm of x by a module, or SiLU of that, each rounded to x's type, in x's memory format. None if the
    class's own forward is to run: with gradients, under autocast or a compiler, for small tensors, and for parameters
    of another type or other layouts of x."""
    if is_dynamo_compiling() or _observed() or not _is_supported(x, norm):
        return None
    if (found := in_pieces(x)) is None:
        return None
    pieces, last = found
    weight, bias, (n, c, *extents) = norm.weight, norm.bias, x.shape
    by_group = norm.num_groups, c // norm.num_groups
    means, variances = (t.unflatten(1, by_group) for t in moments(pieces, last, norm.eps))
    spread, mean = torch.var_mean(means, (2, 3), correction=0)
    inverse = variances.mean((2, 3)).add_(spread).rsqrt_()
    scale = inverse[:, :, None] * weight.view(by_group)
    shift = torch.addcmul(bias.view(by_group), mean[:, :, None], scale, value=-1)
    full, of_channel = (pieces.permute(0, 2, 3, 1).flatten(1, 2), (n, 1, c)) if last else (pieces, (n, c, 1, 1))
    made = (scaled_channels_silu if silu else scaled_channels)(full, scale.view(of_channel), shift.view(of_channel))
    return made.view(n, *extents, c).movedim(-1, 1) if last else made.view(x.shape)


def _is_supported(x: object, norm: torch.nn.GroupNorm) -> bool:
    if not isinstance(x, torch.Tensor) or x.numel() < LEAST or x.dim() < 3 or x.shape[1] != norm.num_channels:
        return False
    if x.dtype not in FLOATS or x.device.type not in set_forward.RUN_ON or torch.is_autocast_enabled(x.device.type):
        return False
    has_gradients = torch.is_grad_enabled()
    for t in (x, norm.weight, norm.bias):
        if t is None or t.dtype is not x.dtype or t.device != x.device or t.requires_grad and has_gradients:
            return False
        if not torch_private.is_plain(t):
            return False
    return True


def forward(self: torch.nn.GroupNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's spelling
    """Forward that replaces the class's own."""
    made = group_norm(input, self)
    return type(self).forward(self, input) if made is None else made


def followed(norm: torch.nn.Module, activation: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The activation of the norm of x."""
    if type(norm) is torch.nn.GroupNorm and type(activation) is torch.nn.SiLU and not is_dynamo_compiling():
        if set_forward.is_plain(norm) and set_forward.is_plain(activation):
            made = group_norm(x, norm, silu=True)
            if made is not None:
                return made
    return activation(norm(x))


def in_sequence(self: torch.nn.Sequential, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Forward that replaces that of ``torch.nn.Sequential``."""
    norm = None
    for module in self:
        if norm is None:
            if type(module) is torch.nn.GroupNorm:
                norm = module
            else:
                input = module(input)  # noqa: A001
        else:
            input, norm = followed(norm, module, input), None  # noqa: A001
    return input if norm is None else norm(input)


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of a group norm, and returns its entry; None for any other module."""
    if not isinstance(module, torch.nn.GroupNorm):
        return None
    kind = type(module).__name__
    if why := why_not_replaced(module):
        return Entry(name, kind, why=why)
    set_forward.set_on(module, forward)
    return Entry(name, kind, BECAME, f"from {LEAST} elements")


def why_not_replaced(norm: torch.nn.GroupNorm) -> str:
    if type(norm) is not torch.nn.GroupNorm:
        return "its class is not torch's"
    if norm.weight is None or norm.bias is None:
        return "it has no weight or no bias"
    if not set_forward.runs_its_class(norm):
        return set_forward.ALREADY_SET
    return ""
