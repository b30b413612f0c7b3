"""Attention by the kernels that torch has for it: cuDNN's, flash attention, memory-efficient attention.

All keep scores and sums in float32, and round exponentials to the type of what is read. Torch's own arithmetic of
several steps, which rounds scores, is never used.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import diagonal_alignment
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls.call import TorchCall, TorchView, multiplied, unfit
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph

WIDEST = 256
"""Columns of q, k and v at most."""

_BYTES = 16
_TOGETHER = 8  # elements of 16 bits

_NARROW = (data_type.BFLOAT16, data_type.HALF)


@dataclass(frozen=True)
class Band:
    """The rows of k that a row of q attends to.

    left, right: how far from the diagonal; None for all the way. uneven: whether there are other rows of q than of k,
    the last of which lie on the diagonal.
    """

    left: int | None
    right: int | None
    uneven: bool

    @property
    def plain(self) -> bool:
        """True if it is none, or causal in the only way that there is."""
        return self.left is None and (self.right is None or self.right == 0 and not self.uneven)


def attention(facts: Subgraph) -> TorchCall | No:
    """The node alone."""
    (node,) = facts.nodes
    tensors = facts.graph.tensors
    q, k, v = (tensors[node.input(port)] for port in "qkv")
    o = tensors[node.output("O")]
    stats = [tensors[t] for port, t in node.outputs if port == "Stats" and t in facts.outputs]
    outputs = [o, *stats]
    if o.id not in facts.outputs:
        return No(f"{o} is not read; accepted: nodes that make O")
    found = _mask(node, q, k)
    if isinstance(found, No):
        return found
    reasons = itertools.chain(
        (multiplied(q, k, v),), map(unfit, outputs), (_kinds(node, q, v, outputs),), map(_lying, (q, k, v))
    )
    if why := next(filter(None, reasons), None):
        return No(why)
    scale, numbers = 1.0, ()
    given = node.input("attn_scale")
    if given is not None:
        t = tensors[given]
        if not t.by_value and t.value is None:
            return No(f"{t} is read from memory; accepted: attn_scale as a number")
        scale, numbers = t.value, () if t.value is not None else (given,)
    bind = partial(_bind, found, bool(stats), scale)
    return TorchCall((*map(TorchView.of, (q, k, v)), *map(TorchView.of, outputs)), bind, numbers)


def _lying(t: FrozenTensor) -> str | None:
    """Why kernels cannot read a tensor where it lies, 16 bytes at a time; None if they can."""
    if t.dim[3] > 1 and t.stride[3] != 1:
        return f"{t} has stride {t.stride[3]} between columns; accepted: 1"
    apart = next((s for e, s in zip(t.dim[:3], t.stride[:3], strict=True) if e > 1 and s % _TOGETHER), None)
    if apart is not None:
        return f"{t} has stride {apart}; accepted: multiples of {_TOGETHER}, but between columns"
    return None if t.alignment >= _BYTES else f"{t} is aligned to {t.alignment} bytes; accepted: {_BYTES}"


def _mask(node: Node, q: FrozenTensor, k: FrozenTensor) -> Band | No:
    a, (rows, others) = dict(node.attributes), (q.dim[2], k.dim[2])
    left, right = a["diagonal_band_left_bound"], a["diagonal_band_right_bound"]
    if left is None and right is None:
        return Band(None, None, False)
    if rows == others:
        return Band(left, right, False)
    if a["diagonal_alignment"] is diagonal_alignment.TOP_LEFT:
        return No(f"{node} has a diagonal from the top left of {rows} x {others} scores; accepted: to the bottom right")
    if rows > others:
        return No(f"{node} has rows of q with nothing to attend to; accepted: at most the {others} rows of k")
    return Band(left, right, True)


def _kinds(node: Node, q: FrozenTensor, v: FrozenTensor, outputs: list[FrozenTensor]) -> str | None:
    o, *stats = outputs
    unknown = [port for port, _ in node.inputs if port not in ("q", "k", "v", "attn_scale")]
    unknown += [name for name in ("use_alibi_mask", "stats_use_log2") if dict(node.attributes).get(name)]
    unknown += [port for port in node.op.given if node.output(port) is not None]
    if unknown:
        return f"{node} has a {unknown[0]}; accepted: none"
    if q.dtype not in _NARROW:
        return f"{q} is wide; accepted: {', '.join(t.name for t in _NARROW)}"
    if q.dim[3] != v.dim[3]:
        return f"{q} and {v} have other columns; accepted: as many"
    if q.dim[3] % 8 or not 0 < q.dim[3] <= WIDEST:
        return f"{q} has {q.dim[3]} columns; accepted: multiples of 8 up to {WIDEST}"
    if o.dtype is not q.dtype:
        return f"{o} is not of q's type; accepted: {q.dtype.name}"
    if any(t.dtype is not data_type.FLOAT for t in stats):
        return f"{stats[0]} is no FLOAT; accepted: FLOAT"
    if not o.elements:
        return f"{o} has no elements"
    return None


def _bind(mask: Band, stats: bool, scale: float | None, torch, q, k, v, *outputs) -> Callable[..., object]:
    o = outputs[0]
    attended = _kernel(torch, mask, stats, q, k, v)
    if not stats:
        return lambda *number: o.copy_(attended(scale=number[0] if number else scale)[0])
    # Some kernels have an axis of extent 1 behind the rows.
    log_sums = outputs[1].squeeze(3)

    def run(*number: float) -> None:
        made = attended(scale=number[0] if number else scale)
        o.copy_(made[0])
        log_sums.copy_(made[1].reshape(q.shape[:3]))

    return run


def _kernel(torch, mask: Band, stats: bool, q, k, v) -> Callable[..., tuple]:
    """Function that computes attention, given the scale: of torch's choice, where it has several kernels."""
    causal, aten = mask.right is not None, torch.ops.aten
    if not mask.plain:
        return _banded(torch, mask, q, k, v)
    if not q.is_cuda:
        return partial(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal)
    number = aten._fused_sdp_choice.default(q, k, v, None, 0.0, causal, enable_gqa=q.shape[1] != k.shape[1])
    if number == int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return partial(aten._scaled_dot_product_cudnn_attention.default, q, k, v, None, stats, 0.0, causal, False)
    return partial(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, causal, False)


def _banded(torch, mask: Band, q, k, v) -> Callable[..., tuple]:
    """Flash attention of a band, which ends at the last row and column."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = mask.left is None and mask.right == 0
    band = {
        "window_size_left": None if mask.left is None else mask.left - 1,
        "window_size_right": None if causal else mask.right,
    }
    flash = torch.ops.aten._flash_attention_forward.default

    def attended(scale: float) -> tuple:
        made = flash(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, **band)
        return made[0].transpose(1, 2), made[1]

    return attended
