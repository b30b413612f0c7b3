"""Scaled dot product attention."""

from collections.abc import Mapping

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import attention_implementation, diagonal_alignment
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import layouts
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape
from graphfuse.ops.pullback import NoRule


def _shapes(shapes: Mapping[str, Shape], attributes: Attributes, _) -> dict[str, Shape]:
    q, k, v = (shapes[port] for port in ("q", "k", "v"))
    if any(len(s) != 4 for s in (q, k, v)):
        raise GraphValidationError(
            f"q, k and v must be [batch, heads, rows, columns], got {list(q)}, {list(k)} and {list(v)}"
        )
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
    if any(e != 1 for e in shapes.get("attn_scale", ())):
        raise GraphValidationError(f"attn_scale must have one element, got shape {list(shapes['attn_scale'])}")
    scores = (q[0], q[1], q[2], k[2])
    bias = shapes.get("bias", scores)
    if len(bias) != 4 or any(b not in (1, e) for b, e in zip(bias, scores, strict=True)):
        raise GraphValidationError(
            f"bias must have the extents of the scores [batch, heads of q, rows of q, rows of k], {list(scores)}, "
            f"or 1, got {list(bias)}"
        )
    _band(attributes)
    if attributes["generate_stats"] is not None and attributes["generate_stats"] is attributes["is_inference"]:
        same = attributes["generate_stats"]
        raise GraphValidationError(f"generate_stats and is_inference are both {same}; one is the opposite of the other")
    return {"O": (*q[:3], v[3]), "Stats": (*q[:3], 1)}


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


def _frozen(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes with one spelling of the mask, and of the implementation where one is asked for."""
    asked = {"implementation": attributes["implementation"]}
    automatic = attributes["implementation"] is attention_implementation.AUTO
    return {**_band(attributes), "generate_stats": _makes_stats(attributes), **({} if automatic else asked)}


def _sdpa(t, x, a) -> dict[str, object]:
    q = x["q"]
    k, v = (x[port].repeat_interleave(q.shape[1] // x[port].shape[1], dim=1) for port in ("k", "v"))
    scores = t.matmul(q, k.transpose(-1, -2))
    if "attn_scale" in x:
        scores = scores * x["attn_scale"]
    if "bias" in x:
        scores = scores + x["bias"]
    rows, columns = (t.arange(n, device=q.device) for n in scores.shape[-2:])
    # How far to the right of the diagonal a column is.
    beyond = columns - rows[:, None]
    if a["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT:
        beyond = beyond - (scores.shape[-1] - scores.shape[-2])
    for masked in (
        None if a["diagonal_band_right_bound"] is None else beyond > a["diagonal_band_right_bound"],
        None if a["diagonal_band_left_bound"] is None else beyond <= -a["diagonal_band_left_bound"],
    ):
        if masked is not None:
            scores = scores.masked_fill(masked, -float("inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    nothing = largest == -float("inf")
    # Infinity less infinity would be NaN.
    powers = t.exp(scores - t.where(nothing, 0.0, largest))
    total = t.where(nothing, 1.0, powers.sum(dim=-1, keepdim=True))
    return {"O": t.where(nothing, 0.0, t.matmul(powers, v) / total), "Stats": largest + t.log(total)}


_FLAG = {"types": (bool,), "default": False}
_CHOICE = {"types": (bool, type(None))}
_LENGTH = {"types": (int, type(None))}

_NOT_OFFERED = (
    ("block_mask", None),
    ("use_alibi_mask", False),
    ("use_padding_mask", False),
    ("seq_len_q", None),
    ("seq_len_kv", None),
    ("cu_seq_len_q", None),
    ("cu_seq_len_kv", None),
    ("max_total_seq_len_q", None),
    ("max_total_seq_len_kv", None),
    ("dropout", None),
    ("rng_dump", None),
    ("paged_attention_k_table", None),
    ("paged_attention_v_table", None),
    ("paged_attention_max_seq_len_kv", None),
    ("score_mod", None),
    ("score_max", None),
    ("score_sum_exp", None),
    ("sink_token", None),
    ("kv_mask", None),
    ("unfuse_fma", False),
    ("stats_use_log2", False),
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
        "implementation: what cuDNN's engine asks cuDNN for, AUTO, COMPOSITE or UNIFIED; it has no plan where cuDNN\n"
        "refuses that. Other engines have one implementation, whichever is asked for.",
        inputs=(Port("q"), Port("k"), Port("v"), Port("attn_scale", optional=True), Port("bias", optional=True)),
        outputs=(Port("O"), Port("Stats", optional=True, dtype=data_type.FLOAT)),
        infer=_shapes,
        strides=layouts.row_major,
        absent=_absent,
        frozen=_frozen,
        reference=_sdpa,
        attributes=(
            Attribute("is_inference", **_CHOICE),
            Attribute("generate_stats", **_CHOICE),
            Attribute("use_causal_mask", **_FLAG),
            Attribute("use_causal_mask_bottom_right", **_FLAG),
            Attribute("sliding_window_length", **_LENGTH),
            Attribute("diagonal_alignment", (diagonal_alignment,), diagonal_alignment.TOP_LEFT),
            Attribute("diagonal_band_left_bound", **_LENGTH),
            Attribute("diagonal_band_right_bound", **_LENGTH),
            Attribute("implementation", (attention_implementation,), attention_implementation.AUTO),
        ),
        order="by position: q, k, v, attn_scale, bias, is_inference (cuDNN's order differs: give keywords)",
        not_offered=_NOT_OFFERED,
        vjp=NoRule("sdpa_backward, which makes the gradients of attention, is not offered"),
        recomputed=False,
    ),
)
