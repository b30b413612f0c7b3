"""RMSNorm and rotary position embedding of queries and keys, in one kernel."""

from collections.abc import Mapping

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.norms import QK_OUT, of_keys
from graphfuse.functional.tensor_parameter import (
    FLOAT,
    FLOATS,
    FORMATS,
    INTEGERS,
    Rule,
    Shape,
    TensorParameter,
    Types,
    columns_of_heads,
    columns_or_heads,
    like,
    one,
)
from graphfuse.op_graph.tensor import Tensor


def of_tokens(name: str) -> Rule:
    """One value per token: the dimensions of another argument without heads and columns."""
    return lambda shapes: (shapes[name][:-2],)


def _of_keys(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    if len(shapes["q"]) < 2:
        raise VariantPackError(f"q has shape {tuple(shapes['q'])}; accepted: (..., heads, head_dim)")
    return of_keys(shapes)


def _angles(of: str) -> Rule:
    """Rows of cosines followed by sines, for at most all pairs of a head's columns."""

    def rule(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        found, width = tuple(shapes["cos_sin_cache"]), shapes[of][-1]
        if len(found) == 2 and found[1] % 2 == 0 and 2 <= found[1] <= width:
            return (found,)
        raise VariantPackError(
            f"cos_sin_cache has shape {found}; accepted: (positions, rotary_dim), rotary_dim even and 2 to {width}, "
            f"the last dimension of {of}"
        )

    return rule


def angle_parameters(of: str, types: Types = FLOATS) -> tuple[TensorParameter, TensorParameter]:
    """Parameters of cosines and sines by position, and of the position of each token of another argument."""
    table = TensorParameter("cos_sin_cache", types, _angles(of), free=True, table=True)
    return table, TensorParameter("positions", INTEGERS, of_tokens(of))


def angles(d: GraphBuilder) -> tuple[Tensor, Tensor]:
    """The cosines and the sines of the tokens' positions."""
    name = "cos_sin_cache"
    table, positions, pairs = d.table(name), d.of_tokens("positions"), d.layouts[name].shape[1] // 2
    whole = (slice(None),) * (d.rank - 1)
    halves = (d.graph.slice(table, [*whole, part]) for part in (slice(0, pairs), slice(pairs, 2 * pairs)))
    cos, sin = (d.graph.gather_rows(half, positions) for half in halves)
    return cos, sin


def heads(d: GraphBuilder, x: Tensor, first: int, end: int) -> Tensor:
    """Heads `first` to `end` - 1 of a tensor."""
    between = slice(None)
    return d.graph.slice(x, [*(between,) * (d.rank - 2), slice(first, end), between])


def _pages(name: str, of: str = "k") -> Rule:
    """Slots for a token's heads, in pages or not; pages follow each other like slots."""

    def rule(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
        found, heads = tuple(shapes[name]), tuple(shapes[of][-2:])
        if len(found) in (3, 4) and found[-2:] == heads and 0 not in found:
            return (found,)
        raise VariantPackError(
            f"{name} has shape {found}; accepted: (slots, *{heads}) or (pages, page_size, *{heads}), the heads and "
            f"columns of {of}"
        )

    return rule


def _joined_pages(d: GraphBuilder, name: str) -> None:
    t = d.layouts[name]
    page = t.shape[1] * t.stride[1]
    if len(t.shape) == 4 and t.shape[0] > 1 and t.stride[0] != page:
        raise VariantPackError(
            f"{name} has shape {t.shape} and stride {t.stride}; accepted: a stride of {page} between "
            "pages, so that slots are equally spaced across pages"
        )


def joined_heads(d: GraphBuilder) -> Tensor:
    """The heads of queries, then those of keys."""
    return d.graph.join(d["q"], d["k"], d.rank - 2)


def heads_of(d: GraphBuilder, x: Tensor, name: str) -> Tensor:
    """The heads of `joined_heads` that belong to the argument `name`, q or k."""
    queries, keys = (d.layouts[name].shape[-2] for name in "qk")
    return heads(d, x, 0, queries) if name == "q" else heads(d, x, queries, queries + keys)


def have_weights(d: GraphBuilder) -> bool:
    """True if both have weights, False if none has. Raises VariantPackError if only one has."""
    given = [name in d for name in ("q_weight", "k_weight")]
    if given[0] != given[1]:
        missing, there = sorted(("q_weight", "k_weight"), key=lambda name: name in d)
        raise VariantPackError(f"{missing} is None and {there} is a tensor; accepted: tensors for both, or for none")
    return all(given)


def weighted_and_rotated(d: GraphBuilder, normal: Tensor) -> Tensor:
    """The normalized heads of q and k, times their weights if these are given, and rotated."""
    if have_weights(d):
        weights = (d.for_heads(f"{name}_weight", d.layouts[name].shape[-2]) for name in "qk")
        normal = d.graph.mul(normal, d.graph.join(*weights, d.rank - 2))
    return rotated(d, normal)


def rotated(d: GraphBuilder, x: Tensor) -> Tensor:
    """Rotation of pairs of columns by the angles of their tokens. is_neox determines the pairs."""
    return d.graph.rotate_pairs(x, *angles(d), interleaved=not d.options["is_neox"])


def build_per_head(d: GraphBuilder) -> None:
    """Builds both results, and the inverse RMS of each head if that is an argument."""
    y, *inverse_rms = d.training_norm(joined_heads(d)) if "q_inverse_rms" in d else [d.norm(joined_heads(d), None)]
    for name, made in (("out", weighted_and_rotated(d, y)), *(("inverse_rms", t) for t in inverse_rms)):
        for x in "qk":
            d.store(f"{x}_{name}", heads_of(d, made, x))


def build_heads_together(d: GraphBuilder, x: str) -> None:
    """Builds the result of x, "q" or "k", with all heads of a token as a row, and the inverse RMS if that is an
    argument."""
    dim = d.layouts[x].shape
    rows = d.graph.reshape(d[x]).set_dim((*dim[:-2], dim[-2] * dim[-1]))
    with d.of_rank(len(dim) - 1):
        y = d.norm(rows, f"{x}_weight", statistics=(f"{x}_inverse_rms",))
    with d.of_rank(len(dim)):
        d.store(f"{x}_out", rotated(d, d.graph.reshape(y).set_dim(dim)))


def build_across(d: GraphBuilder) -> None:
    """Builds both results, with one kernel each. Their rows are tokens, so a kernel serves other numbers of these."""
    have_weights(d)
    for x in "qk":
        build_heads_together(d, x)


def _build_cached(d: GraphBuilder) -> None:
    for name in ("k_cache", "v_cache"):
        _joined_pages(d, name)
    y = weighted_and_rotated(d, d.norm(joined_heads(d), None))
    slots = d.of_tokens("slot_mapping")
    d.store("q_out", heads_of(d, y, "q"))
    # All heads are divided, although only those of keys are stored: so it is one kernel.
    d.scatter("k_cache", heads_of(d, _divided(d, y, "k_scale"), "k"), slots)
    d.scatter("v_cache", _divided(d, d["v"], "v_scale"), slots)


def _divided(d: GraphBuilder, x: Tensor, scale: str) -> Tensor:
    return d.graph.mul(x, d.graph.reciprocal(d[scale])) if scale in d else x


def heads_and_angles(types: Types, across: bool = False) -> tuple[TensorParameter, ...]:
    """Parameters of queries, keys, their weights and their angles. types: accepted types of all but positions. across:
    whether the heads of a token are normalized together."""
    weight = columns_of_heads if across else columns_or_heads
    return (
        TensorParameter("q", types, row_axes=1 + across),
        TensorParameter("k", types, _of_keys, free=True),
        *(TensorParameter(f"{x}_weight", types, weight(x), optional=True) for x in "qk"),
        *angle_parameters("q", types),
    )


_GIVEN = heads_and_angles(FLOATS)
_GIVEN_ACROSS = heads_and_angles(FLOATS, across=True)
_CACHES = tuple(
    TensorParameter(f"{x}_cache", FORMATS, _pages(f"{x}_cache"), free=True, table=True, written=True) for x in "kv"
)
_CACHED = (
    *_GIVEN,
    TensorParameter("v", FLOATS, like("k")),
    *_CACHES,
    TensorParameter("slot_mapping", INTEGERS, of_tokens("q")),
    QK_OUT[0],
    *(TensorParameter(f"{x}_scale", FLOAT, one, optional=True) for x in "kv"),
)


@function(Variant((*_GIVEN, *QK_OUT), build_per_head), "q_out", "k_out", chosen_by=("is_neox",))
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    eps: float = 1e-6,
    is_neox: bool = True,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each head of queries and keys, then rotary position embedding, in float32, rounded once; one kernel
    for both.

    q: (..., heads, head_dim), any strides: slices of a packed tensor are read where they are. k: as q, of its type,
    with its own number of heads. q_weight, k_weight: as in ``qk_rmsnorm``, of one type, or both None for 1.
    cos_sin_cache: (max_position, rotary_dim), bfloat16, float16 or float32: for each position the cosines of the
    rotary_dim / 2 pairs, then their sines, as in FlashInfer and vLLM. rotary_dim is even and at most head_dim; columns
    after it are normalized and not rotated. positions: (...), q's leading dimensions, int64 or int32: the row of the
    cache for each token. For a position outside the cache the token's rotated columns are NaN, and no memory is read.
    is_neox: pairs are columns i and i + rotary_dim / 2; if False, columns 2 i and 2 i + 1 (GPT-J). q_out, k_out: of q's
    and k's shape, of one type, as ``rmsnorm``'s out; they may be q and k themselves. Types, eps, enable_pdl and errors
    as in ``rmsnorm``. ``graphfuse.torch.qk_norm_rope`` has gradients.

    Returns (q_out, k_out). Kernels support a head_dim that is a multiple of 8, up to 512, and a rotary_dim that is a
    multiple of 16 (of 8 if not is_neox); the reference engine runs the rest.
    """


@function(Variant((*_GIVEN_ACROSS, *QK_OUT), build_across), "q_out", "k_out", chosen_by=("is_neox",))
def qk_norm_rope_across_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    eps: float = 1e-6,
    is_neox: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``qk_norm_rope`` with RMSNorm over all heads of a token together, as in WAN and other diffusion models of video.

    It corresponds to FlashInfer's ``fused_qk_rmsnorm_rope``. q_weight, k_weight: (heads * head_dim,) of q's and k's
    heads, or both None for 1. cos_sin_cache: as in ``qk_norm_rope``; ``cos_sin_of_grid`` makes one for positions in
    frames, rows and columns. is_neox: False by default, as in these models. The others, and errors, are as in
    ``qk_norm_rope``.

    Returns (q_out, k_out), by one kernel each. Kernels support heads without gaps between them, a head_dim that is a
    multiple of 8, and a rotary_dim that is a multiple of 16 (of 8 if not is_neox). If is_neox, head_dim must be a power
    of two, up to 512. The rest runs as several kernels, or on the reference engine.
    """


@function(Variant(_CACHED, _build_cached), "q_out", chosen_by=("is_neox",))
def qk_norm_rope_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float = 1e-6,
    is_neox: bool = True,
    q_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotation like ``qk_norm_rope``, with keys and unchanged values written to a cache by slots.

    One kernel computes queries and keys, another copies values. v: of k's shape. k_cache, v_cache: (pages, page_size,
    heads, head_dim), or (slots, heads, head_dim), of k's heads; any strides in which the distance of slots is the same
    across pages as within one; types as q_out's, FP8 saturating. k_scale, v_scale: float32, (1,) or (), on q's device,
    or None for 1. As in ``rmsnorm_quant``, the cache receives keys * (1 / k_scale) and v * (1 / v_scale), rounded once;
    its readers multiply. slot_mapping: like positions, the slot of each token, which is page * page_size + offset. A
    token with a negative slot, or one beyond the cache, is not written. All other slots stay unchanged. If two tokens
    have the same slot, either is written. The others, and errors, are as in ``qk_norm_rope``.

    Returns q_out.
    """
