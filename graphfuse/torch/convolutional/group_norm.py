"""Group norm, alone or followed by SiLU, in three kernels that use the whole device even for few groups.

The first computes moments of pieces of each channel. The second combines the moments of each group to a factor and a
summand per channel. The third multiplies x by the factor and adds the summand, then applies SiLU. Each row of the
second is a channel, which reads the moments of its whole group. If that were too much to read, another kernel combines
the moments of each channel before. No data is rearranged: channels may be last in memory, or the spatial dimensions.

The host needs longer for a call than the device, except for large tensors. So the kernels of a layout are prepared, and
then launched by addresses alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from graphfuse.contract.row_counts import joined
from graphfuse.functional.prepared import Call, PreparedCall, are_aligned, prepare
from graphfuse.functional.tensor_parameter import FLOATS
from graphfuse.ops.layouts import packed_stride
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room
from graphfuse.runtime.fastcall import DECLINED
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.analysis.report import Entry
from graphfuse.torch.convolutional import roles
from graphfuse.torch.convolutional.layout_mode import outside_mode
from graphfuse.torch.convolutional.spatial import View
from graphfuse.torch.operators.channel_kernels import (
    LONGEST,
    channel_factors,
    joined_moments,
    row_moments,
    scaled_channels,
    scaled_channels_silu,
)
from graphfuse.torch.operators.channel_moments import piece
from graphfuse.tuned_tables import store

LEAST = 1 << 23
"""Smallest number of elements for which the kernels run. For smaller ones, torch's own was faster on an H100."""
LEAST_CHANNELS_LAST = 1 << 19
"""The same for channels-last tensors, which torch's own rearranges before, and the next convolution after it."""
BECAME = "group_norm"
SILU = functional.silu
"""The function. A user may exchange it in torch's module."""
_FEWEST = 1 << 10
"""Length of a row of moments that is read, at least. Other lengths are powers of two, so that few kernels of rows serve
all resolutions."""
_MOST_READ = 1 << 22
"""Most moments that are read by the rows of all channels together, of 8 bytes each. Reading more takes longer than
another kernel."""
_ALIGNED = 4
"""Multiple of elements at which variances begin, for the widest accesses."""
_KEPT = 512  # prepared norms
_observed = torch_private.needs_dispatcher()
_prepared: dict[tuple[object, ...], PreparedCall | None] = {}
"""By layout, kernel and what the norm has; None for those that ran once, as many layouts come once."""


@dataclass(frozen=True, slots=True)
class Views:
    """Views of a tensor (samples, channels, ...) and of the memory of its moments.

    pieces: of x, for its moments.
    whole: of x, for its norm; None if that is `pieces`.
    made: in x's shape, of the norm, which is contiguous in the shape of `whole`.
    memory: elements of the memory of moments, which has all means, then all variances, then what is read behind the
    last row, then numbers of each channel: factor and summand, and mean and variance if they are combined before.
    second: element at which the variances begin.
    factors, joined: elements at which the two numbers of each channel begin.
    moments: of the means as they are written, and of the variances.
    rows: of both as they are read.
    length: moments of a row; the numbers behind them are not used.
    channels: of the moments of whole channels, as they are read, if those of pieces are combined to them first.
    of_group: channels of a group.
    """

    pieces: View
    whole: View | None
    made: View
    memory: int
    second: int
    factors: tuple[int, int]
    joined: tuple[int, int]
    moments: View
    rows: View
    length: float
    channels: View | None
    of_group: float

    @property
    def written(self) -> View:
        """View of the norm as it is written."""
        shape, _ = self.whole or self.pieces
        return shape, packed_stride(shape)

    def of_channels(self, memory: torch.Tensor, places: Sequence[int], *more: int) -> list[torch.Tensor]:
        """Numbers of each channel of each sample, [samples, channels, *more], which begin at these elements."""
        n, c = self.made[0][:2]
        return [memory.as_strided((n, c, *more), (c, 1, *more), place) for place in places]


