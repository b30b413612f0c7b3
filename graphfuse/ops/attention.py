"""Scaled dot product attention and its gradients. A mask is a predicate over (row, column) of the scores."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import attention_by_nodes
from graphfuse.ops.attention_options import (
    BACKWARD,
    DROPPED,
    DUMP,
    FORWARD,
    GIVEN,
    MASKS,
    PADDED,
    PAGES,
    SINK,
    STATS,
    TOTALS,
    TUPLES,
    attended,
    backward,
    forward,
    sequences,
)
from graphfuse.ops.op import Attributes, Port, Shape
from graphfuse.ops.pullback import NUMBERS, NoRule, Pullback
from graphfuse.ops.scores import PAGED, Scores, scored, within


@dataclass(frozen=True)
class SoftmaxParts:
    """Intermediate values of a softmax of scores. Rows may be fully masked.

    largest: largest score of each row. nothing: whether it is -infinity. powers: exp(score - largest). summed: their
    sum per row; 0 if fully masked. total: the same, but 1 if fully masked.
    """

    largest: object
    nothing: object
    powers: object
    summed: object
    total: object


def softmax_parts(t, s: Scores) -> SoftmaxParts:
    largest = s.scaled.amax(dim=-1, keepdim=True)
    if s.sink is not None:
        largest = t.maximum(largest, s.sink)
    nothing = largest == -float("inf")
    # -infinity - -infinity would be NaN.
    finite = t.where(nothing, 0.0, largest)
    powers = t.exp(s.scaled - finite)
    summed = powers.sum(dim=-1, keepdim=True)
    if s.sink is not None:
        summed = summed + t.exp(s.sink - finite)
    return SoftmaxParts(largest, nothing, powers, summed, t.where(nothing, 1.0, summed))


def statistics(t, a, s: Scores, soft: SoftmaxParts) -> dict[str, object]:
    """Outputs other than O."""
    stats = soft.largest + t.log(soft.total)
    return {
        "Stats": stats * math.log2(math.e) if a.get("stats_use_log2") else stats,
        "score_max": soft.largest,
        "score_sum_exp": soft.summed,
        **_dumped(s.kept),
    }


def kept(s: Scores, values):
    """Values times the factors of dropout."""
    return values if s.kept is None else values * s.kept


def _sdpa(t, x, a) -> dict[str, object]:
    s = scored(t, x, a)
    soft = softmax_parts(t, s)
    made = t.matmul(kept(s, soft.powers), s.v) / soft.total
    return {"O": t.where(soft.nothing, 0.0, made), **statistics(t, a, s, soft)}


def _dumped(kept) -> dict[str, object]:
    """The output rng_dump: 1 for elements that dropout keeps, else 0."""
    return {} if kept is None else {"rng_dump": (kept != 0).to(kept.dtype)}


def shapes_backward(shapes: Mapping[str, Shape], attributes: Attributes, wanted, o: str = "o") -> dict[str, Shape]:
    """Shapes of a backward's outputs. o: the port of the forward's output O."""
    made = attended(shapes, attributes, wanted)
    losses = [port for port in ("dO", "dO_T", "dO_f16") if port in shapes]
    for port, extents in ((o, made["O"]), *((loss, made["O"]) for loss in losses), ("stats", made["Stats"])):
        if shapes[port] != extents:
            raise GraphValidationError(f"{port} must be {list(extents)}, as sdpa makes it, got {list(shapes[port])}")
    for port, of in _GIVEN_GRADIENTS.items():
        if port in wanted and of not in shapes:
            raise GraphValidationError(f"{port} is given without {of}, whose gradient it is")
    given = {port: shapes[of] for port, of in _GIVEN_GRADIENTS.items() if of in shapes}
    return {"dQ": shapes["q"], "dK": shapes["k"], "dV": shapes["v"], **given, "rng_dump": made["rng_dump"]}


_GIVEN_GRADIENTS = {"dBias": "bias", "dSink_token": "sink_token"}


@dataclass(frozen=True)
class NarrowOperands:
    """Replacements of operands of gradients by values that are rounded to a narrow type.

    p, ds: rounding of probabilities, and of scaled gradients of scores.
    over_rows: replacements of q, k and dO in products over rows, quantized along rows.
    inner: replacements of o and dO in the sum of their products.
    """

    p: Callable[[object], object] = lambda values: values
    ds: Callable[[object], object] = lambda values: values
    over_rows: Mapping[str, object] = field(default_factory=dict)
    inner: Mapping[str, object] = field(default_factory=dict)


def gradients(t, x, a, narrowed: NarrowOperands = NarrowOperands()) -> dict[str, object]:  # noqa: B008 - it never changes
    """Outputs of a backward by port, and "dS", the gradients of scores times attn_scale."""
    s = scored(t, x, a)
    rows = scored(t, {**x, **narrowed.over_rows}, a) if narrowed.over_rows else s
    stats, nothing = x["stats"], x["stats"] == -float("inf")
    # Rows beyond a sequence's end attend to nothing, whatever their memory holds.
    nothing = nothing if s.rows is None else nothing | ~s.rows
    finite = t.where(nothing, 0.0, stats)
    p = t.where(nothing, 0.0, t.exp(s.scaled - finite))
    loss, of_rows = (within(t, of["dO"], s.rows) for of in (x, {**x, **narrowed.over_rows}))
    read = {**x, **narrowed.inner}
    inner = (within(t, read["dO"], s.rows) * within(t, read["o"], s.rows)).sum(dim=-1, keepdim=True)
    of_scores = p * (kept(s, t.matmul(loss, s.v.transpose(-1, -2))) - inner)
    scaled = of_scores * x["attn_scale"] if "attn_scale" in x else of_scores
    ds = narrowed.ds(scaled)
    made = {
        "dS": scaled,
        "dQ": t.matmul(ds, rows.k),
        "dK": sum_shared_heads(t.matmul(ds.transpose(-1, -2), rows.q), x["k"]),
        "dV": sum_shared_heads(t.matmul(narrowed.p(kept(s, p)).transpose(-1, -2), of_rows), x["v"]),
    }
    if "bias" in x:
        made["dBias"] = of_scores.sum_to_size(x["bias"].shape)
    if s.sink is not None:
        sunk = t.where(nothing, 0.0, t.exp(s.sink - finite))
        made["dSink_token"] = -(sunk * inner).sum_to_size(x["sink_token"].shape)
    return made | _dumped(s.kept)


def sum_shared_heads(grad, of):
    """The sum over the heads of q that share a head of k or v."""
    return grad.unflatten(1, (of.shape[1], -1)).sum(dim=2)


_LEARNED = ("q", "k", "v")


def _gradient(port: str, p: Pullback):
    if "O" not in p.grads or len(p.grads) > 1:
        return NoRule("sdpa_backward has that of O alone, and of no statistics")
    if not p.given.isdisjoint(PAGED.values()):
        return NoRule("sdpa_backward has none of keys and values in pages")
    return dict(zip(_LEARNED, p.once(_all_gradients), strict=True))[port]


def _all_gradients(p: Pullback):
    names = {a.name for a in (*MASKS, *TOTALS)} & p.attributes.keys()
    o = p["O"]

    def rounded(t):
        """`t` in the type of O, as attention kernels read it, so that scores are those of the statistics."""
        narrow = t.get_is_virtual() and o.get_data_type().bits <= 16
        return p.graph.identity(t).set_data_type(o.get_data_type()) if narrow else t

    read = {port: p[port] for port in sorted(p.given)}
    read |= {port: rounded(read[port]) for port in _LEARNED}
    read |= {"o": o, "dO": rounded(p.whole("O")), "stats": p["Stats"]}
    return p.graph.sdpa_backward(**read, **{name: p.attributes[name] for name in names})


NOT_OFFERED = {
    "kv_mask": (None, "a bias of 0 and -infinity, [batch, 1, 1, rows of k], which masks columns"),
    "softmax_precision": (None, "compute_data_type, which exponentials are in: FLOAT unless set"),
    "attn_scale_prefolded": (False, "attn_scale=math.log(2), with which exponentials of base e are those of base 2"),
}

TABLE = (
    forward(
        "sdpa",
        "Attention of q [batch, heads, rows, columns] to k and v (Vaswani et al. 2017, equation 1):\n"
        "O = softmax(attn_scale * q k^T + bias) v. Heads of k and v must divide those of q: head h of q attends to\n"
        "head h / (heads of q / heads of k), so one serves several (grouped and multi-query attention). attn_scale,\n"
        "a number or a tensor of one element, is 1 by default; bias has the extents of the scores or 1.\n"
        "Row i attends to column j if i - diagonal_band_left_bound < j <= i + diagonal_band_right_bound; a bound of\n"
        "None is no bound. With diagonal_alignment BOTTOM_RIGHT i counts from rows of k - rows of q.\n"
        "use_causal_mask is TOP_LEFT with right bound 0, use_causal_mask_bottom_right BOTTOM_RIGHT with it,\n"
        "sliding_window_length the left bound. A row that attends to nothing is 0, and -infinity in Stats.\n"
        "Returns [O, Stats]; Stats, FLOAT unless set, is the log-sum-exp of each row's scores, written with\n"
        "generate_stats=True, or is_inference=False, else None. Scores, their exponentials and sums are in the\n"
        "compute data type, FLOAT unless set, and are not rounded in between: kernels of cuDNN and torch round the\n"
        "exponentials to q's type. O is rounded once, to its own type. Both are row-major unless set.\n"
        "use_padding_mask: rows of sequence b end at seq_len_q[b], columns at seq_len_kv[b], [batch, 1, 1, 1], or\n"
        "sequences begin at cu_seq_len_q and cu_seq_len_kv, [batch + 1, 1, 1, 1] or [batch + 1]. BOTTOM_RIGHT counts\n"
        "from these ends; memory beyond them is not used. block_mask: a bit for each 128 x 128 scores, the lowest of\n"
        "a byte first; 0 masks them. use_alibi_mask, with a right bound of 0, adds slope * (j -\n"
        "i), slopes as Press et al. 2022. paged_attention_k_table [batch, 1, pages, 1] numbers the pages of k [all\n"
        "pages, heads, rows, columns] that make up each sequence, the v table likewise;\n"
        "paged_attention_max_seq_len_kv: rows of the longest. The numbers of a sequence may begin at a ragged offset\n"
        "of the table.\n"
        "sink_token [1, heads of q, 1, 1]: an additional score of each row, without a value that is added to O.\n"
        "dropout: (mask, scale), by which exp(score) / sum is multiplied, or (probability, seed, offset), with which\n"
        "it drops the same elements as the op dropout of the scores; cuDNN drops others. rng_dump: a tensor of the\n"
        "scores' extents for 1 where an element is kept, and 0 where it is dropped.\n"
        "score_max, score_sum_exp: tensors for the largest score of each row, and the sum of exp(score - largest).\n"
        "implementation: which one cuDNN's engine requests, AUTO, COMPOSITE or UNIFIED; it has no plan if cuDNN\n"
        "rejects it. Other engines have one implementation, whatever the value. unfuse_fma: products and sums of\n"
        "scores are rounded separately, as the reference engine always does. max_total_seq_len_q,\n"
        "max_total_seq_len_kv: bounds of the rows of all sequences together, without effect here.\n"
        "score_mod: a function (graph, scores) -> tensor, which adds nodes between q k^T, scaled and with the bias,\n"
        "and softmax. Attention is then built from separate nodes. The result of softmax is rounded to q's type, if\n"
        "that has 16 bits. Of other options, only attn_scale, bias and Stats are accepted with it.",
        inputs=(
            *(sequences(port) for port in ("q", "k", "v")),
            Port("attn_scale", optional=True),
            Port("bias", optional=True),
            Port("block_mask", optional=True, numbers=True, types=(data_type.UINT8, data_type.INT8)),
            *PADDED,
            *DROPPED,
            *PAGES,
            SINK,
        ),
        outputs=(
            sequences("O"),
            STATS,
            *GIVEN,
        ),
        tuples=TUPLES,
        infer=attended,
        reference=_sdpa,
        attributes=FORWARD,
        order="by position: q, k, v, attn_scale, bias, block_mask (cuDNN's order differs: give keywords)",
        functions=("score_mod",),
        by_nodes=attention_by_nodes.forward,
        not_offered=NOT_OFFERED,
        training={"generate_stats": True, "is_inference": None},
        vjp={
            **{port: partial(_gradient, port) for port in _LEARNED},
            **dict.fromkeys(("bias", "sink_token"), NoRule("sdpa_backward writes it, into a tensor that it is given")),
            **dict.fromkeys(("attn_scale", *(port.name for port in DROPPED)), NoRule("it is a constant of a model")),
            **dict.fromkeys(("block_mask", *(port.name for port in (*PADDED, *PAGES))), NUMBERS),
        },
    ),
    backward(
        "sdpa_backward",
        "Gradients of sdpa's q, k and v, [dQ, dK, dV], from that of its O, with sdpa's options and its inputs, O and\n"
        "Stats, of base e. dBias, dSink_token: tensors for the gradients of bias, summed along its axes of extent 1,\n"
        "and of sink_token. dropout: as in sdpa, or (mask, scale, scale_inv), of which scale_inv is not used.\n"
        "Gradients beyond the end of a sequence are zero. Scores are recomputed in the compute data type, and only\n"
        "results are rounded. use_deterministic_algorithm: what cuDNN's engine requests; the reference engine always\n"
        "is deterministic. score_mod as in sdpa, and with it score_mod_bprop, a function (graph, gradient of\n"
        "score_mod's result) -> gradient of its scores, which may read tensors that score_mod made.",
        inputs=(
            *(sequences(port) for port in ("q", "k", "v", "o", "dO", "stats")),
            Port("attn_scale", optional=True),
            Port("bias", optional=True),
            *PADDED,
            *DROPPED,
            SINK,
        ),
        outputs=(
            *(sequences(port) for port in ("dQ", "dK", "dV")),
            *(Port(port, given=True) for port in _GIVEN_GRADIENTS),
            DUMP,
        ),
        infer=shapes_backward,
        reference=gradients,
        attributes=BACKWARD,
        order="give the arguments after stats by name",
        functions=("score_mod", "score_mod_bprop"),
        by_nodes=attention_by_nodes.backward,
    ),
)
