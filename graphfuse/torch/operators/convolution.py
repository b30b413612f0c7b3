"""Convolutions of bfloat16 and float16 for inference, by the fastest plan of cuDNN's engine, or else by torch.

cuDNN adds the bias in the same kernel, where torch adds it in another. It has several plans for a shape. They are timed
at the first call of a shape, and the fastest is kept with the user's tuned knobs, for other processes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from graphfuse.api import pygraph
from graphfuse.base import settings
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphfuseError
from graphfuse.contract.engine import No
from graphfuse.engines.cudnn import package
from graphfuse.functional.prepared import PreparedCall, are_aligned
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning.planner import Planner
from graphfuse.runtime import torch_private
from graphfuse.runtime.bounded_dict import make_room
from graphfuse.runtime.fastcall import DECLINED, At, LaunchedPlan, NewTensor, sequence
from graphfuse.runtime.handle import create_handle
from graphfuse.tuning.plan_choice import build_fastest

TYPES = {torch.bfloat16: data_type.BFLOAT16, torch.float16: data_type.HALF}
"""Types that the engine is asked for."""
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by the number of dimensions."""
_KEPT = 512  # plans of this process
_raw_stream = torch_private.raw_stream()

_LARGE = 4e11
"""Smallest number of operations for which torch measures cuDNN's plans, which takes 40 ms at the first call of a shape.
On an H200 this saved 0.85 ms of 2.74 in a call of 1.2e12 operations, and at most 0.06 ms in calls of 4e11 and fewer."""
_MEASURED = 3
"""Number of plans that torch measures, the fastest by cuDNN's estimate. By default it measures more, which takes
longer."""

Numbers = tuple[int, ...] | int


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    dilation: Numbers = 1,
) -> torch.Tensor:
    """conv2d or conv3d of images or frames, [n, channels, (frames,) height, width], in one group, without gradients.

    It runs on cuDNN's engine if that is there and x is channels-last in memory. The result is channels-last, too."""
    made = planned(x, weight, bias, stride, padding, dilation)
    return searched(x, weight, bias, stride, padding, dilation) if made is None else made


def planned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Numbers) -> torch.Tensor | None:
    """`convolution` by a plan of cuDNN's engine that has run tensors like these; None if there is none, if it declines
    the call, as with gradients, or if the user's settings decide on plans. options: stride, padding and dilation."""
    try:
        found = _plans.get(_key(x, weight, bias, *options))
    except (AttributeError, RuntimeError, TypeError):  # of no tensor, of a nested one, options in a list
        return None
    if found is None or _is_pinned():
        return None
    made = found(x, weight) if bias is None else found(x, weight, bias)
    return None if made is DECLINED else made


def searched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Numbers) -> torch.Tensor:
    """`convolution` of tensors that `planned` declined: by a plan that is searched, or by torch where the engine does
    not take them. options: stride, padding and dilation."""
    is_free = x.is_cuda and not _is_pinned()
    if is_free and (made := _first(x, weight, bias, *options)) is not None:
        return made
    convolved = functional.conv2d if x.dim() == 4 else functional.conv3d
    is_large = is_free and 2.0 * x.numel() / x.shape[1] * weight.numel() >= _LARGE
    if is_large and not torch.cuda.is_current_stream_capturing():
        with measured_plans():
            return convolved(x, weight, bias, *options)
    return convolved(x, weight, bias, *options)


@contextmanager
def measured_plans() -> Iterator[None]:
    """Context in which torch measures cuDNN's plans for convolutions at the first call of each shape in a process."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, _MEASURED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def why_not_engine() -> str:
    """Why convolutions run on torch's kernels; empty if cuDNN's engine can run them."""
    return "GRAPHFUSE_CUDNN is off" if settings.cudnn() is False else _what_is_missing()


@functools.cache
def _what_is_missing() -> str:
    found = package.load()
    return str(found) if isinstance(found, No) else ""


_plans: dict[tuple[object, ...], PreparedCall | None] = {}
"""By layouts; None where torch's kernels run."""
_planning = threading.Lock()
"""Held by the thread that times plans: two at once would slow each other down."""


