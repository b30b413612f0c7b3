"""The spatial norm of CogVideoX: group norm times a factor plus a summand, which convolutions make from latents.

The class upsamples the latents to the places of its input, and then runs its two convolutions of 1 x 1 x 1. Each place
of the latents stands for several places, whose factors and summands are equal. So the convolutions run before height
and width are upsampled, and one kernel reads their results for the norm.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import group_norm, roles, spatial
from graphfuse.torch.convolutional.layout_mode import is_inference, outside_mode
from graphfuse.torch.operators.channel_kernels import modulated_channels, modulated_channels_silu

BECAME = "spatial_norm"


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of a spatial norm, and returns its entry; None for any other module."""
    if not is_replaceable(module) or not set_forward.is_free(module):
        return None
    set_forward.set_on(module, forward)
    return Entry(name, type(module).__name__, BECAME, "where its group norm is, in channels-last")


def is_replaceable(module: torch.nn.Module) -> bool:
    """True for a spatial norm that runs its class's forward, or the one that replaces it."""
    return roles.role(module) == roles.SPATIAL_NORM and set_forward.runs_its_class(module)


def forward(
    self: torch.nn.Module,
    f: torch.Tensor,
    zq: torch.Tensor,
    conv_cache: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Forward that replaces the class's own."""
    made = _normed(self, f, zq, conv_cache) if is_inference() else None
    return type(self).forward(self, f, zq, conv_cache) if made is None else made


def followed(
    norm: torch.nn.Module, activation: Callable[[torch.Tensor], torch.Tensor], *given: object, **named: object
) -> tuple:
    """The norm's result, with the activation of its first value."""
    is_joinable = is_inference() and len(given) == 2 and named.keys() <= {"conv_cache"}
    if is_joinable and set_forward.is_plain(norm) and group_norm.is_silu(activation):
        if (made := _normed(norm, *given, **named, silu=True)) is not None:
            return made
    f, *kept = norm(*given, **named)
    return activation(f), *kept


@outside_mode
def _normed(
    norm: torch.nn.Module, f: torch.Tensor, zq: torch.Tensor, conv_cache: object = None, silu: bool = False
) -> tuple[torch.Tensor, dict] | None:
    """The result of the class's forward, or that with SiLU of its first value, for channels-last f; None if the class's
    is to run."""
    if conv_cache is not None and not isinstance(conv_cache, dict):
        return None
    if not spatial.is_channels_last(f) or f.numel() < group_norm.LEAST_CHANNELS_LAST:
        return None
    if type(zq) is not torch.Tensor or zq.dim() != 5:
        return None
    if zq.dtype is not f.dtype or zq.shape[0] != f.shape[0]:
        return None
    if not set_forward.is_plain(norm.norm_layer) or not group_norm.is_replaceable(norm.norm_layer):
        return None
    convolutions = norm.conv_y, norm.conv_b
    if not all(_convolves_places(of, zq.shape[1], f.shape[1]) for of in convolutions):
        return None
    frames, *extents = f.shape[2:]
    is_split = frames > 1 and frames % 2 == 1
    parts = ((zq[:, :, :1], 1), (zq[:, :, 1:], frames - 1)) if is_split else ((zq, frames),)
    scales = [spatial.scales(z, (count, *extents), None) for z, count in parts]
    if None in scales:
        return None
    if any(by[0] != 1 for by in scales):
        zq = spatial.joined([spatial.nearest(z, (by[0], 1, 1)) for (z, _), by in zip(parts, scales, strict=True)], 2)
    height, width = scales[-1][1:]
    kernel = modulated_channels_silu if silu else modulated_channels
    made = group_norm.applied(f, norm.norm_layer, kernel, _modulated, lambda: [of.conv(zq) for of in convolutions])
    if made is None:
        return None
    kept = spatial.nearest(zq, (1, height, width))
    return made, {"conv_y": kept, "conv_b": kept.clone()}


def _convolves_places(causal: torch.nn.Module, given: int, made: int) -> bool:
    """True if a causal convolution makes so many channels of so many, of each place alone, and runs nothing else. It
    then passes its whole input on as kept frames."""
    if roles.role(causal) != roles.CACHED or not set_forward.is_plain(causal):
        return False
    conv = causal.conv
    if roles.role(conv) != roles.SPLIT or not set_forward.is_plain(conv):
        return False
    if (conv.in_channels, conv.out_channels) != (given, made) or conv.padding != (0, 0, 0):
        return False
    is_of_one = causal.time_kernel_size == 1 and conv.kernel_size == conv.stride == (1, 1, 1)
    return is_of_one and causal.pad_mode == "constant"


def _modulated(
    views: group_norm.Views,
    f: torch.Tensor,
    factors: Sequence[torch.Tensor],
    of_latents: Sequence[torch.Tensor],
    made: torch.Tensor,
) -> list[tuple]:
    """Arguments of a kernel for each sample of f, with factor and summand of each channel, and those of each place of
    latents, [n, channels, frames, height, width]."""
    _, channels, frames, *extents = f.shape
    latents = of_latents[0].shape[3:]
    split = [part for extent, n in zip(extents, latents, strict=True) for part in (n, extent // n)]
    of_place = [part for n in latents for part in (n, 1)]

    def parts(t: torch.Tensor, places: Sequence[int]) -> Iterator[torch.Tensor]:
        for sample in t.movedim(1, -1):
            yield sample.reshape(1, frames, *places, channels)

    of_each = *(parts(t, of_place) for t in of_latents), parts(made, split)
    numbers = zip(*(t.split(1) for t in factors), strict=True)
    return [(x, *of, *more) for x, of, *more in zip(parts(f, split), numbers, *of_each, strict=True)]