@functools.lru_cache(maxsize=1024)
def _views(shape: Sequence[int], strides: Sequence[int], groups: int) -> Views | None:
    """The views of a tensor; None if its places are not equally far apart in memory, or do not form pieces, and for
    groups that torch refuses."""
    (n, c, *extents), (of_sample, of_channel, *_) = shape, strides
    if not groups or c % groups:
        return None
    step = joined(extents, strides[2:], len(extents))
    size = piece(extents, any_length=step != 1)
    if not n or not size or step is None or step != 1 and of_channel != 1:
        return None
    places, of_group = math.prod(extents), c // groups
    count = places // size
    half = n * c * count
    if half * of_group <= _MOST_READ:
        channels, length = None, of_group * count
        rows = (n, groups, of_group, _read(length)), (c * count, length, 0, 1)
    else:
        channels, length = ((n, groups, of_group, of_group), (c, of_group, 0, 1)), count
        rows = (n, c, _read(length)), (c * count, count, 1)
    if length > LONGEST:
        return None
    if step == 1:
        pieces, whole = ((n, c, count, size), (of_sample, of_channel, size, 1)), None
        made = tuple(shape), packed_stride(shape)
        moments = (n, c, count, 1), (c * count, count, 1, 1)
    else:
        pieces = (n, count, c, size), (of_sample, size * step, 1, step)
        whole = (n, places, c), (of_sample, step, 1)
        made = tuple(shape), (c * places, 1, *(c * stride for stride in packed_stride(extents)))
        moments = (n, count, c, 1), (c * count, 1, count, 1)
    second = -(-half // _ALIGNED) * _ALIGNED
    end, each = (-(-n // _ALIGNED) * _ALIGNED for n in (second + half + _read(length), n * c))
    factors, of_joined = (end, end + each), (end + 2 * each, end + 3 * each)
    memory = end + (2 if channels is None else 4) * each
    return Views(
        pieces,
        whole,
        made,
        memory,
        second,
        factors,
        of_joined,
        moments,
        rows,
        float(length),
        channels,
        float(of_group),
    )


def _read(length: int) -> int:
    """Length of a row that is read for the first `length` numbers."""
    return max(_FEWEST, 1 << (length - 1).bit_length())


def group_norm(x: torch.Tensor, norm: torch.nn.GroupNorm, silu: bool = False) -> torch.Tensor | None:
    """The group norm of x by a module, or SiLU of that, each rounded to x's type, in x's memory format. None if the
    class's own forward is to run: with gradients, under autocast or a compiler, for small tensors, and for parameters
    of another type or other layouts of x."""
    return applied(x, norm, scaled_channels_silu if silu else scaled_channels, _scaled)


Arguments = Callable[
    [Views, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor], list[tuple[torch.Tensor, ...]]
]
"""Function of the views of x, x, factor and summand of each channel of each sample, other tensors, and the result. It
returns the arguments of each call of a kernel."""


def applied(
    x: torch.Tensor,
    norm: torch.nn.GroupNorm,
    kernel: Callable[..., torch.Tensor],
    arguments: Arguments,
    others: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> torch.Tensor | None:
    """The result, in x's memory format, of a kernel that applies a norm; None where `group_norm` is. others: makes
    tensors that it reads besides."""
    if is_dynamo_compiling() or _observed() or not isinstance(x, torch.Tensor):
        return None
    weight, bias, groups = norm.weight, norm.bias, norm.num_groups  # read once, as modules look parameters up in Python
    try:
        if torch.is_autocast_enabled(x.device.type):
            return None
        eps = float(norm.eps)
        key = x.shape, x.stride(), x.dtype, x.device, groups, eps, kernel, store.generation
        prepared = _prepared.get(key)
    except (RuntimeError, TypeError):  # of a nested or sparse tensor, and of values that torch refuses
        return None
    of_call = [x, weight, bias]
    if prepared is not None:
        of_call += others()
        if (made := prepared(*of_call)) is not DECLINED:
            return made
    if not _is_supported(x, norm.num_channels, weight, bias):
        return None
    if (views := _views(x.shape, x.stride(), groups)) is None:
        return None
    if prepared is None:
        of_call += others()
    made = torch.empty_strided(*views.made, dtype=x.dtype, device=x.device)
    memory = torch.empty(views.memory, dtype=torch.float32, device=x.device)
    calls = _factors(views, x, weight, bias, eps, memory)
    factors = views.of_channels(memory, views.factors)
    calls += [(kernel, given) for given in arguments(views, x, factors, of_call[3:], made)]
    for function, given in calls:
        function(*given)
    if prepared is not None:
        prepared.accept(*of_call)
    elif key in _prepared and are_aligned(of_call):
        given = {f"given{n}": t for n, t in enumerate(of_call)}
        prepared = _prepared[key] = prepare(given, {"made": made, "memory": memory}, calls)
        prepared.accept(*of_call)
    elif key not in _prepared:
        make_room(_prepared, _KEPT)
        _prepared[key] = None
    return made


def _factors(
    views: Views, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, memory: torch.Tensor
) -> list[Call]:
    """The calls that make the factor and the summand of each channel."""
    length = views.length
    written, read = ([memory.as_strided(*v, at) for at in (0, views.second)] for v in (views.moments, views.rows))
    calls: list[Call] = [(row_moments, (x.as_strided(*views.pieces), eps, *written))]
    if views.channels is not None:
        calls.append((joined_moments, (*read, length, *views.of_channels(memory, views.joined, 1))))
        read, length = [memory.as_strided(*views.channels, at) for at in views.joined], views.of_group
    return [*calls, (channel_factors, (*read, weight, bias, length, *views.of_channels(memory, views.factors)))]


def _scaled(
    views: Views,
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    made: torch.Tensor,
) -> list[tuple]:
    return [(x.as_strided(*(views.whole or views.pieces)), *factors, made.as_strided(*views.written))]


def _is_supported(x: object, channels: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.shape[1] != channels:
        return False
    if x.numel() < (LEAST_CHANNELS_LAST if x.stride(1) == 1 else LEAST):
        return False
    dtype, device = x.dtype, x.device
    if dtype not in FLOATS or device.type not in set_forward.RUN_ON or torch.is_autocast_enabled(device.type):
        return False
    has_gradients = torch.is_grad_enabled()
    for t in (x, weight, bias):
        if t is None or t.dtype is not dtype or t.device != device or t.requires_grad and has_gradients:
            return False
        if t is not x and t.numel() != channels:
            return False
        if not torch_private.is_plain(t):
            return False
    return True


@outside_mode
def _of_module(x: torch.Tensor, norm: torch.nn.Module, silu: bool = False) -> torch.Tensor | None:
    """`group_norm` by a module that is a group norm or norms each frame with one; None also for any other module."""
    if is_dynamo_compiling() or (of := module_of(norm)) is None:
        return None
    if of is norm:
        return group_norm(x, norm, silu)
    if not isinstance(x, torch.Tensor) or x.dim() != 5 or not x.shape[0] or why_not_replaced(norm, of):
        return None
    made = group_norm(x.transpose(1, 2).flatten(0, 1), of, silu)
    return None if made is None else made.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


def forward(self: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's spelling
    """Forward that replaces that of a group norm."""
    made = _of_module(input, self)
    return type(self).forward(self, input) if made is None else made


def forward_of_frames(self: torch.nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    """Forward that replaces that of a module which norms each frame."""
    return forward(self, x)


def followed(
    norm: torch.nn.Module, activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """The activation of the norm of x."""
    if not is_dynamo_compiling() and set_forward.is_plain(norm) and is_silu(activation):
        made = _of_module(x, norm, silu=True)
        if made is not None:
            return made
    return activation(norm(x))


def is_silu(activation: object) -> bool:
    """True for SiLU, as a function or as a module without hooks."""
    return activation is SILU or type(activation) is torch.nn.SiLU and set_forward.is_plain(activation)


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


def module_of(norm: torch.nn.Module) -> torch.nn.GroupNorm | None:
    """The group norm that a module is, or norms each frame with; None for any other module."""
    of: object = norm
    match roles.role(norm):
        case roles.FRAME_NORM:
            of = norm.norm_layer
        case roles.ONE_GROUP_NORM:  # of others, all frames are normalized together
            of = norm.norm if norm.num_groups == 1 else None
    return of if isinstance(of, torch.nn.GroupNorm) else None


def replace(name: str, module: torch.nn.Module) -> Entry | None:
    """Sets the forward of a group norm, or of a module that norms each frame with one, and returns its entry; None for
    any other module."""
    if (of := module_of(module)) is None:
        return None
    kind = type(module).__name__
    if why := why_not_replaced(module, of):
        return Entry(name, kind, why=why)
    set_forward.set_on(module, forward if of is module else forward_of_frames)
    least = f"from {LEAST} elements, or {LEAST_CHANNELS_LAST} in channels-last"
    return Entry(name, kind, BECAME, least if of is module else f"all frames at once, {least}")


def is_replaceable(module: torch.nn.Module) -> bool:
    """True for a group norm, and for a module that norms each frame with one, if it is replaced."""
    of = module_of(module)
    return of is not None and not why_not_replaced(module, of)


def why_not_replaced(norm: torch.nn.Module, of: torch.nn.GroupNorm) -> str:
    """Why a module is not replaced; "" if it is. of: the group norm that it is, or norms each frame with."""
    if type(of).forward is not torch.nn.GroupNorm.forward:
        return "its forward is not torch's"
    if of.weight is None or of.bias is None:
        return "it has no weight or no bias"
    is_free = set_forward.runs_its_class(norm) and (of is norm or set_forward.is_plain(of))
    return "" if is_free else set_forward.ALREADY_SET
