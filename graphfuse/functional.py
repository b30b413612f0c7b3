"""Ready-made calls on torch tensors: a graph is built and planned once per problem, then only executed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphfuse.dtypes import data_type
from graphfuse.enums import heur_mode, norm_forward_phase
from graphfuse.errors import GraphValidationError, VariantPackError, VariantPackTypeError
from graphfuse.graph import pygraph
from graphfuse.ops import block_size
from graphfuse.verify import MAX_RANK

if TYPE_CHECKING:
    import torch

_PAIRS = data_type.FP4_E2M1
_BLOCK = block_size(_PAIRS)
_FLOATS = (data_type.BFLOAT16, data_type.HALF, data_type.FLOAT)
_TYPES = {
    "input": _FLOATS,
    "weight": _FLOATS,
    "out": (*_FLOATS, data_type.FP8_E4M3, data_type.FP8_E5M2, _PAIRS),
    "block_scale": (data_type.FP8_E4M3,),
}
"""The data types that each argument may have."""

_ALIGNMENT = 16
"""Bytes: no access is wider, so that no plan gains by more."""


def fused_rmsnorm_silu(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SiLU(RMSNorm(input, weight, eps)) over the last dimension.

    input: (..., hidden) of 1 to 8 dimensions, bfloat16, float16 or float32, any strides of
    the leading dimensions. weight: (hidden,), of any of these types. out: its dtype selects
    the format: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2 of shape
    (..., hidden) (default: input's dtype, newly allocated), or float4_e2m1fn_x2 of shape
    (..., hidden / 2) for NVFP4, whose hidden is a multiple of 16. block_scale: with NVFP4,
    float8_e4m3fn of shape (..., hidden / 16), allocated if None; ignored with other formats.

    Returns out, or (out, block_scale) for NVFP4. On CPU tensors the reference engine
    runs. Autograd does not see the call: the result has no gradient, whatever
    requires_grad says. Raises VariantPackError, and VariantPackTypeError for wrong types,
    naming the argument, before anything is written.
    """
    try:
        # What tells problems apart; whether a call is like the first one of its problem, the problem tells.
        format_ = None if out is None else out.dtype
        key = (input.shape, input.stride(), input.dtype, input.get_device(), weight.dtype, format_, block_scale is None)
        problem = _PROBLEMS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # of what is no tensor, or has no strides
        key = problem = None
    result = None if problem is None else problem.run(input, weight, eps, out, block_scale)
    return _first_call(key, input, weight, eps, out, block_scale) if result is None else result


