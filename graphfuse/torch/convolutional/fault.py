"""Checks that a module of a known class computes what its forward says, so that another forward may replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.compiler import is_dynamo_compiling

from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.set_forward import RUN_ON, is_plain
from graphfuse.torch.convolutional import roles

MODES = ("upsample2d", "upsample3d", "downsample2d", "downsample3d")

_is_tracing = torch_private.tracing()

Fault = str
"""The difference that was found; "" for none."""


def of_module(module: torch.nn.Module, role: str) -> Fault:
    """The first thing that the replacing forward would compute differently; "" for none."""
    check = _CHECKS.get(role)
    if check is None:
        return "its class is not known"
    if not is_plain(module):
        return "it has hooks, or a forward that was set on it"
    return next(filter(None, check(module)), "")


def is_fit(module: torch.nn.Module, role: str, x: object) -> bool:
    """True if the replacing forward computes the same for `x` as the module's own."""
    if is_dynamo_compiling() or _is_tracing() or not isinstance(x, torch.Tensor) or not torch_private.is_plain(x):
        return False
    if x.dim() != 5 or not x.numel() or x.dtype not in FLOATS or x.device.type not in RUN_ON:
        return False
    if torch.is_autocast_enabled(x.device.type) or of_module(module, role):
        return False
    has_gradients = torch.is_grad_enabled()
    given = (x, *(p for leaf in leaves(module, role) for p in leaf._parameters.values() if p is not None))
    return not any(t.dtype is not x.dtype or t.device != x.device or has_gradients and t.requires_grad for t in given)


def leaves(module: torch.nn.Module, role: str) -> Iterator[torch.nn.Module]:
    """The submodules whose parameters the replacing forward reads directly."""
    for name in _LEAVES.get(role, ()):
        leaf = getattr(module, name, None)
        if leaf is not None:
            yield leaf
    if role == roles.RESAMPLE:
        yield module.resample[1]


_LEAVES = {
    roles.RESIDUAL: ("norm1", "conv1", "norm2", "conv2", "conv_shortcut"),
    roles.ATTENTION: ("norm", "to_qkv", "proj"),
    roles.RESAMPLE: ("time_conv",),
} | dict.fromkeys(roles.ENDS, ("conv_in", "norm_out", "conv_out"))


def _convolution(conv: object, kernel: tuple[int, int, int], frames: int = 1, padding: object = None) -> Fault:
    """Fault of a causal convolution. frames: its stride. padding: its expected padding; by default it keeps the
    extents."""
    if not isinstance(conv, torch.nn.Conv3d) or roles.role(conv) != roles.CONVOLUTION or not is_plain(conv):
        return "a convolution is of another class, or has hooks"
    t, h, w = kernel
    around = (w // 2, w // 2, h // 2, h // 2, t - 1, 0) if padding is None else padding
    has = conv.kernel_size, conv.stride, conv.dilation, conv.groups, conv.padding, tuple(conv._padding)
    if has != (kernel, (frames, 1, 1), (1, 1, 1), 1, (0, 0, 0), around) or conv.padding_mode != "zeros":
        return f"a convolution of {conv.kernel_size} has another stride, padding or groups"
    return "" if conv.bias is not None else "a convolution has no bias"


def _image_convolution(conv: object, kernel: int, stride: int, padding: int) -> Fault:
    if type(conv) is not torch.nn.Conv2d or not is_plain(conv):
        return "a convolution of images is of another class, or has hooks"
    has = conv.kernel_size, conv.stride, conv.dilation, conv.groups, conv.padding, conv.padding_mode
    if has != ((kernel,) * 2, (stride,) * 2, (1, 1), 1, (padding,) * 2, "zeros") or conv.bias is None:
        return f"a convolution of {conv.kernel_size} images has another stride, padding or groups, or no bias"
    return ""


def _norm(norm: object) -> Fault:
    if not isinstance(norm, torch.nn.Module) or roles.role(norm) != roles.NORM or not is_plain(norm):
        return "a norm is of another class, or has hooks"
    has_bias = isinstance(norm.bias, torch.Tensor) or norm.bias != 0
    if not norm.channel_first or has_bias or norm.scale != norm.gamma.numel() ** 0.5:
        return "a norm has a bias, another scale, or other axes"
    return ""


def _is(module: object, cls: type, what: str) -> Fault:
    return "" if type(module) is cls and is_plain(module) else f"{what} is another"


def _residual(block: torch.nn.Module) -> Iterator[Fault]:
    yield _norm(block.norm1)
    yield _norm(block.norm2)
    yield _convolution(block.conv1, (3, 3, 3))
    yield _convolution(block.conv2, (3, 3, 3))
    yield _is(block.nonlinearity, torch.nn.SiLU, "its activation")
    yield _is(block.dropout, torch.nn.Dropout, "its dropout")
    if block.training and block.dropout.p > 0:
        yield "it drops values out"
    if type(block.conv_shortcut) is not torch.nn.Identity:
        yield _convolution(block.conv_shortcut, (1, 1, 1))
    elif not is_plain(block.conv_shortcut):
        yield "its shortcut has hooks"


def _attention(block: torch.nn.Module) -> Iterator[Fault]:
    yield _norm(block.norm)
    yield _image_convolution(block.to_qkv, 1, 1, 0)
    yield _image_convolution(block.proj, 1, 1, 0)


def _resample(block: torch.nn.Module) -> Iterator[Fault]:
    yield _is(block.resample, torch.nn.Sequential, "its sequence")
    if block.mode not in MODES or len(block.resample) != 2:
        yield f"its mode is {block.mode}"
    before, conv = block.resample
    if block.mode.startswith("up"):
        if roles.role(before) != roles.UPSAMPLE or not is_plain(before):
            yield "its upsampling is another"
        elif (before.scale_factor, before.size, before.mode) != ((2.0, 2.0), None, "nearest-exact"):
            yield "its upsampling is by another factor"
        yield _image_convolution(conv, 3, 1, 1)
        if block.mode == "upsample3d":
            yield _convolution(block.time_conv, (3, 1, 1))
    else:
        yield _is(before, torch.nn.ZeroPad2d, "its padding")
        if before.padding != (0, 1, 0, 1):
            yield "its padding is another"
        yield _image_convolution(conv, 3, 2, 0)
        if block.mode == "downsample3d":
            yield _convolution(block.time_conv, (3, 1, 1), 2, (0,) * 6)


def _ends(module: torch.nn.Module) -> Iterator[Fault]:
    yield _convolution(module.conv_in, (3, 3, 3))
    yield _convolution(module.conv_out, (3, 3, 3))
    yield _norm(module.norm_out)
    yield _is(module.nonlinearity, torch.nn.SiLU, "its activation")


_CHECKS: dict[str, Callable[[torch.nn.Module], Iterator[Fault]]] = {
    roles.RESIDUAL: _residual,
    roles.ATTENTION: _attention,
    roles.RESAMPLE: _resample,
    # Containers compute nothing themselves. The modules within them are checked separately.
    **dict.fromkeys(roles.CONTAINERS, lambda module: iter(())),
    **dict.fromkeys(roles.ENDS, _ends),
}
