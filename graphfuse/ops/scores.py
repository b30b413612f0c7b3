"""Scores of attention: masks from options and tensors, and the input of softmax."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphfuse.base.enums import diagonal_alignment
from graphfuse.base.errors import GraphValidationError
from graphfuse.ops import references
from graphfuse.ops.op import Attributes, Shape

TILE = 128
"""Rows and columns of the tile that one bit of block_mask stands for."""

PAGED = {"k": "paged_attention_k_table", "v": "paged_attention_v_table"}


def whole_sequences(shapes: Mapping[str, Shape], attributes: Attributes) -> list[Shape]:
    """Shapes of k and v, assembled from pages if they have a page table."""
    most = attributes.get("paged_attention_max_seq_len_kv")
    paged = [port for port, table in PAGED.items() if table in shapes]
    if not paged and most is not None:
        raise GraphValidationError("paged_attention_max_seq_len_kv is given without a page table of k or v")
    whole = [shapes[port][2] for port in PAGED if port not in paged]
    found = []
    for port, name in PAGED.items():
        pages, heads, rows, columns = shapes[port]
        if port not in paged:
            found.append(shapes[port])
            continue
        table = shapes[name]
        if len(table) != 4 or table[1] != 1 or table[3] != 1 or table[0] != shapes["q"][0]:
            raise GraphValidationError(
                f"{name} must be [{shapes['q'][0]}, 1, pages of a sequence, 1], got {list(table)}"
            )
        if not pages:
            raise GraphValidationError(f"{port} {list(shapes[port])} has no pages; at least 1 is needed")
        held = table[2] * rows
        length = most if most is not None else min([held, *whole])
        if not 0 < length <= held:
            raise GraphValidationError(
                f"{name} {list(table)} has room for {held} rows of {port}, in pages of {rows}; "
                f"paged_attention_max_seq_len_kv asks for {length}"
            )
        found.append((table[0], heads, length, columns))
    return found


@dataclass(frozen=True)
class Scores:
    """Scores of attention, and the tensors that they are computed from.

    q, k, v: with as many heads of k and v as of q, and zeros beyond each sequence's end.
    scaled: the input of softmax, with scale, bias and masks; -infinity if masked.
    kept: factors of dropout; None without it.
    rows: whether a row is within its sequence; None for all.
    sink: an additional score of each row; None without it.
    """

    q: object
    k: object
    v: object
    scaled: object
    kept: object
    rows: object
    sink: object


def lengths(x, of: str):
    """Lengths of the sequences of q or kv, [batch, 1, 1, 1]; None without padding."""
    if f"cu_seq_len_{of}" in x:
        return x[f"cu_seq_len_{of}"].long().flatten().diff().reshape(-1, 1, 1, 1)
    return x[f"seq_len_{of}"].long() if f"seq_len_{of}" in x else None


def within(t, values, inside):
    """Values of the rows within each sequence, and zeros beyond."""
    # Memory beyond a sequence may hold NaN, which a product with zero would keep.
    return values if inside is None else t.where(inside, values, 0.0)


def _paged(t, pages, table, length: int):
    """Rows of each sequence, page by page. Entries of the table beyond a sequence are arbitrary."""
    found = pages[table[:, 0, :, 0].long().clamp(0, pages.shape[0] - 1)]
    return found.movedim(2, 1).flatten(2, 3)[:, :, :length]


@dataclass(frozen=True)
class ScoreMasks:
    """Masks of scores, which broadcast with them. A score counts if it is True in all masks.

    rows, columns: whether they are within their sequence, [batch, 1, n, 1] each; None for all.
    scores: a mask for each further option.
    """

    rows: object
    columns: object
    scores: tuple[object, ...]

    @property
    def of_columns(self) -> list[object]:
        """All masks but that of rows."""
        return [*(() if self.columns is None else (self.columns.transpose(-1, -2),)), *self.scores]

    @property
    def all(self) -> list[object]:
        """All masks."""
        return [*(() if self.rows is None else (self.rows,)), *self.of_columns]


def score_masks(t, x, a, q, columns: int) -> ScoreMasks:
    """Masks of scores, from the options `a` and the tensors of lengths and tiles in `x`."""
    rows, others = t.arange(q.shape[2], device=q.device)[:, None], t.arange(columns, device=q.device)
    ends = [lengths(x, of) for of in ("q", "kv")]
    inside, reached = (None if end is None else n < end for n, end in zip((rows, others[:, None]), ends, strict=True))
    # How far to the right of the diagonal a column is.
    beyond = others - rows
    if a["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT:
        beyond = beyond - (columns - q.shape[2] if ends[0] is None else ends[1] - ends[0])
    left, right = a["diagonal_band_left_bound"], a["diagonal_band_right_bound"]
    shown = (
        None if right is None else beyond <= right,
        None if left is None else beyond > -left,
        _tiles(t, x["block_mask"], rows // TILE, others // TILE) if "block_mask" in x else None,
    )
    return ScoreMasks(inside, reached, tuple(mask for mask in shown if mask is not None))


def gathered(t, x, a) -> list[object]:
    """k and v, assembled from pages if they have page tables."""
    shapes = {port: tuple(value.shape) for port, value in x.items()}
    sequences = zip(PAGED.items(), whole_sequences(shapes, a), strict=True)
    return [_paged(t, x[port], x[table], shape[2]) if table in x else x[port] for (port, table), shape in sequences]


def scored(t, x, a) -> Scores:
    q, (k, v) = x["q"], gathered(t, x, a)
    shown = score_masks(t, x, a, q, k.shape[2])
    q = within(t, q, shown.rows)
    k, v = (within(t, s, shown.columns).repeat_interleave(q.shape[1] // s.shape[1], dim=1) for s in (k, v))
    scores = t.matmul(q, k.transpose(-1, -2))
    if "attn_scale" in x:
        scores = scores * x["attn_scale"]
    if "bias" in x:
        scores = scores + x["bias"]
    if a.get("use_alibi_mask"):
        rows, columns = (t.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
        scores = scores + _slopes(t, q) * (columns - rows[:, None])
    for mask in shown.all:
        scores = scores.masked_fill(~mask, -float("inf"))
    sink = x.get("sink_token")
    if sink is not None and shown.rows is not None:
        sink = t.where(shown.rows, sink, -float("inf"))
    return Scores(q, k, v, scores, _kept(t, x, a, scores), shown.rows, sink)


def _slopes(t, q):
    """ALiBi's slope of each head (Press et al. 2022). Heads beyond the largest power of two have intermediate ones."""
    heads = q.shape[1]
    whole = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return t.tensor(slopes, dtype=q.dtype, device=q.device)[:, None, None]


def _tiles(t, mask, rows, columns):
    """The bit of each score's tile; the lowest bit of a byte is the first."""
    bytes_of = mask.long()[
        :, :, rows if mask.shape[2] > 1 else rows * 0, columns // 8 if mask.shape[3] > 1 else columns * 0
    ]
    return (bytes_of >> (columns % 8)) & 1 == 1


def _kept(t, x, a, scores):
    if "dropout_mask" in x:
        return x["dropout_mask"] * x["dropout_scale"]
    probability = a.get("dropout_probability")
    if probability is None:
        return None
    before = math.prod(scores.shape[:-1])
    rows = t.arange(before, device=scores.device).reshape(*scores.shape[:-1], 1)
    columns = t.arange(scores.shape[-1], device=scores.device)
    key = (x[port].reshape(()) for port in ("dropout_seed", "dropout_offset"))
    drawn = references.random_uniform(t, *key, rows, columns)
    return (drawn >= probability).to(scores.dtype) / (1 - probability)