def _first_call(key, input, weight, eps, out, block_scale):  # noqa: A002
    """A call that checks every argument, and remembers for others of its key what they need to know."""
    import torch

    layouts = {"input": _layout(torch, "input", input), "weight": _layout(torch, "weight", weight)}
    empty: dict[str, Callable[[], torch.Tensor]] = {}
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        empty["out"] = _empty_like(torch, out)
    tensors = {"input": input, "weight": weight, "out": out}
    layouts["out"] = _layout(torch, "out", out)
    quantized = layouts["out"].dtype is _PAIRS
    if quantized:
        if block_scale is None:
            block_scale = torch.empty(_scale_shape(input.shape), dtype=torch.float8_e4m3fn, device=input.device)
            empty["block_scale"] = _empty_like(torch, block_scale)
        tensors["block_scale"] = block_scale
        layouts["block_scale"] = _layout(torch, "block_scale", block_scale)
    elif block_scale is not None:
        _check_tensor(torch, "block_scale", block_scale)
    graph = _planned(tuple(layouts.items()))
    graph.execute({**tensors, "eps": eps})
    given = [tensor for name, tensor in tensors.items() if name not in empty]
    if key is not None and all(_repeats(t) for t in given) and (quantized or block_scale is None):
        if len(_PROBLEMS) >= _PROBLEMS_KEPT:
            _PROBLEMS.clear()
        _PROBLEMS[key] = _Problem(graph, given, empty, quantized)
    return (out, block_scale) if quantized else out


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether calls with tensors like this one go the short way: most begin at multiples of 16 bytes."""
    from graphfuse.runtime import form

    return form.guardable(tensor) and tensor.data_ptr() % _ALIGNMENT == 0


class _Problem:
    """What calls need to know of a problem once one of them has run. All tensors begin at multiples of 16 bytes.

    given: the tensors of the call. empty: what allocates those that were not given.
    """

    def __init__(
        self,
        graph: pygraph,
        given: Sequence[torch.Tensor],
        empty: Mapping[str, Callable[[], torch.Tensor]],
        quantized: bool,
    ):
        from graphfuse.runtime import executable, form, handle

        self._device = graph.handle.device
        self._stream = handle.current_stream
        self._guard = form.Guard(given)
        self._number = form.number
        self._recall = graph._planner.executable().recall
        self._known = executable.Known()
        self._out, self._block_scale = empty.get("out"), empty.get("block_scale")
        self._quantized = quantized

    def run(self, input, weight, eps, out, block_scale):  # noqa: A002
        """The result; None, with nothing done, if the arguments are not like those of the first call."""
        given = (input, weight) if out is None else (input, weight, out)
        if block_scale is not None:
            given = (*given, block_scale)
        stream = self._stream(self._device)
        found = [stream]
        if type(eps) is not float or not self._guard.locate(given, found):
            return None
        if out is None:
            out = self._out()
            found.append(out.data_ptr())
        if self._quantized and block_scale is None:
            block_scale = self._block_scale()
            found.append(block_scale.data_ptr())
        found.append(self._number(eps))
        key = tuple(found)
        calls = self._known.get(key)
        if calls is None:
            if any(address % _ALIGNMENT for address in found[1:-1]):
                return None
            pack = {"input": input, "weight": weight, "out": out}
            if self._quantized:
                pack["block_scale"] = block_scale
            calls = self._recall({**pack, "eps": eps}, None, stream, False)
            if calls is None:
                return None
            self._known.keep(key, calls)
        for call in calls:
            call()
        return (out, block_scale) if self._quantized else out


def _empty_like(torch, model: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What allocates tensors like `model`, faster on a GPU than `torch.empty`, whose dispatch costs half a launch."""
    shape, stride, dtype, device = tuple(model.shape), model.stride(), model.dtype, model.device
    general = functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
    if device.type != "cuda":
        return general
    current, ordinal = torch._C._cuda_getDevice, device.index
    # As the code does that torch.compile generates; it allocates on the current device.
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if fast is None:  # torch does not promise it
        return general
    return lambda: fast(shape, stride, dtype) if current() == ordinal else general()


_PROBLEMS: dict[tuple, _Problem] = {}
_PROBLEMS_KEPT = 4096


@dataclass(frozen=True)
class _Layout:
    """What a plan depends on in a tensor: not its address, but what that is a multiple of.

    shape, stride: torch's, which for FP4 count pairs.
    """

    dtype: data_type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    alignment: int


def _layout(torch, name: str, value: object) -> _Layout:
    """The layout of an argument, whose data type is checked; all else is checked once for each problem."""
    _check_tensor(torch, name, value)
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise VariantPackTypeError(f"{name} is a tensor of layout {kind}; accepted: torch.strided")
    dtype = _accepted(name, value.dtype)
    try:
        address = value.data_ptr()
    except RuntimeError as error:  # fake and other tensors without memory
        raise VariantPackTypeError(f"{name} has no memory: {str(error).splitlines()[0]}") from None
    alignment = min(_ALIGNMENT, address & -address) if address else _ALIGNMENT
    return _Layout(dtype, value.shape, value.stride(), value.device, alignment)


