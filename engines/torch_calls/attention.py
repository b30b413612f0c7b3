"""Attention and its gradients by kernels of torch: cuDNN's, flash attention, memory-efficient attention.

All keep scores and sums in float32, and round exponentials to the type of q. Torch's math backend, which rounds scores,
is never used. Kernels support a band around the diagonal and lengths of sequences (``sequences``). Any other mask is
materialized as a bias of 0 and -infinity.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from graphfuse.base import ragged
from graphfuse.base.dtypes import SIXTEEN_BITS, data_type
from graphfuse.base.enums import diagonal_alignment
from graphfuse.contract.engine import No
from graphfuse.engines.torch_calls import sequences
from graphfuse.engines.torch_calls.call import TorchCall, TorchView, multiplied, unfit
from graphfuse.engines.torch_calls.sequences import LENGTHS, MOST, PARTS, SequenceBand, sequence_band, window
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph, packed_stride
from graphfuse.ops import OFFSETS
from graphfuse.ops.scores import PAGED, gathered, score_masks, within

WIDEST = 256
"""Maximum number of columns of q, k and v."""

_BYTES = 16
_TOGETHER = 8  # elements of 16 bits in 16 bytes
_BIAS, _ROWS = 16, 32  # block sizes in which memory-efficient attention reads columns of a bias and rows of statistics


_MASKS = ("block_mask", *LENGTHS, *PAGED.values())
_FORWARD, _BACKWARD = ("q", "k", "v"), ("q", "k", "v", "o", "dO", "stats")


@dataclass(frozen=True)
class Band:
    """The rows of k that a row of q attends to.

    left, right: bounds as distances from the diagonal; None for no bound. uneven: whether q and k have different
    numbers of rows. The diagonal then ends at the last rows of both.
    """

    left: int | None
    right: int | None
    uneven: bool

    @property
    def plain(self) -> bool:
        """True if there is no band, or it is causal and q and k have the same number of rows."""
        return self.left is None and (self.right is None or self.right == 0 and not self.uneven)


@dataclass(frozen=True)
class SdpaOptions:
    """Options of a call of attention.

    band: None if the mask is materialized.
    sequences: the band of sequences with lengths; None if there are none, or their mask is materialized.
    attributes: the node's.
    ports: names of tensors that are read, then of those that are written.
    scale: None if execute gives it.
    ragged: tensors at ragged offsets, by port.
    """

    band: Band | None
    sequences: SequenceBand | None
    attributes: Mapping[str, object]
    ports: tuple[str, ...]
    scale: float | None
    ragged: Mapping[str, FrozenTensor]


def attention(facts: Subgraph) -> TorchCall | No:
    """Torch's call for a region of one node, attention or its gradients; No with the first reason if there is none."""
    (node,) = facts.nodes
    tensors = facts.graph.tensors
    back = node.op_name == "sdpa_backward"
    given = {port: tensors[t] for port, t in node.inputs if port != "attn_scale"}
    given |= {port: tensors[t] for port, t in node.outputs if t in facts.outputs}
    at_offsets = {port: t for port, t in given.items() if t.ragged is not None}
    # Tensors at ragged offsets are copied to contiguous memory, and results back.
    dense = given | {port: replace(t, ragged=None, stride=packed_stride(t.dim)) for port, t in at_offsets.items()}
    read = {port: dense[port] for port, _ in node.inputs if port in dense}
    made = {port: dense[port] for port, t in node.outputs if t in facts.outputs}
    if not back and "O" not in made:
        return No(f"{tensors[node.output('O')]} is not read; accepted: nodes that make O")
    multiply = [read[port] for port in (_BACKWARD[:-1] if back else _FORWARD)]
    reasons = itertools.chain(
        (multiplied(*multiply),),
        map(unfit, (*read.values(), *made.values())),
        (_type_reason(node, read, made),),
        (_layout_reason(read[port]) for port in (_BACKWARD[:-1] if back else _FORWARD) if PAGED.get(port) not in read),
    )
    if why := next(filter(None, reasons), None):
        return No(why)
    scale, numbers = 1.0, ()
    factor = node.input("attn_scale")
    if factor is not None:
        t = tensors[factor]
        if not t.by_value and t.value is None:
            return No(f"{t} is read from memory; accepted: attn_scale as a number")
        scale, numbers = t.value, () if t.value is not None else (factor,)
    a = dict(node.attributes)
    options = SdpaOptions(_band(a, read), _sequences(node, read, at_offsets), a, (*read, *made), scale, at_offsets)
    views = tuple(_view(given[port]) for port in (*read, *made))
    return TorchCall(views, partial(_bind, options), numbers)


