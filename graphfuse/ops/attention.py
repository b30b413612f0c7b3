"""Scaled dot product attention and its gradients. A mask is a predicate over (row, column) of the scores."""

import math
from collections.abc import Mapping
from functools import partial

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import attention_implementation, diagonal_alignment
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import layouts
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NO_SECOND, NoRule
from graphfuse.ops.scores import PAGED, TILE, scored, whole_sequences, within


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    given = q, k, v = tuple(shapes[port] for port in ("q", "k", "v"))
    if any(len(s) != 4 for s in given):
        raise GraphValidationError(
            f"q, k and v must be [batch, heads, rows, columns], got {list(q)}, {list(k)} and {list(v)}"
        )
    k, v = whole_sequences(shapes, attributes)
    if not q[0] == k[0] == v[0] or k[2] != v[2] or q[3] != k[3]:
        raise GraphValidationError(
            f"q, k and v must have one batch, k and v as many rows, q and k as many columns, "
            f"got {list(q)}, {list(k)} and {list(v)}"
        )
    if not k[2]:
        raise GraphValidationError(f"k {list(k)} has no rows to attend to; at least 1 is needed")
    for port, s in (("k", k), ("v", v)):
        if not s[1] or q[1] % s[1]:
            raise GraphValidationError(f"{port} has {s[1]} heads, which must divide the {q[1]} of q")
    batch, heads, rows, columns = scores = q[0], q[1], q[2], k[2]
    for port in ("attn_scale", "dropout_seed", "dropout_offset", "dropout_scale"):
        if any(e != 1 for e in shapes.get(port, ())):
            raise GraphValidationError(f"{port} must have one element, got shape {list(shapes[port])}")
    tiles = batch, heads, -(-rows // TILE), -(-columns // (8 * TILE))
    lengths, offsets = (batch, 1, 1, 1), (batch + 1, 1, 1, 1)
    for port, extents, of in (
        ("bias", scores, "the scores [batch, heads of q, rows of q, rows of k]"),
        ("dropout_mask", scores, "the scores [batch, heads of q, rows of q, rows of k]"),
        ("block_mask", tiles, f"[batch, heads of q, tiles of {TILE} rows of q, bytes of 8 tiles of rows of k]"),
    ):
        s = shapes.get(port, extents)
        if len(s) != 4 or any(b not in (1, e) for b, e in zip(s, extents, strict=True)):
            raise GraphValidationError(f"{port} must have the extents of {of}, {list(extents)}, or 1, got {list(s)}")
    for port, extents in (
        ("seq_len_q", lengths),
        ("seq_len_kv", lengths),
        ("cu_seq_len_q", offsets),
        ("cu_seq_len_kv", offsets),
        ("sink_token", (1, heads, 1, 1)),
    ):
        if shapes.get(port, extents) != extents:
            raise GraphValidationError(f"{port} must be {list(extents)}, got {list(shapes[port])}")
    _check_lengths(shapes, attributes)
    _check_dropout(shapes, attributes)
    if attributes["use_alibi_mask"] and _band(attributes)["diagonal_band_right_bound"] != 0:
        raise GraphValidationError("use_alibi_mask needs a causal mask: diagonal_band_right_bound=0")
    _band(attributes)
    for name in ("max_total_seq_len_q", "max_total_seq_len_kv"):
        if attributes[name] is not None and attributes[name] < 1:
            raise GraphValidationError(f"{name} is {attributes[name]}; accepted: None and integers >= 1")
    if "rng_dump" in wanted and attributes["dropout_probability"] is None:
        raise GraphValidationError("rng_dump is given without dropout=(probability, seed, offset), which draws it")
    stats = dict.fromkeys(("Stats", "score_max", "score_sum_exp"), (*q[:3], 1))
    return {"O": (*q[:3], v[3]), **stats, "rng_dump": scores}


def _shapes_forward(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    made = _shapes(shapes, attributes, wanted)
    if attributes["generate_stats"] is not None and attributes["generate_stats"] is attributes["is_inference"]:
        same = attributes["generate_stats"]
        raise GraphValidationError(f"generate_stats and is_inference are both {same}; one is the opposite of the other")
    return made


def _check_lengths(given: Mapping[str, Shape], attributes: Attributes) -> None:
    sides = [[p for p in (f"seq_len_{of}", f"cu_seq_len_{of}") if p in given] for of in ("q", "kv")]
    for both in (side for side in sides if len(side) > 1):
        raise GraphValidationError(f"{' and '.join(both)} are both given; give one")
    named = [port for side in sides for port in side]
    if attributes["use_padding_mask"] and not all(sides):
        got = named[0] if named else "neither"
        raise GraphValidationError(f"use_padding_mask needs seq_len_q and seq_len_kv, or cu_seq_len_*; got {got}")
    if named and not attributes["use_padding_mask"]:
        raise GraphValidationError(f"{named[0]} is given without use_padding_mask=True, and would not be read")
    paged = [table for table in PAGED.values() if table in given]
    if paged and not attributes["use_padding_mask"]:
        raise GraphValidationError(f"{paged[0]} needs use_padding_mask=True, seq_len_q and seq_len_kv")


def _check_dropout(given: Mapping[str, Shape], attributes: Attributes) -> None:
    drawn = {port for port in ("dropout_seed", "dropout_offset") if port in given}
    masked = {port for port in ("dropout_mask", "dropout_scale") if port in given}
    probability = attributes["dropout_probability"]
    if probability is not None and not 0 <= probability < 1:
        raise GraphValidationError(f"dropout's probability is {probability}; accepted: 0 up to 1, without 1")
    if drawn and masked or len(masked) == 1 or (len(drawn) < 2 if probability is not None else drawn):
        parts = sorted(drawn | masked) + ["dropout_probability"] * (probability is not None)
        raise GraphValidationError(
            f"dropout must be (probability, seed, offset) or (mask, scale), got {', '.join(parts)}"
        )


def _band(attributes: Attributes) -> dict[str, object]:
    """The diagonal and how far to each side of it rows attend; None for all the way."""
    corners = {
        "use_causal_mask": diagonal_alignment.TOP_LEFT,
        "use_causal_mask_bottom_right": diagonal_alignment.BOTTOM_RIGHT,
    }
    flags = [name for name in corners if attributes[name]]
    left, right = (f"diagonal_band_{side}_bound" for side in ("left", "right"))
    pairs = [(flag, right) for flag in flags] + [("sliding_window_length", left)]
    for old, new in pairs:
        if attributes[old] is not None and attributes[new] is not None:
            raise GraphValidationError(f"{old} and {new} are both given; {new} says all that {old} does")
    if len(flags) > 1:
        raise GraphValidationError(f"{' and '.join(flags)} are both given; give one")
    lengths = {name: attributes[name] for name in ("sliding_window_length", left, right)}
    for name, length in lengths.items():
        least = 0 if name == right else 1
        if length is not None and length < least:
            raise GraphValidationError(f"{name} is {length}; accepted: None and integers >= {least}")
    aligned = attributes["diagonal_alignment"]
    if flags and aligned not in (diagonal_alignment.TOP_LEFT, corners[flags[0]]):
        raise GraphValidationError(f"{flags[0]} and diagonal_alignment={aligned.name} contradict each other")
    window = lengths["sliding_window_length"]
    return {
        "diagonal_alignment": corners[flags[0]] if flags else aligned,
        left: lengths[left] if window is None else window,
        right: 0 if flags else lengths[right],
    }


def _makes_stats(attributes: Attributes) -> bool:
    wanted, unwanted = attributes["generate_stats"], attributes["is_inference"]
    return wanted if wanted is not None else unwanted is False


def _absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    return frozenset() if _makes_stats(attributes) else frozenset({"Stats"})


_UNSAID = {
    "use_alibi_mask": False,
    "use_padding_mask": False,
    "stats_use_log2": False,
    "paged_attention_max_seq_len_kv": None,
    "dropout_probability": None,
    "implementation": attention_implementation.AUTO,
    "use_deterministic_algorithm": False,
    "unfuse_fma": False,
}
"""Attributes that frozen nodes have only where they ask for something."""


def _asked(attributes: Attributes) -> dict[str, object]:
    """Attributes with one spelling of the mask, and of what else is asked for."""
    asked = {n: attributes[n] for n, default in _UNSAID.items() if attributes.get(n, default) != default}
    return {**_band(attributes), **asked}


def _frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    return {**_asked(attributes), "generate_stats": _makes_stats(attributes)}


def _frozen_backward(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    return _asked(attributes)


def _sdpa(t, x, a) -> dict[str, object]:
    s = scored(t, x, a)
    largest = s.scaled.amax(dim=-1, keepdim=True)
    if s.sink is not None:
        largest = t.maximum(largest, s.sink)
    nothing = largest == -float("inf")
    # Infinity less infinity would be NaN.
    finite = t.where(nothing, 0.0, largest)
    powers = t.exp(s.scaled - finite)
    summed = powers.sum(dim=-1, keepdim=True)
    if s.sink is not None:
        summed = summed + t.exp(s.sink - finite)
    total = t.where(nothing, 1.0, summed)
    stats = largest + t.log(total)
    used = powers if s.kept is None else powers * s.kept
    return {
        "O": t.where(nothing, 0.0, t.matmul(used, s.v) / total),
        "Stats": stats * math.log2(math.e) if a.get("stats_use_log2") else stats,
        "score_max": largest,
        "score_sum_exp": summed,
        **_dumped(s.kept),
    }


def _dumped(kept) -> dict[str, object]:
    """1 where dropout keeps an element, and 0."""
    return {} if kept is None else {"rng_dump": (kept != 0).to(kept.dtype)}


def _shapes_backward(shapes: Mapping[str, Shape], attributes: Attributes, wanted) -> dict[str, Shape]:
    made = _shapes(shapes, attributes, wanted)
    for port, extents in (("o", made["O"]), ("dO", made["O"]), ("stats", made["Stats"])):
        if shapes[port] != extents:
            raise GraphValidationError(f"{port} must be {list(extents)}, as sdpa makes it, got {list(shapes[port])}")
    for port, of in _GIVEN_GRADIENTS.items():
        if port in wanted and of not in shapes:
            raise GraphValidationError(f"{port} is given without {of}, whose gradient it is")
    given = {port: shapes[of] for port, of in _GIVEN_GRADIENTS.items() if of in shapes}
    return {"dQ": shapes["q"], "dK": shapes["k"], "dV": shapes["v"], **given, "rng_dump": made["rng_dump"]}


_GIVEN_GRADIENTS = {"dBias": "bias", "dSink_token": "sink_token"}


def _sdpa_backward(t, x, a) -> dict[str, object]:
    s = scored(t, x, a)
    stats, nothing = x["stats"], x["stats"] == -float("inf")
    # Rows beyond a sequence's end have nothing to attend to, whatever lies there.
    nothing = nothing if s.rows is None else nothing | ~s.rows
    finite = t.where(nothing, 0.0, stats)
    p = t.where(nothing, 0.0, t.exp(s.scaled - finite))
    loss, o = (within(t, x[port], s.rows) for port in ("dO", "o"))
    of_p = t.matmul(loss, s.v.transpose(-1, -2))
    used = p if s.kept is None else p * s.kept
    of_p = of_p if s.kept is None else of_p * s.kept
    inner = (loss * o).sum(dim=-1, keepdim=True)
    of_scores = p * (of_p - inner)
    scaled = of_scores * x["attn_scale"] if "attn_scale" in x else of_scores
    made = {
        "dQ": t.matmul(scaled, s.k),
        "dK": of_heads(t.matmul(scaled.transpose(-1, -2), s.q), x["k"]),
        "dV": of_heads(t.matmul(used.transpose(-1, -2), loss), x["v"]),
    }
    if "bias" in x:
        made["dBias"] = of_scores.sum_to_size(x["bias"].shape)
    if s.sink is not None:
        sunk = t.where(nothing, 0.0, t.exp(s.sink - finite))
        made["dSink_token"] = -(sunk * inner).sum_to_size(x["sink_token"].shape)
    return made | _dumped(s.kept)


def of_heads(grad, of):
    """The sum over the heads of q that one of k or v serves."""
    return grad.unflatten(1, (of.shape[1], -1)).sum(dim=2)


_FLAG = {"types": (bool,), "default": False}
_CHOICE = {"types": (bool, type(None))}
_LENGTH = {"types": (int, type(None))}

_MASKS = (
    Attribute("use_causal_mask", **_FLAG),
    Attribute("use_causal_mask_bottom_right", **_FLAG),
    Attribute("sliding_window_length", **_LENGTH),
    Attribute("diagonal_alignment", (diagonal_alignment,), diagonal_alignment.TOP_LEFT),
    Attribute("diagonal_band_left_bound", **_LENGTH),
    Attribute("diagonal_band_right_bound", **_LENGTH),
    Attribute("use_alibi_mask", **_FLAG),
    Attribute("use_padding_mask", **_FLAG),
    Attribute("dropout_probability", (float, int, type(None))),
)

_sequences = partial(Port, ragged="use_padding_mask")

_PADDED = (
    Port("seq_len_q", optional=True, numbers=True),
    Port("seq_len_kv", optional=True, numbers=True),
    Port("cu_seq_len_q", optional=True, numbers=True),
    Port("cu_seq_len_kv", optional=True, numbers=True),
)

_DROPPED = (
    Port("dropout_seed", optional=True, numbers=True),
    Port("dropout_offset", optional=True, numbers=True),
    Port("dropout_mask", optional=True),
    Port("dropout_scale", optional=True),
)

_SINK = Port("sink_token", optional=True)

_DUMP = Port("rng_dump", given=True, dtype=data_type.FLOAT)

_DROPOUT = ("dropout_probability", "dropout_seed", "dropout_offset")

_TOTALS = tuple(Attribute(name, **_LENGTH) for name in ("max_total_seq_len_q", "max_total_seq_len_kv"))

_NOT_OFFERED = (
    ("score_mod", None),
    ("kv_mask", None),
    ("softmax_precision", None),
    ("attn_scale_prefolded", False),
)

TABLE = (
    Op(
        "sdpa",
        "Attention of q [batch, heads, rows, columns] to k and v (Vaswani et al. 2017, equation 1):\n"
        "O = softmax(attn_scale * q k^T + bias) v. Heads of k and v must divide those of q: head h of q attends to\n"
        "head h / (heads of q / heads of k), so one serves several (grouped and multi-query attention). attn_scale,\n"
        "a number or a tensor of one element, is 1 if left out; bias has the extents of the scores or 1.\n"
        "Row i attends to column j where i - diagonal_band_left_bound < j <= i + diagonal_band_right_bound, all the\n"
        "way where a bound is None; with diagonal_alignment BOTTOM_RIGHT i counts from rows of k - rows of q.\n"
        "use_causal_mask is TOP_LEFT with right bound 0, use_causal_mask_bottom_right BOTTOM_RIGHT likewise,\n"
        "sliding_window_length the left bound. A row with nothing to attend to has 0 and, for Stats, -infinity.\n"
        "Returns [O, Stats]; Stats, FLOAT unless set, is the log-sum-exp of each row's scores, made with\n"
        "generate_stats=True, or is_inference=False, else None. Scores, their exponentials and sums are in the\n"
        "compute data type, FLOAT unless set, and are not rounded on the way: kernels of cuDNN and torch round the\n"
        "exponentials to q's type. O is rounded once, to its own type. Both are row-major unless set.\n"
        "use_padding_mask: rows of sequence b end at seq_len_q[b], columns at seq_len_kv[b], [batch, 1, 1, 1], or\n"
        "where cu_seq_len_q and cu_seq_len_kv, [batch + 1, 1, 1, 1], have the next begin. BOTTOM_RIGHT counts from\n"
        "these ends; what lies beyond is not used. block_mask: a bit, the lowest of a byte first, for each 128 x 128\n"
        "scores, which 0 masks. use_alibi_mask, with a right bound of 0, adds slope * (j - i), slopes as Press et al.\n"
        "2022. paged_attention_k_table [batch, 1, pages, 1] numbers the pages of k [all pages, heads, rows, columns]\n"
        "that make up each sequence, the v table likewise; paged_attention_max_seq_len_kv: rows of the longest.\n"
        "sink_token [1, heads of q, 1, 1]: a score beside those of each row, of which nothing is added to O.\n"
        "dropout: (mask, scale), which exp(score) / sum is multiplied by, or (probability, seed, offset), of which it\n"
        "drops what the op dropout would drop of a tensor of the scores; cuDNN drops others. rng_dump: a tensor of\n"
        "the scores' extents for what that keeps, 1, and drops, 0.\n"
        "score_max, score_sum_exp: tensors for the largest score of each row and the sum of exponentials less it.\n"
        "implementation: what cuDNN's engine asks cuDNN for, AUTO, COMPOSITE or UNIFIED; it has no plan where cuDNN\n"
        "refuses that. Other engines have one implementation, whichever is asked for. unfuse_fma: products and sums\n"
        "of scores are rounded apart, as the reference engine always does. max_total_seq_len_q, max_total_seq_len_kv:\n"
        "bounds of the rows of all sequences together, which change nothing here.",
        inputs=(
            *(_sequences(port) for port in ("q", "k", "v")),
            Port("attn_scale", optional=True),
            Port("bias", optional=True),
            Port("block_mask", optional=True, numbers=True),
            *_PADDED,
            *_DROPPED,
            *(Port(table, optional=True, numbers=True) for table in PAGED.values()),
            _SINK,
        ),
        outputs=(
            _sequences("O"),
            _sequences("Stats", optional=True, dtype=data_type.FLOAT),
            _sequences("score_max", given=True, dtype=data_type.FLOAT),
            _sequences("score_sum_exp", given=True, dtype=data_type.FLOAT),
            _DUMP,
        ),
        tuples={"dropout": (_DROPOUT, ("dropout_mask", "dropout_scale"))},
        infer=_shapes_forward,
        strides=layouts.row_major,
        absent=_absent,
        frozen=_frozen,
        reference=_sdpa,
        attributes=(
            Attribute("is_inference", **_CHOICE),
            Attribute("generate_stats", **_CHOICE),
            *_MASKS,
            Attribute("paged_attention_max_seq_len_kv", **_LENGTH),
            Attribute("stats_use_log2", **_FLAG),
            Attribute("unfuse_fma", **_FLAG),
            *_TOTALS,
            Attribute("implementation", (attention_implementation,), attention_implementation.AUTO),
        ),
        order="by position: q, k, v, attn_scale, bias, block_mask (cuDNN's order differs: give keywords)",
        not_offered=_NOT_OFFERED,
        vjp=NoRule("its gradients are drawn by hand, by sdpa_backward"),
        recomputed=False,
    ),
    Op(
        "sdpa_backward",
        "Gradients of sdpa's q, k and v, [dQ, dK, dV], from that of its O, with sdpa's options and its inputs, O and\n"
        "Stats, of base e. dBias, dSink_token: tensors for the gradients of bias, summed along its axes of extent 1,\n"
        "and of sink_token. dropout: as given to sdpa, or (mask, scale, scale_inv), of which scale_inv is not used.\n"
        "What lies beyond the end of a sequence gets zeros. Scores are made again in the compute data type, and\n"
        "nothing is rounded but the results. use_deterministic_algorithm: what cuDNN's engine asks for; the reference\n"
        "engine always is.",
        inputs=(
            *(_sequences(port) for port in ("q", "k", "v", "o", "dO", "stats")),
            Port("attn_scale", optional=True),
            Port("bias", optional=True),
            *_PADDED,
            *_DROPPED,
            _SINK,
        ),
        outputs=(
            *(_sequences(port) for port in ("dQ", "dK", "dV")),
            *(Port(port, given=True) for port in _GIVEN_GRADIENTS),
            _DUMP,
        ),
        tuples={"dropout": (_DROPOUT, ("dropout_mask", "dropout_scale"), ("dropout_mask", "dropout_scale", ""))},
        infer=_shapes_backward,
        frozen=_frozen_backward,
        reference=_sdpa_backward,
        attributes=(*_MASKS, Attribute("use_deterministic_algorithm", **_FLAG), *_TOTALS),
        order="give what stands behind stats by name",
        not_offered=(
            ("score_mod", None),
            ("score_mod_bprop", None),
        ),
        vjp=NO_SECOND,
        recomputed=False,
    ),
)
