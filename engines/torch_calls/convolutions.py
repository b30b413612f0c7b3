"""Convolutions and their gradients by cuDNN in torch.

Torch's convolutions return the type that they read. For a result of another type, operands are copied to float32, which
tensor cores multiply as TF32. TF32 can represent all values of 16-bit types, so nothing is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from graphfuse.base import rounding
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import convolution_mode
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import TorchCall, TorchView, multiplied, unfit
from graphfuse.engines.torch_calls.settings import BENCHMARK, CONVOLUTIONS_OF_FLOAT, DETERMINISTIC
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph, packed_stride


@dataclass(frozen=True)
class Window:
    """A convolution's window, and how it is computed.

    stride, dilation: of each spatial axis.
    before, after: padding of each spatial axis.
    groups: number of groups of channels.
    flipped: whether the weight is flipped along its spatial axes.
    widened: whether operands are copied to float32 first, and multiplied as TF32.
    rounded: the type that the result is rounded to; None if it is computed in the output's type.
    direct: whether torch may write to the output in place.
    """

    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    flipped: bool
    widened: bool
    rounded: data_type | None
    direct: bool

    @property
    def padding(self) -> tuple[int, ...]:
        """Padding for torch's call: the same on both sides, or none if they differ; then the image is padded before."""
        return (0,) * len(self.before) if self.uneven else self.before

    @property
    def uneven(self) -> bool:
        """True if the sides of an axis are padded by different amounts."""
        return self.before != self.after


def convolution(facts: Subgraph) -> TorchCall | No:
    """Torch's call for a convolution or one of its gradients, without other nodes; No with the first reason if there is
    none. Torch has calls with a ReLU, but these lose NaN."""
    node, tensors = facts.nodes[0], facts.graph.tensors
    if facts.nodes[1:]:
        return No(f"{facts.nodes[1]} is behind {node}, which torch computes alone")
    read, written = [tensors[t] for _, t in node.inputs], tensors[node.outputs[0][1]]
    if why := multiplied(*read) or unfit(written):
        return No(why)
    empty = next((t for t in (*read, written) if not t.elements), None)
    if empty is not None:
        return No(f"{empty} has no elements")
    window = _window(node, read, written)
    bind = {"conv_fprop": _fprop, "conv_dgrad": _dgrad, "conv_wgrad": _wgrad}[node.op_name]
    # For the other two, torch has calls with arguments for these.
    precision = (CONVOLUTIONS_OF_FLOAT, "tf32" if window.widened else "ieee")
    settings = (precision, (BENCHMARK, False), (DETERMINISTIC, True)) if bind is _wgrad else ()
    return TorchCall((*map(TorchView.of, read), TorchView.of(written)), partial(bind, window), settings=settings)


def _window(node: Node, read: Sequence[FrozenTensor], written: FrozenTensor) -> Window:
    a, kind = dict(node.attributes), read[0].dtype
    image, weight = {
        "conv_fprop": (read[0], read[1]),
        "conv_dgrad": (written, read[1]),
        "conv_wgrad": (read[0], written),
    }[node.op_name]
    widened = written.dtype is not kind and kind is not data_type.FLOAT
    made = data_type.FLOAT if widened else kind
    return Window(
        a["stride"],
        a["pre_padding"],
        a["post_padding"],
        a["dilation"],
        image.dim[1] // weight.dim[1],
        a["convolution_mode"] is convolution_mode.CONVOLUTION,
        widened,
        None if made is written.dtype else written.dtype,
        made is written.dtype and _usual(written),
    )


def _usual(t: FrozenTensor) -> bool:
    """True if a tensor is row-major or channels-last, without gaps."""
    lying = (packed_stride(t.dim), packed_stride(t.dim, [0, *range(2, len(t.dim)), 1]))
    return any(
        all(extent == 1 or own == usual for extent, own, usual in zip(t.dim, t.stride, strides, strict=True))
        for strides in lying
    )


def _wide(window: Window, t):
    return t.float() if window.widened else t


def _padded(torch, window: Window, image):
    sides = zip(window.before, window.after, strict=True)
    return torch.nn.functional.pad(image, [n for pair in reversed([*sides]) for n in pair]) if window.uneven else image


def _flipped(window: Window, weight):
    return weight.flip(*range(2, weight.dim())) if window.flipped else weight


def _fprop(window: Window, torch, image, weight, out) -> Callable[[], object]:
    w, none = window, [0] * len(window.stride)
    if image.is_cuda:
        convolved = torch.cudnn_convolution
        arguments = (w.padding, w.stride, w.dilation, w.groups, False, True, w.widened)
    else:
        convolved = torch.ops.aten.convolution
        arguments = (None, w.stride, w.padding, w.dilation, False, none, w.groups)
    if w.direct and not (w.widened or w.uneven or w.flipped):
        return partial(convolved, image, weight, *arguments, out=out)

    def run() -> None:
        x, taps = _padded(torch, w, _wide(w, image)), _flipped(w, _wide(w, weight))
        if w.direct:
            convolved(x, taps, *arguments, out=out)
        else:
            _store(torch, w, out, convolved(x, taps, *arguments))

    return run


def _dgrad(window: Window, torch, loss, weight, out) -> Callable[[], object]:
    w = window
    # With uneven padding, the gradient of the padded image is computed, and its inner part is the result.
    wide = [sum(sides) if w.uneven else sides[1] for sides in zip(w.before, out.shape[2:], w.after, strict=True)]
    left = [
        extent - ((count - 1) * stride - 2 * padding + dilation * (taps - 1) + 1)
        for extent, count, stride, padding, dilation, taps in zip(
            wide, loss.shape[2:], w.stride, w.padding, w.dilation, weight.shape[2:], strict=True
        )
    ]
    inner = [slice(before, before + extent) for before, extent in zip(w.before, out.shape[2:], strict=True)]
    if loss.is_cuda:
        convolved = torch.cudnn_convolution_transpose
        arguments = (w.padding, left, w.stride, w.dilation, w.groups, False, True, w.widened)
    else:
        convolved, arguments = torch.convolution, (None, w.stride, w.padding, w.dilation, True, left, w.groups)

    def run() -> None:
        made = convolved(_wide(w, loss), _flipped(w, _wide(w, weight)), *arguments)
        _store(torch, w, out, made[(..., *inner)] if w.uneven else made)

    return run


def _wgrad(window: Window, torch, image, loss, out) -> Callable[[], object]:
    w, none = window, [0] * len(window.stride)
    arguments = (None, w.stride, w.padding, w.dilation, False, none, w.groups, (False, True, False))

    def run() -> None:
        x, y = _padded(torch, w, _wide(w, image)), _wide(w, loss)
        # Torch reads only shape and type of the weight.
        weight = out if out.dtype is x.dtype else torch.empty_like(out, dtype=x.dtype)
        made = torch.ops.aten.convolution_backward.default(y, x, weight, *arguments)[1]
        _store(torch, w, out, _flipped(w, made))

    return run


def _store(torch, window: Window, out, made) -> None:
    out.copy_(made if window.rounded is None else rounding.encode(torch, made, window.rounded))