def _view(t: FrozenTensor) -> TorchView:
    """View of a tensor, or of the whole memory of a tensor at ragged offsets."""
    return TorchView.of(t) if t.ragged is None else TorchView.of(t, (t.span,), (1,))


def _layout_reason(t: FrozenTensor) -> str | None:
    """Why kernels cannot read a tensor in place, 16 bytes at a time; None if they can."""
    if t.dim[3] > 1 and t.stride[3] != 1:
        return f"{t} has stride {t.stride[3]} between columns; accepted: 1"
    apart = next((s for e, s in zip(t.dim[:3], t.stride[:3], strict=True) if e > 1 and s % _TOGETHER), None)
    if apart is not None:
        return f"{t} has stride {apart}; accepted: multiples of {_TOGETHER}, but between columns"
    return None if t.alignment >= _BYTES else f"{t} is aligned to {t.alignment} bytes; accepted: {_BYTES}"


def _band(a: Mapping[str, object], read: Mapping[str, FrozenTensor]) -> Band | None:
    rows, others = read["q"].dim[2], read["k"].dim[2]
    left, right = a["diagonal_band_left_bound"], a["diagonal_band_right_bound"]
    if any(port in read for port in ("bias", *_MASKS)):
        return None
    if left is None and right is None:
        return Band(None, None, False)
    if rows == others:
        return Band(left, right, False)
    ends = a["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT and rows < others
    return Band(left, right, True) if ends else None


def _sequences(node: Node, read: Mapping[str, FrozenTensor], at_offsets: Mapping) -> SequenceBand | None:
    """Band of sequences with lengths; None if there are none, or kernels cannot read or write rows at ragged offsets in
    place, 16 bytes at a time."""
    if any(port in PAGED.values() for port in at_offsets) or read["q"].dim[0] * PARTS > MOST:
        return None
    for port, t in at_offsets.items():
        if port.lower() != "stats" and (_layout_reason(t) or any(s % _TOGETHER for s in t.stride[1:3])):
            return None
    return sequence_band(node, read)


def _type_reason(node: Node, read: Mapping[str, FrozenTensor], made: Mapping[str, FrozenTensor]) -> str | None:
    q, k, v = (read[port] for port in _FORWARD)
    unknown = [port for port in read if port not in (*_BACKWARD, "bias", *_MASKS) and not port.endswith(OFFSETS)]
    unknown += [name for name in ("use_alibi_mask", "stats_use_log2", "unfuse_fma") if dict(node.attributes).get(name)]
    unknown += [port for port in made if port not in ("O", "Stats", "dQ", "dK", "dV", "dBias")]
    if unknown:
        return f"{node} has a {unknown[0]}; accepted: none"
    if q.dtype not in SIXTEEN_BITS:
        return f"{q} is wide; accepted: {', '.join(t.name for t in SIXTEEN_BITS)}"
    if q.dim[3] != v.dim[3]:
        return f"{q} and {v} have other columns; accepted: as many"
    if k.dim[1] != v.dim[1]:
        return f"{k} and {v} have other heads; accepted: as many"
    if q.dim[3] % 8 or not 0 < q.dim[3] <= WIDEST:
        return f"{q} has {q.dim[3]} columns; accepted: multiples of 8 up to {WIDEST}"
    for port, t in (read | made).items():
        is_number = port in _MASKS or port.endswith(OFFSETS)
        kind = data_type.FLOAT if port.lower() == "stats" else None if is_number else q.dtype
        if kind is not None and t.dtype is not kind:
            how = "; an output of the graph is stored as that" if t.virtual else ""
            return f"{t} is no {kind.name}; accepted: {kind.name}{how}"
    empty = next((t for t in read.values() if not t.elements), None)
    return None if empty is None else f"{empty} has no elements"


def _bind(options: SdpaOptions, torch, *tensors) -> Callable[..., object]:
    given = dict(zip(options.ports, tensors, strict=True))
    offsets = {port: given.pop(f"{port}{OFFSETS}") for port in options.ragged}
    memory = {port: given.pop(port) for port in options.ports if port in (*_BACKWARD, "bias", *_MASKS)}
    if options.sequences is not None and memory["q"].device.type in sequences.DEVICES:
        return sequences.bound(torch, options, memory, given, offsets)
    back = "dO" in memory
    changing = options.ragged.keys() & memory.keys() or PAGED.values() & memory.keys()
    x = _operands(torch, options, memory, offsets)
    extra = "dBias" in given if back else "Stats" in given
    if options.band is not None and not options.band.plain and not x["q"].is_cuda:
        options = replace(options, band=None)  # the CPU's flash attention does not support bands
    kernel = _kernel(torch, options, x, back and extra)[back]
    # For rows that attend to nothing, all kernels but the CPU's return zeros. The statistics of efficient attention do
    # not mark these rows.
    searched = not back and (kernel is _cpu or kernel is _efficient and extra)

    def run(*number: float) -> None:
        scale = number[0] if number else options.scale
        operands = _operands(torch, options, memory, offsets) if changing else x
        call = _call(torch, options, operands, scale, extra, searched)
        made = kernel(torch.ops.aten, call)
        for port, found in zip(("dQ", "dK", "dV", "dBias") if back else ("O", "Stats"), made, strict=False):
            if port in options.ragged:
                t = options.ragged[port]
                fitted = _fitted(torch, call, port, found, t.dim).to(given[port].dtype)
                _places(torch, t, offsets[port]).write(given[port], fitted)
            elif port in given:
                given[port].copy_(_fitted(torch, call, port, found, given[port].shape))

    return run


def _places(torch, t: FrozenTensor, offsets) -> ragged.Places:
    return ragged.places(torch, t.dim, t.stride, offsets, t.multiplier)


def _operands(torch, options: SdpaOptions, memory: Mapping, offsets: Mapping) -> dict[str, object]:
    """Tensors that are read, with ragged batches and pages gathered to contiguous memory."""
    x = dict(memory)
    for port, t in options.ragged.items():
        if port in x:
            x[port] = _places(torch, t, offsets[port]).read(x[port])
    x["k"], x["v"] = gathered(torch, x, options.attributes)
    return {port: t for port, t in x.items() if port not in PAGED.values()}


@dataclass(frozen=True)
class _Call:
    """A kernel's operands.

    x: tensors by port, with zeros after each sequence's end.
    shift: a bias that is added to scores; None for none.
    attending: mask of the rows that attend to some row of k; None for all.
    causal: whether the kernel masks scores right of the diagonal.
    band: the band, if the kernel masks it; None if `shift` has the mask.
    scale: of scores.
    extra: whether Stats or dBias are requested.
    """

    x: Mapping[str, object]
    shift: object
    attending: object
    causal: bool
    band: Band | None
    scale: float
    extra: bool

    @property
    def read(self) -> tuple:
        """q, k and v; for gradients, dO before these, and o and stats (in flash attention's layout) after them."""
        found = tuple(self.x[port] for port in ("dO", "q", "k", "v", "o") if port in self.x)
        return (*found, self.x["stats"].squeeze(3).contiguous()) if "stats" in self.x else found

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows of q and k."""
        return self.x["q"].shape[2], self.x["k"].shape[2]

    @property
    def unused(self) -> tuple:
        """Seed and offset of dropout, which kernels do not read."""
        empty = self.x["q"].new_empty(2)
        return empty, empty


def _call(torch, options: SdpaOptions, x, scale: float, extra: bool, searched: bool = False) -> _Call:
    """Operands of a kernel. searched: whether to find rows that attend to nothing within sequences, too."""
    causal = options.band is not None and options.band.right is not None
    if options.band is not None:
        return _Call(x, None, None, causal, options.band, scale, extra)
    masks = score_masks(torch, x, options.attributes, x["q"], x["k"].shape[2])
    shift = _materialized(torch, x, masks.of_columns)
    # The bias masks columns alone, not rows after a sequence's end: so it is the same for all rows, and small.
    attending = masks.rows
    if searched:
        found = shift.amax(dim=-1, keepdim=True) != -math.inf
        attending = found if masks.rows is None else found & masks.rows
    # Memory after a sequence's end may have NaN, and zero times NaN is NaN.
    ends = {"q": masks.rows, "o": masks.rows, "dO": masks.rows, "k": masks.columns, "v": masks.columns}
    x = x | {port: within(torch, x[port], end) for port, end in ends.items() if port in x}
    if "stats" in x:
        # With statistics of infinity, the exponentials of masked rows are zeros.
        some = x["stats"] != -math.inf
        x["stats"] = torch.where(some if masks.rows is None else some & masks.rows, x["stats"], math.inf)
    whole = shift.expand(*x["q"].shape[:3], -1)
    return _Call(x, whole, attending, False, None, scale, extra)


def _materialized(torch, x, masks):
    """The bias in memory that kernels can read, with -infinity at masked scores."""
    bias, columns = x.get("bias"), x["k"].shape[2]
    if bias is not None and not masks and _readable(bias, columns):
        return bias
    parts = [t.shape for t in (*masks, bias) if t is not None]
    extents = torch.broadcast_shapes((1, 1, 1, columns), *parts)
    room = -(-columns // _BIAS) * _BIAS
    made = x["q"].new_zeros((*extents[:3], room))[..., :columns]
    if bias is not None:
        made.copy_(bias)
    for mask in masks:
        made.masked_fill_(~mask, -math.inf)
    return made


def _readable(bias, columns: int) -> bool:
    strides = [s for e, s in zip(bias.shape[:3], bias.stride()[:3], strict=True) if e > 1]
    whole = bias.shape[3] == columns and not columns % _BIAS and bias.stride(3) == 1
    return whole and not any(s % _TOGETHER for s in strides) and not bias.data_ptr() % _BYTES


def _fitted(torch, call: _Call, port: str, found, extents):
    """A kernel's result in the shape and with the values of the op's output."""
    if port == "dBias":
        summed = [axis for axis, extent in enumerate(extents) if extent != found.shape[axis]]
        return found.sum(summed, keepdim=True) if summed else found
    if port == "Stats":
        # Some kernels return an axis of extent 1 after the rows, some more rows.
        found = found.reshape(*extents[:2], -1, 1)[:, :, : extents[2]]
    if call.attending is None or port not in ("O", "Stats"):
        return found
    return torch.where(call.attending, found, 0.0 if port == "O" else -math.inf)


def _kernel(torch, options: SdpaOptions, x, of_bias: bool) -> tuple[Callable, Callable]:
    """Functions that call the forward and backward kernels; torch chooses if several can be used."""
    q, k = x["q"], x["k"]
    if not q.is_cuda:
        return _cpu, _cpu_backward
    call = _call(torch, options, x, 1.0, False)
    if call.band is not None and not call.band.plain:
        return _banded, _banded_backward
    if not of_bias:
        choice = torch.ops.aten._fused_sdp_choice.default
        number = choice(
            *(call.x[port] for port in _FORWARD), call.shift, 0.0, call.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        if number == int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return _cudnn, _cudnn_backward
    return (_flash, _flash_backward) if call.shift is None else (_efficient, _efficient_backward)


def _cpu(aten, c: _Call) -> tuple:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        *c.read, 0.0, c.causal, attn_mask=c.shift, scale=c.scale
    )


def _cpu_backward(aten, c: _Call) -> tuple:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *c.read, 0.0, c.causal, attn_mask=c.shift, scale=c.scale
    )


def _cudnn(aten, c: _Call) -> tuple:
    kernel = aten._scaled_dot_product_cudnn_attention.default
    return kernel(*c.read, c.shift, c.extra, 0.0, c.causal, False, scale=c.scale)[:2]


def _cudnn_backward(aten, c: _Call) -> tuple:
    kernel = aten._scaled_dot_product_cudnn_attention_backward.default
    *read, stats = c.read
    return kernel(*read, stats.unsqueeze(3), *c.unused, c.shift, None, None, *c.shape, 0.0, c.causal, scale=c.scale)


def _flash(aten, c: _Call) -> tuple:
    return aten._scaled_dot_product_flash_attention.default(*c.read, 0.0, c.causal, False, scale=c.scale)[:2]


def _flash_backward(aten, c: _Call) -> tuple:
    kernel = aten._scaled_dot_product_flash_attention_backward.default
    return kernel(*c.read, None, None, *c.shape, 0.0, c.causal, *c.unused, scale=c.scale)


def _banded(aten, c: _Call) -> tuple:
    """Flash attention with a band, whose diagonal ends at the last row and column."""
    causal, band = window(c.band.left, c.band.right)
    read = (t.transpose(1, 2) for t in c.read)
    made = aten._flash_attention_forward.default(*read, None, None, *c.shape, 0.0, causal, False, scale=c.scale, **band)
    return made[0].transpose(1, 2), made[1]


def _banded_backward(aten, c: _Call) -> tuple:
    causal, band = window(c.band.left, c.band.right)
    *read, stats = c.read
    kernel = aten._flash_attention_backward.default
    made = kernel(
        *(t.transpose(1, 2) for t in read),
        stats,
        None,
        None,
        *c.shape,
        0.0,
        causal,
        *c.unused,
        scale=c.scale,
        **band,
    )
    return tuple(t.transpose(1, 2) for t in made)


def _efficient(aten, c: _Call) -> tuple:
    """Memory-efficient attention, for which k and v need as many heads as q."""
    kernel = aten._scaled_dot_product_efficient_attention.default
    return kernel(*_repeated(c), c.shift, c.extra, 0.0, c.causal, scale=c.scale)[:2]


def _efficient_backward(aten, c: _Call) -> tuple:
    loss, q, k, v, o = _repeated(c)
    o = o.transpose(1, 2).contiguous().transpose(1, 2)  # the forward's layout, the only one that the kernel reads
    stats = c.read[-1]
    rows = stats.shape[2]
    # The kernel reads rows of statistics in blocks. Rows after the last one attend to nothing.
    room = stats.new_full((*stats.shape[:2], -(-rows // _ROWS) * _ROWS), math.inf)
    room[:, :, :rows] = stats
    kernel = aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, c.extra]
    dq, dk, dv, dbias = kernel(loss, q, k, v, c.shift, o, room, *c.unused, 0.0, wanted, c.causal, scale=c.scale)
    heads, found = q.shape[1] // c.x["k"].shape[1], (dk, dv)
    if heads > 1:
        found = (t.unflatten(1, (-1, heads)).sum(2) for t in found)
    return dq, *found, dbias


def _repeated(c: _Call) -> list:
    heads = c.x["q"].shape[1]
    return [t.repeat_interleave(heads // t.shape[1], dim=1) if t.shape[1] != heads else t for t in c.read[:5]]
