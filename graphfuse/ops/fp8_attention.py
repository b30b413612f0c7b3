"""Attention in FP8, with a scale for each tensor or for each block of 32 elements, and its gradients."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from graphfuse.base import reordering, rounding
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops.attention import (
    NOT_OFFERED,
    NarrowOperands,
    gradients,
    kept,
    shapes_backward,
    softmax_parts,
    statistics,
)
from graphfuse.ops.attention_options import (
    BACKWARD,
    DROPPED,
    FORWARD,
    GENERATE_STATS,
    GIVEN,
    HOW,
    MASKS,
    NAMES,
    PADDED,
    PAGES,
    SINK,
    STATS,
    TUPLES,
    attended,
    backward,
    forward,
    frozen_backward,
    frozen_forward,
    sequences,
)
from graphfuse.ops.dequantization import dequantized
from graphfuse.ops.op import Attribute, Attributes, Port, Shape
from graphfuse.ops.pullback import NoRule
from graphfuse.ops.scores import PAGED, scored
from graphfuse.ops.shapes import check_scalars, of_blocks

BLOCK = 32
"""Elements per scale."""

_NARROW = (data_type.FP8_E4M3, data_type.FP8_E5M2)
_ONE = (1, 1, 1, 1)


def _largest(t, values):
    """The largest magnitude; 0 if there are no elements."""
    return values.abs().amax().reshape(_ONE) if values.numel() else values.new_zeros(_ONE)


def _one(x, port: str):
    return x[port].reshape(())


def _rounded(t, x, a, scale: str, descale: str, of: str) -> Callable[[object], object]:
    """Function that multiplies by `scale`, rounds to the type of port `of`, and multiplies by `descale`."""

    def rounded(values):
        return rounding.round_to(t, values * _one(x, scale), a[f"{of}_type"]) * _one(x, descale)

    return rounded


def _descaled(x, ports: tuple[str, ...]) -> dict[str, object]:
    return {**x, **{port: x[port] * _one(x, f"descale_{port}") for port in ports}}


# A scale for each tensor

_READ = ("q", "k", "v")
_FORWARD_SCALES = (*(f"descale_{port}" for port in _READ), "descale_s", "scale_s", "scale_o")
_BACKWARD_READ = (*_READ, "o", "dO")
_GRADIENTS = ("dQ", "dK", "dV")
_BACKWARD_SCALES = (
    *(f"descale_{port}" for port in (*_BACKWARD_READ, "s", "dP")),
    *(f"scale_{port}" for port in ("s", *_GRADIENTS, "dP")),
)


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    check_scalars(shapes, _FORWARD_SCALES)
    return {**attended(shapes, attributes, wanted), "Amax_S": _ONE, "Amax_O": _ONE}


def _fp8(t, x, a) -> dict[str, object]:
    s = scored(t, _descaled(x, _READ), a)
    soft = softmax_parts(t, s)
    p = kept(s, t.where(soft.nothing, 0.0, soft.powers / soft.total))
    made = t.matmul(_rounded(t, x, a, "scale_s", "descale_s", "q")(p), s.v)
    largest = {"Amax_S": _largest(t, p), "Amax_O": _largest(t, made)}
    return {"O": made * _one(x, "scale_o"), **largest, **statistics(t, a, s, soft)}


def _shapes_backward(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    check_scalars(shapes, _BACKWARD_SCALES)
    made = shapes_backward(shapes, attributes, wanted)
    return {**made, **dict.fromkeys((f"amax_{port}" for port in (*_GRADIENTS, "dP")), _ONE)}


def _fp8_backward(t, x, a) -> dict[str, object]:
    narrowed = NarrowOperands(
        p=_rounded(t, x, a, "scale_s", "descale_s", "q"), ds=_rounded(t, x, a, "scale_dP", "descale_dP", "dO")
    )
    made = gradients(t, _descaled(x, _BACKWARD_READ), a, narrowed)
    largest = {f"amax_{port}": _largest(t, made[port]) for port in _GRADIENTS} | {"amax_dP": _largest(t, made["dS"])}
    return {**made, **largest, **{port: made[port] * _one(x, f"scale_{port}") for port in _GRADIENTS}}


# A scale for each block

_AXES = {"descale_q": 3, "descale_k": 3, "descale_v": 2}
_AXES_BACKWARD = {
    **{f"descale_{port}": 3 for port in ("q", "k", "v", "dO")},
    **{f"descale_{port}_T": 2 for port in ("q", "k", "dO")},
}
"""Port of scales -> axis that blocks run along."""


def _check_blocks(axes: Mapping[str, int], shapes: Mapping[str, Shape]) -> None:
    for port, axis in axes.items():
        of = shapes[port.removeprefix("descale_")]
        exact = of_blocks(of, axis, BLOCK)
        accepted = [list(exact)]
        if len(of) == 4:
            accepted.append(list(reordering.whole_tiles(exact, axis)))
        if list(shapes[port]) not in accepted:
            raise GraphValidationError(
                f"{port} must be {' or '.join(map(str, accepted))}, an element for each {BLOCK} along axis {axis}, "
                f"or so many that tiles of 128 x 4 are full; got {list(shapes[port])}"
            )


def _shapes_blocks(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    made = attended(shapes, attributes, wanted)
    _check_blocks(_AXES, shapes)
    return {**made, "Amax_O": _ONE}


def _shapes_blocks_backward(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    for port, of in (("q_T", "q"), ("k_T", "k")):
        if shapes[port] != shapes[of]:
            raise GraphValidationError(f"{port} must be {list(shapes[of])}, as {of}, got {list(shapes[port])}")
    made = shapes_backward(shapes, attributes, wanted, "o_f16")
    _check_blocks(_AXES_BACKWARD, shapes)
    return {**made, **dict.fromkeys((f"amax_{port}" for port in _GRADIENTS), _ONE)}


def _frozen_blocks(of: Callable[..., dict[str, object]], axes: Mapping[str, int], attributes, inputs, outputs):
    """Frozen attributes, with the axes of blocks."""
    return {**of(attributes, inputs, outputs), **{f"{port}_axis": axis for port, axis in axes.items()}}


def _dequantized(x, axes: Mapping[str, int]) -> dict[str, object]:
    made = dict(x)
    for port, axis in axes.items():
        of = port.removeprefix("descale_")
        made[of] = dequantized(x[of], x[port], [BLOCK if a == axis else 1 for a in range(x[of].dim())])
    return made


def _mxfp8(t, x, a) -> dict[str, object]:
    s = scored(t, _dequantized(x, _AXES), a)
    soft = softmax_parts(t, s)
    made = t.where(soft.nothing, 0.0, t.matmul(soft.powers, s.v) / soft.total)
    return {"O": made, "Amax_O": _largest(t, made), **statistics(t, a, s, soft)}


def _mxfp8_backward(t, x, a) -> dict[str, object]:
    exact = _dequantized(x, _AXES_BACKWARD)
    over_rows = {port: exact[f"{port}_T"] for port in ("q", "k", "dO")}
    made = gradients(t, exact, a, NarrowOperands(over_rows=over_rows, inner={"o": x["o_f16"], "dO": x["dO_f16"]}))
    return {**made, **{f"amax_{port}": _largest(t, made[port]) for port in _GRADIENTS}}


# The table

_narrow = partial(sequences, types=_NARROW, declared=True)
_amax = partial(Port, dtype=data_type.FLOAT)
_scales = partial(Port, types=(data_type.FP8_E8M0,), declared=True)

_BACK = {name: other for other, name in NAMES.items()}


def _renamed(attributes: tuple[Attribute, ...], *left_out: str) -> tuple[Attribute, ...]:
    return tuple(replace(a, name=_BACK.get(a.name, a.name)) for a in attributes if a.name not in left_out)


_BACKWARD = _renamed(BACKWARD, "sliding_window_length", "use_alibi_mask")
_NOT_OF_BLOCKS = ("sliding_window_length", "use_alibi_mask", "dropout_probability")
_BLOCK_MASKS = tuple(a for a in MASKS if a.name not in _NOT_OF_BLOCKS)
_BY_NODES = "bias, a mask or sink_token where one says it, else sdpa of dequantized q, k and v, with score_mod"
_BLOCKS_OF_O = (None, "block_scale_quantize of O, a node after this one")
_PAGES = (None, "k, v and their scales put together of their pages before; sdpa and sdpa_fp8 read pages")
_NO_VJP = NoRule("its gradients are nodes of their own: build them with its backward op")

TABLE = (
    forward(
        "sdpa_fp8",
        "sdpa of FP8_E4M3 or FP8_E5M2, with a scale for each tensor, a tensor of one element each: q, k and v are\n"
        "multiplied by descale_q, descale_k and descale_v. P, the result of softmax and dropout, is rounded to q's\n"
        "type as P * scale_s, and multiplied by descale_s and v. O is the product times scale_o. Returns [O,\n"
        "Stats, Amax_S, Amax_O]; the last two are the largest magnitudes of P and of O before its scale, FLOAT, one\n"
        "element each. sliding_window, left_bound and right_bound are sdpa's sliding_window_length,\n"
        "diagonal_band_left_bound and diagonal_band_right_bound; all other options are sdpa's. Values beyond FP8's\n"
        "largest saturate.",
        inputs=(
            *(_narrow(port) for port in _READ),
            *(Port(port) for port in _FORWARD_SCALES),
            Port("attn_scale", optional=True),
            Port("bias", optional=True),
            *PADDED,
            *DROPPED,
            *PAGES,
            SINK,
        ),
        outputs=(
            sequences("O"),
            STATS,
            *(_amax(port) for port in ("Amax_S", "Amax_O")),
            *GIVEN,
        ),
        tuples=TUPLES,
        infer=_shapes,
        reference=_fp8,
        attributes=_renamed(FORWARD),
        order="give the arguments after scale_o by name",
        not_offered={"fn": (None, _BY_NODES), "sf_o": _BLOCKS_OF_O, **NOT_OFFERED},
        vjp=_NO_VJP,
    ),
    backward(
        "sdpa_fp8_backward",
        "Gradients of sdpa_fp8's q, k and v from that of its O, with its options. q, k, v, o and dO, all FP8, are\n"
        "multiplied by their descales. P is rounded to q's type as P * scale_s and multiplied by descale_s. The\n"
        "gradient of the scores, times attn_scale and scale_dP, is rounded to dO's type and multiplied by descale_dP.\n"
        "Returns\n"
        "[dQ, dK, dV, amax_dQ, amax_dK, amax_dV, amax_dP]: gradients times scale_dQ, scale_dK and scale_dV, and the\n"
        "largest magnitudes before these scales, FLOAT, one element each. stats: of base e. dSink_token as in\n"
        "sdpa_backward.",
        inputs=(
            *(_narrow(port) for port in _BACKWARD_READ),
            sequences("stats"),
            *(Port(port) for port in _BACKWARD_SCALES),
            Port("attn_scale", optional=True),
            *PADDED[:2],
            *DROPPED,
            SINK,
        ),
        outputs=(
            *(sequences(port) for port in _GRADIENTS),
            *(_amax(f"amax_{port}") for port in (*_GRADIENTS, "dP")),
            Port("dSink_token", given=True),
        ),
        infer=_shapes_backward,
        reference=_fp8_backward,
        attributes=_BACKWARD,
        order="give the arguments after scale_dP by name",
    ),
    forward(
        "sdpa_mxfp8",
        "sdpa of MXFP8: q, k and v are FP8_E4M3 or FP8_E5M2, with a scale, FP8_E8M0, for each block of 32 elements,\n"
        "along columns in descale_q and descale_k, along rows in descale_v. These have the extents of their tensors,\n"
        "divided by 32 along that axis, rounded up. They may be reordered as F8_128x4, then also with the extents of\n"
        "whole tiles: multiples of 4 along that axis and of 128 along the other. Elements are multiplied exactly;\n"
        "the result of softmax is not rounded. Returns [O, Stats, Amax_O], the last the largest magnitude of\n"
        "O, FLOAT, one element. Options are sdpa's.",
        inputs=(
            *(_narrow(port) for port in _READ),
            *(_scales(port, scales=f"{port}_axis") for port in _AXES),
            Port("attn_scale", optional=True),
            *PADDED,
            SINK,
        ),
        outputs=(
            sequences("O"),
            STATS,
            _amax("Amax_O"),
        ),
        infer=_shapes_blocks,
        frozen=partial(_frozen_blocks, frozen_forward, _AXES),
        reference=_mxfp8,
        attributes=(GENERATE_STATS, *_BLOCK_MASKS, *HOW),
        order="give the arguments after descale_v by name",
        not_offered={
            **dict.fromkeys((*PAGED.values(), "paged_attention_max_seq_len_kv"), _PAGES),
            "sf_o": _BLOCKS_OF_O,
            "scale_o": _BLOCKS_OF_O,
            **NOT_OFFERED,
        },
        vjp=_NO_VJP,
    ),
    backward(
        "sdpa_mxfp8_backward",
        "Gradients of sdpa_mxfp8's q, k and v from that of its O, with its options. Products along columns read q, k,\n"
        "v and dO, with scales along columns; products along rows read q_T, k_T and dO_T, of the same extents, with\n"
        "scales along rows. The sum of products of O and dO reads o_f16 and dO_f16. Scales are as in sdpa_mxfp8.\n"
        "Returns [dQ, dK, dV, amax_dQ, amax_dK, amax_dV], the last three largest magnitudes, FLOAT, one\n"
        "element each. stats: of base e. Only results are rounded. dSink_token as in sdpa_backward.",
        inputs=(
            *(_narrow(port) for port in ("q", "q_T", "k", "k_T", "v")),
            *(sequences(port) for port in ("o_f16", "dO_f16")),
            *(_narrow(port) for port in ("dO", "dO_T")),
            sequences("stats"),
            *(
                _scales(f"descale_{port}", scales=f"descale_{port}_axis")
                for port in ("q", "q_T", "k", "k_T", "v", "dO", "dO_T")
            ),
            Port("attn_scale", optional=True),
            *PADDED[:2],
            *DROPPED,
            SINK,
        ),
        outputs=(
            *(sequences(port) for port in _GRADIENTS),
            *(_amax(f"amax_{port}") for port in _GRADIENTS),
            Port("dSink_token", given=True),
        ),
        infer=_shapes_blocks_backward,
        frozen=partial(_frozen_blocks, frozen_backward, _AXES_BACKWARD),
        reference=_mxfp8_backward,
        attributes=_BACKWARD,
        order="give the arguments after descale_dO_T by name",
    ),
)