def _key(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Numbers) -> tuple[object, ...]:
    of_bias = None if bias is None else bias.stride()
    return x.shape, x.stride(), weight.shape, weight.stride(), of_bias, x.dtype, x.device, *options


def _first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Numbers) -> torch.Tensor | None:
    """The first call for tensors of this form. None if torch's kernels are to run: for other types and layouts, without
    the engine, and for the first call of a layout while a CUDA graph is captured, as nothing can be timed then."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not are_aligned(tensors) or not _is_supported(x, weight, bias) or torch.is_autocast_enabled(x.device.type):
        return None
    try:
        found = _plans[key := _key(x, weight, bias, *options)]
    except TypeError:  # options in a list
        return None
    except KeyError:
        with torch.cuda.device(x.device):  # whose streams the plans are timed on
            if torch.cuda.is_current_stream_capturing():
                return None
            try:
                with _planning:
                    found = _plans.get(key) or _fastest(x, weight, bias, *options)
            except torch.OutOfMemoryError:  # plans may need more memory than torch's kernel; the next call tries again
                return None
        make_room(_plans, _KEPT)
        _plans[key] = found
    if found is None:
        return None
    found.accept(*tensors)
    made = found(*tensors)
    return None if made is DECLINED else made


def _is_pinned() -> bool:
    """True if the user's settings of torch do not leave the choice of plans free."""
    cudnn = torch.backends.cudnn
    return not cudnn.enabled or cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def _is_supported(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if x.dtype not in TYPES or x.numel() == 0 or not x.is_contiguous(memory_format=FORMATS[x.dim()]):
        return False
    others = [weight] if bias is None else [weight, bias]
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    return not why_not_engine() and all(t.dtype is x.dtype and t.device == x.device for t in others)


def _fastest(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
) -> PreparedCall | None:
    """The fastest plan for these tensors; None if cuDNN has none, or torch raises an error for them."""
    spatial = x.dim() - 2
    steps, pads, dilations = ([n] * spatial if isinstance(n, int) else [*n] for n in (stride, padding, dilation))
    if x.shape[1] != weight.shape[1]:
        return None
    graph = pygraph(
        "convolution",
        io_data_type=TYPES[x.dtype],
        intermediate_data_type=data_type.FLOAT,
        compute_data_type=data_type.FLOAT,
        handle=create_handle(str(x.device)),
    )
    pack = {"x": x, "weight": weight}
    image, filters = (graph.tensor_like(t).set_name(name) for name, t in pack.items())
    try:
        y = graph.conv_fprop(image, filters, padding=pads, stride=steps, dilation=dilations)
        if bias is not None:
            pack["bias"] = bias.view(1, -1, *[1] * spatial)
            y = graph.add(y, graph.tensor_like(pack["bias"]).set_name("bias"))
        y.set_output().set_name("result")
        graph.validate()
    except GraphfuseError:  # torch raises its own
        return None
    made = torch.empty(y.get_dim(), dtype=x.dtype, device=x.device, memory_format=FORMATS[x.dim()])
    y.set_stride([*made.stride()])
    planner = Planner(freeze(graph), graph.handle, (), ())
    planner.create([heur_mode.A])
    if not build_fastest(planner, "cudnn", pack | {"result": made}):
        return None
    executable, made_as = planner.executable(), NewTensor(tuple(made.shape), made.stride(), made.dtype)
    places = tuple(At(tensor.name) for tensor in executable.bound)
    plan = LaunchedPlan(executable.starts[False], 0, places, planner.at(planner.selected()).workspace_bytes)
    given = [name for name in pack if name != "result"]
    stream, empty = functools.partial(_raw_stream, x.device.index), torch_private.empty_cuda(x.device)
    run = sequence(given, {"result": made_as}, [plan], stream, empty)
    return PreparedCall(run, [x, weight] if bias is None else [x, weight, bias])
