"""Convolutions and their gradients by cuDNN inside torch.

Torch's convolutions make what they read: a result of another type than the image's is made of float32 copies, which
tensor cores multiply as TF32. Values of 16 bits are TF32's, so nothing is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from graphfuse.base import rounding
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import convolution_mode
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import Seen, TorchCall, multiplied, unfit
from graphfuse.engines.torch_calls.settings import BENCHMARK, DETERMINISTIC
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph, packed_stride


@dataclass(frozen=True)
class Window:
    """A convolution's window, and how it is computed.

    before, after: padding of each spatial axis.
    turned: whether the weight is turned around.
    widened: whether what is read is copied to float32 first, and multiplied as TF32.
    rounded: the type that the result is rounded to; None where it is made in its own.
    direct: whether torch may write the output where it lies.
    """

    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    turned: bool
    widened: bool
    rounded: data_type | None
    direct: bool

    @property
    def padding(self) -> tuple[int, ...]:
        """Padding that torch is told: the same on both sides, else none, and the image is padded before."""
        return self.before if self.before == self.after else (0,) * len(self.before)

    @property
    def apart(self) -> bool:
        """True if the sides of an axis are padded by different amounts."""
        return self.before != self.after


def convolution(facts: Subgraph) -> TorchCall | No:
    """The convolution alone, or one of its gradients."""
    node, tensors = facts.nodes[0], facts.graph.tensors
    if facts.nodes[1:]:
        return No(f"{facts.nodes[1]} is behind {node}, which torch computes alone")
    read, (written,) = [tensors[t] for _, t in node.inputs], [tensors[t] for _, t in node.outputs]
    if why := multiplied(*read) or unfit(written):
        return No(why)
    empty = next((t for t in (*read, written) if not t.elements), None)
    if empty is not None:
        return No(f"{empty} has no elements")
    run = {"conv_fprop": _fprop, "conv_dgrad": _dgrad, "conv_wgrad": _wgrad}[node.op_name]
    window = _window(node, read, written)
    precision = () if node.op_name != "conv_wgrad" else (("conv", "tf32" if window.widened else "ieee"),)
    settings = (*precision, (BENCHMARK, False), (DETERMINISTIC, True)) if precision else ()
    return TorchCall((*map(Seen.of, read), Seen.of(written)), partial(run, window), settings=settings)


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


def _read(window: Window, *tensors):
    return [t.float() for t in tensors] if window.widened else tensors


def _padded(torch, window: Window, image):
    sides = zip(window.before, window.after, strict=True)
    return torch.nn.functional.pad(image, [n for pair in reversed([*sides]) for n in pair]) if window.apart else image


def _turned(window: Window, weight):
    return weight.flip(*range(2, weight.dim())) if window.turned else weight


def _fprop(window: Window, torch, image, weight, out) -> None:
    image, weight = _read(window, image, weight)
    image, weight = _padded(torch, window, image), _turned(window, weight)
    target = {"out": out} if window.direct else {}
    aten = torch.ops.aten
    if image.is_cuda:
        convolved, kind = aten.cudnn_convolution, (False, True, window.widened)
        given = (window.padding, window.stride, window.dilation, window.groups, *kind)
        made = convolved(image, weight, *given, **target)
    else:
        given = (None, window.stride, window.padding, window.dilation, False, [0] * len(window.stride), window.groups)
        made = aten.convolution(image, weight, *given, **target)
    if not window.direct:
        _store(torch, window, out, made)


def _dgrad(window: Window, torch, loss, weight, out) -> None:
    loss, weight = _read(window, loss, weight)
    weight = _turned(window, weight)
    # Of an image that is padded unevenly, the gradient with its padding, and of that the middle.
    extents = [
        extent + (before + after if window.apart else 0)
        for extent, before, after in zip(out.shape[2:], window.before, window.after, strict=True)
    ]
    left = [
        extent - ((count - 1) * stride - 2 * padding + dilation * (taps - 1) + 1)
        for extent, count, stride, padding, dilation, taps in zip(
            extents, loss.shape[2:], window.stride, window.padding, window.dilation, weight.shape[2:], strict=True
        )
    ]
    aten = torch.ops.aten
    if loss.is_cuda:
        given = (window.padding, left, window.stride, window.dilation, window.groups, False, True, window.widened)
        made = aten.cudnn_convolution_transpose(loss, weight, *given)
    else:
        given = (None, window.stride, window.padding, window.dilation, True, left, window.groups)
        made = aten.convolution(loss, weight, *given)
    if window.apart:
        inner = [slice(before, before + extent) for before, extent in zip(window.before, out.shape[2:], strict=True)]
        made = made[(..., *inner)]
    _store(torch, window, out, made)


def _wgrad(window: Window, torch, image, loss, out) -> None:
    image, loss = _read(window, image, loss)
    image = _padded(torch, window, image)
    # Of the weight torch reads shape and type alone.
    weight = out if out.dtype is image.dtype else torch.empty_like(out, dtype=image.dtype)
    none = [0] * len(window.stride)
    given = (None, window.stride, window.padding, window.dilation, False, none, window.groups, (False, True, False))
    made = torch.ops.aten.convolution_backward(loss, image, weight, *given)[1]
    _store(torch, window, out, _turned(window, made))


def _store(torch, window: Window, out, made) -> None:
    out.copy_(made if window.rounded is None else rounding.encode(torch, made, window.rounded))