def _check_tensor(torch, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise VariantPackTypeError(f"{name} must be a torch tensor, got {type(value).__name__}")


@functools.cache
def _accepted(name: str, dtype: torch.dtype) -> data_type:
    for accepted in _TYPES[name]:
        if str(dtype) == f"torch.{accepted.facts.torch}":
            return accepted
    names = ", ".join(accepted.facts.torch for accepted in _TYPES[name])
    raise VariantPackTypeError(f"{name} is of {dtype}; accepted: {names}")


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], *(hidden // _BLOCK for hidden in shape[-1:]))


def _check(layouts: dict[str, _Layout]) -> None:
    """VariantPackError for shapes and devices that do not fit each other."""
    x, out = layouts["input"], layouts["out"]
    given = f"input has shape {tuple(x.shape)}"
    if x.device.type not in ("cpu", "cuda"):
        raise VariantPackError(f"input is on {x.device}; accepted: cpu, cuda")
    if not 1 <= len(x.shape) <= MAX_RANK or not x.shape[-1]:
        raise VariantPackError(f"{given}; accepted: 1 to {MAX_RANK} dimensions, the last not empty")
    *rows, hidden = x.shape
    if out.dtype is _PAIRS and hidden % _BLOCK:
        raise VariantPackError(f"{given}; accepted for FP4: a last dimension that is a multiple of {_BLOCK}")
    shapes = {
        "input": tuple(x.shape),
        "weight": (hidden,),
        "out": (*rows, hidden // 2 if out.dtype is _PAIRS else hidden),
        "block_scale": _scale_shape(x.shape),
    }
    for name, layout in layouts.items():
        if layout.shape != shapes[name]:
            raise VariantPackError(f"{name} has shape {tuple(layout.shape)}; accepted: {shapes[name]}, as {given}")
        if layout.device != x.device:
            raise VariantPackError(f"{name} is on {layout.device}, input is on {x.device}; one device is accepted")
    if out.dtype is _PAIRS and out.stride[-1] != 1:
        raise VariantPackError(f"out has stride {out.stride}; accepted for FP4: 1 along the last dimension")


@functools.lru_cache(maxsize=1024)
def _planned(layouts: tuple[tuple[str, _Layout], ...]) -> pygraph:
    """The built graph of one problem. The row count is part of the problem but never of a kernel."""
    from graphfuse.runtime.handle import create_handle

    tensors = dict(layouts)
    _check(tensors)
    graph = pygraph(
        "fused_rmsnorm_silu",
        intermediate_data_type=data_type.FLOAT,
        handle=create_handle(str(tensors["input"].device)),
    )
    x = tensors["input"]
    rank = len(x.shape)
    weight = tensors["weight"]
    scale = graph.tensor(
        (*(1,) * (rank - 1), *weight.shape),
        (*(weight.shape[0] * weight.stride[0],) * (rank - 1), *weight.stride),
        weight.dtype,
        name="weight",
        byte_alignment=weight.alignment,
    )
    epsilon = graph.tensor([1] * rank, data_type=data_type.FLOAT, is_pass_by_value=True, name="eps")
    x = graph.tensor(x.shape, x.stride, x.dtype, name="input", byte_alignment=x.alignment)
    y = graph.rmsnorm(x, scale, epsilon, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    z = graph.swish(y)
    if "block_scale" in tensors:
        z, scales = graph.block_scale_quantize(z, block_size=_BLOCK, axis=rank - 1)
        _store(scales, "block_scale", tensors["block_scale"])
    _store(z, "out", tensors["out"])
    try:
        graph.build([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    except GraphValidationError as error:  # strides: tensors of the graph have the names of the arguments
        raise VariantPackError(str(error)) from None
    return graph


def _store(tensor, name: str, layout: _Layout) -> None:
    from graphfuse.runtime import storage

    dim, stride = storage.unpacked(layout.dtype, layout.shape, layout.stride)
    tensor.set_output().set_name(name).set_dim(dim).set_stride(stride).set_data_type(layout.dtype)
    tensor.set_byte_alignment(layout.alignment)
