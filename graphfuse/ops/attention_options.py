"""Options that all attention ops share: their ports, attributes and shape rules, and their canonical form in frozen
nodes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import attention_implementation, diagonal_alignment
from graphfuse.base.errors import GraphValidationError, VariantPackError
from graphfuse.ops import layouts, shapes
from graphfuse.ops.op import Attribute, Attributes, Op, Port, Shape, integers
from graphfuse.ops.pullback import NO_SECOND
from graphfuse.ops.scores import PAGED, TILE, whole_sequences


def attended(given: Mapping[str, Shape], attributes: Attributes, wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of a forward's outputs, which a backward has as inputs."""
    attributes = _full(attributes)
    read = q, k, v = tuple(given[port] for port in ("q", "k", "v"))
    if any(len(s) != 4 for s in read):
        raise GraphValidationError(
            f"q, k and v must be [batch, heads, rows, columns], got {list(q)}, {list(k)} and {list(v)}"
        )
    k, v = whole_sequences(given, attributes)
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
    shapes.check_scalars(given, ("attn_scale", "dropout_seed", "dropout_offset", "dropout_scale"))
    tiles = batch, heads, -(-rows // TILE), -(-columns // (8 * TILE))
    lengths, offsets = ((batch, 1, 1, 1),), ((batch + 1, 1, 1, 1), (batch + 1,))
    for port, extents, of in (
        ("bias", scores, "the scores [batch, heads of q, rows of q, rows of k]"),
        ("dropout_mask", scores, "the scores [batch, heads of q, rows of q, rows of k]"),
        ("block_mask", tiles, f"[batch, heads of q, tiles of {TILE} rows of q, bytes of 8 tiles of rows of k]"),
    ):
        s = given.get(port, extents)
        if len(s) != 4 or any(b not in (1, e) for b, e in zip(s, extents, strict=True)):
            raise GraphValidationError(f"{port} must have the extents of {of}, {list(extents)}, or 1, got {list(s)}")
    for port, exact in (
        ("seq_len_q", lengths),
        ("seq_len_kv", lengths),
        ("sink_token", ((1, heads, 1, 1),)),
        ("cu_seq_len_q", offsets),
        ("cu_seq_len_kv", offsets),
    ):
        if given.get(port, exact[0]) not in exact:
            accepted = " or ".join(str(list(extents)) for extents in exact)
            raise GraphValidationError(f"{port} must be {accepted}, got {list(given[port])}")
    _check_lengths(given, attributes)
    _check_dropout(given, attributes)
    right = _band(attributes)["diagonal_band_right_bound"]
    if attributes["use_alibi_mask"] and right != 0:
        raise GraphValidationError("use_alibi_mask needs a causal mask: diagonal_band_right_bound=0")
    for name in ("max_total_seq_len_q", "max_total_seq_len_kv"):
        if attributes[name] is not None and attributes[name] < 1:
            raise GraphValidationError(f"{name} is {attributes[name]}; accepted: None and integers >= 1")
    if "rng_dump" in wanted and attributes["dropout_probability"] is None:
        raise GraphValidationError("rng_dump is given without dropout=(probability, seed, offset), which generates it")
    if attributes["generate_stats"] is not None and attributes["generate_stats"] is attributes["is_inference"]:
        same = attributes["generate_stats"]
        raise GraphValidationError(f"generate_stats and is_inference are both {same}; one is the opposite of the other")
    stats = dict.fromkeys(("Stats", "score_max", "score_sum_exp"), (*q[:3], 1))
    return {"O": (*q[:3], v[3]), **stats, "rng_dump": scores}


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


def check_numbers(x: Mapping[str, Any], attributes: Attributes, room: Mapping[str, Sequence[int]]) -> None:
    """Raises VariantPackError for lengths, page numbers or ragged offsets in memory that do not fit the tensors.

    room: rows of each batch, by ragged port."""
    whole = whole_sequences({port: tuple(value.shape) for port, value in x.items()}, attributes)
    ends = {}
    for of, rows, what in (("q", x["q"].shape[2], "q"), ("kv", whole[0][2], "k and v")):
        port = next((p for p in (f"seq_len_{of}", f"cu_seq_len_{of}") if p in x), None)
        if port is None:
            continue
        numbers = x[port].flatten()
        ends[of] = (numbers.diff() if port.startswith("cu") else numbers).tolist()
        if any(not 0 <= end <= rows for end in ends[of]):
            accepted = f"numbers that ascend by 0 to {rows}" if port.startswith("cu") else f"0 to {rows}"
            raise VariantPackError(f"{port} is {numbers.tolist()}; accepted: {accepted}, the rows of {what}")
    pages = {table: [-(-end // x[port].shape[2]) for end in ends["kv"]] for port, table in PAGED.items() if table in x}
    for port, rows in room.items():
        of = "kv" if port.removeprefix("d")[0] in "kKvV" else "q"
        needed, what = (pages[port], "pages") if port in pages else (ends[of], "rows")
        if any(most > there for most, there in zip(needed, rows, strict=True)):
            raise VariantPackError(f"{port} has room for {list(rows)} {what} by its ragged offsets; needed: {needed}")
    for port, table in PAGED.items():
        most = x[port].shape[0]
        for b, count in enumerate(pages.get(table, ())):
            numbers = x[table][b, 0, :count, 0].tolist()
            if any(not 0 <= number < most for number in numbers):
                raise VariantPackError(
                    f"{table} has the pages {numbers} for sequence {b}; accepted: 0 to {most - 1}, those of {port}"
                )


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
    """Attributes of the diagonal, and of the band around it that rows attend to; a bound is None if unlimited."""
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


def makes_stats(attributes: Attributes) -> bool:
    wanted, unwanted = attributes["generate_stats"], attributes.get("is_inference")
    return wanted if wanted is not None else unwanted is False


def absent(attributes: Attributes, inputs: frozenset[str]) -> frozenset[str]:
    return frozenset() if makes_stats(attributes) else frozenset({"Stats"})


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
"""Attributes that frozen nodes have only if they differ from these defaults."""


def frozen_backward(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    """Attributes in canonical form: the mask as a band, other options only if not default."""
    attributes = _full(attributes)
    found = {n: attributes[n] for n, default in _UNSAID.items() if attributes.get(n, default) != default}
    return {**_band(attributes), **found}


def frozen_forward(attributes: Attributes, inputs: Mapping[str, Shape], outputs) -> dict[str, object]:
    return {**frozen_backward(attributes, inputs, outputs), "generate_stats": makes_stats(attributes)}


_FLAG = {"types": (bool,), "default": False}
_CHOICE = {"types": (bool, type(None))}
_LENGTH = {"types": (int, type(None))}

MASKS = (
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

GENERATE_STATS = Attribute("generate_stats", **_CHOICE)

_UNSET = {a.name: a.default for a in (*MASKS, GENERATE_STATS)} | {"is_inference": None}

NAMES = {
    "sliding_window": "sliding_window_length",
    "left_bound": "diagonal_band_left_bound",
    "right_bound": "diagonal_band_right_bound",
}
"""cuDNN's names of attributes of FP8 attention -> their names in sdpa."""


def _full(attributes: Attributes) -> Attributes:
    """Attributes of any attention op with sdpa's names, and defaults for those that it lacks."""
    return _UNSET | {NAMES.get(name, name): value for name, value in attributes.items()}


sequences = partial(Port, ragged="use_padding_mask")

PADDED = tuple(integers(port, optional=True) for port in ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv"))

PAGES = tuple(integers(table, optional=True, ragged="use_padding_mask") for table in PAGED.values())

DROPPED = (
    Port("dropout_seed", optional=True, numbers=True),
    Port("dropout_offset", optional=True, numbers=True),
    Port("dropout_mask", optional=True),
    Port("dropout_scale", optional=True),
)

SINK = Port("sink_token", optional=True)

STATS = sequences("Stats", optional=True, dtype=data_type.FLOAT)

DUMP = Port("rng_dump", given=True, dtype=data_type.FLOAT)

GIVEN = (*(sequences(port, given=True, dtype=data_type.FLOAT) for port in ("score_max", "score_sum_exp")), DUMP)
"""Outputs of a forward for which users give tensors."""

_MASKED = ("dropout_mask", "dropout_scale")
TUPLES = {"dropout": (("dropout_probability", "dropout_seed", "dropout_offset"), _MASKED)}
TUPLES_BACKWARD = {"dropout": (*TUPLES["dropout"], (*_MASKED, ""))}

TOTALS = tuple(Attribute(name, **_LENGTH) for name in ("max_total_seq_len_q", "max_total_seq_len_kv"))

HOW = (
    Attribute("unfuse_fma", **_FLAG),
    *TOTALS,
    Attribute("implementation", (attention_implementation,), attention_implementation.AUTO),
)
"""Attributes of a forward that affect only its implementation."""

FORWARD = (
    Attribute("is_inference", **_CHOICE),
    GENERATE_STATS,
    *MASKS,
    Attribute("paged_attention_max_seq_len_kv", **_LENGTH),
    Attribute("stats_use_log2", **_FLAG),
    *HOW,
)

BACKWARD = (*MASKS, Attribute("use_deterministic_algorithm", **_FLAG), *TOTALS)

forward = partial(
    Op, strides=layouts.row_major, absent=absent, frozen=frozen_forward, check=check_numbers, may_recompute=False
)
backward = partial(
    Op, tuples=TUPLES_BACKWARD, frozen=frozen_backward, check=check_numbers, vjp=NO_SECOND, may_recompute=False
)
