"""Norms: alone, after a residual sum, and before and after one; RMSNorm also with weight + 1."""

from collections.abc import Callable, Mapping

import torch

from graphfuse.functional.declaration import Variant
from graphfuse.functional.function import function
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.tensor_parameter import (
    FLOATS,
    FORMATS,
    Shape,
    TensorParameter,
    columns,
    columns_or_heads,
    like,
    like_or_columns,
    type_of,
)
from graphfuse.op_graph.tensor import Tensor

INPUT = TensorParameter("input", FLOATS)
WEIGHT = TensorParameter("weight", FLOATS, columns("input"))
WEIGHTS = TensorParameter("weight", FLOATS, columns_or_heads("input"))
BIAS = TensorParameter("bias", FLOATS, like("weight"), optional=True)
MAYBE_WEIGHTS = TensorParameter("weight", FLOATS, columns_or_heads("input"), optional=True)
MAYBE_BIAS = TensorParameter("bias", FLOATS, like_or_columns("weight", "input"), optional=True)
RESIDUAL = TensorParameter("residual", FLOATS, like("input"), written=True)
SUMMAND = TensorParameter("residual", FLOATS, like("input"))
MAYBE_NORM_OUT = TensorParameter("y_out", FLOATS, like("input"), written=True, optional=True)
OUT = TensorParameter("out", FORMATS, like("input"), written=True, new=type_of("input"))
RESIDUAL_OUT = TensorParameter("residual_out", FLOATS, like("input"), written=True, new=type_of("residual"))


QK_OUT = tuple(TensorParameter(f"{x}_out", FORMATS, like(x), written=True, new=type_of(x)) for x in "qk")


def of_keys(shapes: Mapping[str, Shape]) -> tuple[Shape, ...]:
    """q's shape, with k's own number of heads."""
    q, k = shapes["q"], shapes["k"]
    return ((*q[:-2], *k[-2:-1], q[-1]),)


def norm_of_input(d: GraphBuilder) -> Tensor:
    """The norm of input."""
    return d.norm(d["input"])


def layer_norm_of_input(d: GraphBuilder) -> Tensor:
    """The layer norm of input."""
    return d.norm(d["input"], centred=True)


def norm_of_sum(d: GraphBuilder) -> Tensor:
    """The norm of input + residual. The argument residual receives the sum rounded; the norm reads it unrounded."""
    return d.norm(_sum(d))


def store_norm(d: GraphBuilder, y: Tensor) -> Tensor:
    """y, which is also written to the argument y_out if that is given."""
    return d.store_read("y_out", y) if "y_out" in d else y


def _norms_around_sum(zero_centred: bool) -> Variant:
    """A norm before and one after a residual sum, which is written to residual_out rounded and normalized unrounded."""

    def build(d: GraphBuilder) -> None:
        first = d.norm(d["input"], zero_centred=zero_centred)
        total = d.store_read("residual_out", d.graph.add(first, d["residual"]))
        d.store("out", d.norm(total, "next_weight", zero_centred=zero_centred))

    next_weight = TensorParameter("next_weight", FLOATS, columns("input"))
    return Variant((INPUT, SUMMAND, WEIGHT, next_weight, OUT, RESIDUAL_OUT), build)


def _sum(d: GraphBuilder) -> Tensor:
    return d.store_read("residual", d.graph.add(d["input"], d["residual"]))


def _norm(build: Callable[[GraphBuilder], Tensor], *scales: TensorParameter) -> Variant:
    return Variant((INPUT, *scales, OUT), lambda d: d.store("out", build(d)))


def _in_place(build: Callable[[GraphBuilder], Tensor], *scales: TensorParameter) -> Variant:
    arguments = (
        TensorParameter("input", FLOATS, written=True),
        RESIDUAL,
        *scales,
        TensorParameter("out", FORMATS, like("input"), written=True, optional=True),
    )
    return Variant(arguments, lambda d: d.store("out" if "out" in d else "input", build(d)))


def _build_qk(d: GraphBuilder) -> None:
    for x in "qk":
        d.store(f"{x}_out", d.norm(d[x], f"{x}_weight"))


_QK = Variant(
    (
        TensorParameter("q", FLOATS),
        TensorParameter("k", FLOATS, of_keys, free=True),
        *(TensorParameter(f"{x}_weight", FLOATS, columns_or_heads(x)) for x in "qk"),
        *QK_OUT,
    ),
    _build_qk,
)


@function(_norm(norm_of_input, WEIGHTS, BIAS), "out")
def rmsnorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """input / sqrt(mean(input^2) + eps) * weight (+ bias) over the last dimension, in float32, rounded once.

    input: (..., hidden), bfloat16, float16 or float32, any strides. It may have any number of dimensions, of which at
    most 8 remain after joining by strides. weight: (hidden,), or (heads, hidden) for an input of (..., heads, hidden),
    of any of these types. For a norm over each group of a row, use heads of views: ``x.unflatten(-1, (groups, -1))``
    with ``weight.unflatten(0, (groups, -1))``.
    bias: of weight's shape, any of these types (as in Quack; FlashInfer has none). out: of input's shape, any strides;
    of these types, or float8_e4m3fn or float8_e5m2, saturating; it may be input itself if types agree. Default: input's
    type, newly allocated.
    enable_pdl: whether the kernel may begin while the previous one on the stream still runs (programmatic dependent
    launch), which changes no result. None and True: if the device supports it, from SM90 on.

    Returns out. The reference engine runs for CPU tensors, and if rows or weight have strides other than 1 along the
    last dimension. Autograd does not record the call: the result has no gradient. Raises VariantPackError, and
    VariantPackTypeError for wrong types, naming the argument, before anything is written.
    """


@function(_norm(lambda d: d.norm(d["input"], zero_centred=True), WEIGHT), "out")
def gemma_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """RMSNorm like ``rmsnorm``, times weight + 1 instead of weight, which is (hidden,), and without a bias."""


@function(_in_place(norm_of_sum, WEIGHTS, BIAS))
def fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """residual becomes input + residual, and input becomes RMSNorm of that sum.

    The sum is normalized in float32, unrounded; residual receives it rounded to its type. input, weight, eps,
    enable_pdl, bias: as for ``rmsnorm``. residual: of input's shape, any strides; bfloat16, float16 or float32.
    out: written instead of input; as for ``rmsnorm``.

    Returns None. Errors as in ``rmsnorm``; tensors that are written overlap no other one.
    """


@function(_in_place(lambda d: d.norm(_sum(d), zero_centred=True), WEIGHT))
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Residual sum and RMSNorm like ``fused_add_rmsnorm``, times weight + 1 instead of weight, which is (hidden,), and
    without a bias."""


@function(_norms_around_sum(zero_centred=False), "out", "residual_out")
def sandwich_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual_out is RMSNorm(input, weight) + residual, and out is RMSNorm of that sum with next_weight.

    These are the norm after one part of a model and the norm before the next, as in Gemma, in one kernel.

    The first norm is added unrounded, and the sum is normalized unrounded; residual_out receives it rounded to its
    type. input, weight, eps, out, enable_pdl: as for ``rmsnorm``, weight (hidden,). residual: of input's shape, any
    strides; bfloat16, float16 or float32. next_weight: as weight. residual_out: of input's shape and these types; it
    may be residual itself if types agree. Default: residual's type, newly allocated.

    Returns (out, residual_out). Errors as in ``rmsnorm``.
    """


@function(_norms_around_sum(zero_centred=True), "out", "residual_out")
def gemma_sandwich_rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, residual sum and norm like ``sandwich_rmsnorm``, times weight + 1 and next_weight + 1 instead of the
    weights."""


@function(_QK, "q_out", "k_out")
def qk_rmsnorm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float = 1e-6,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each head of queries and keys, one kernel each.

    q: (tokens, heads, head_dim), any strides: slices of a packed tensor are read where they are. k: as q, with
    its own number of heads. q_weight, k_weight: (head_dim,), or (heads, head_dim) of q's and k's heads. q_out, k_out:
    as ``rmsnorm``'s out, of q's and k's shape; they may be q and k themselves. Types, eps, enable_pdl and errors as in
    ``rmsnorm``.

    Returns (q_out, k_out).
    """


@function(_norm(layer_norm_of_input, MAYBE_WEIGHTS, MAYBE_BIAS), "out")
def layernorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's spelling
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """(input - mean) / sqrt(mean((input - mean)^2) + eps) * weight + bias over the last dimension, in float32, rounded
    once.

    weight: as for ``rmsnorm``, or None for 1. bias: of weight's shape, (hidden,) without a weight, or None for 0. The
    order of arguments and eps are FlashInfer's (which calls them gemma and beta); torch's eps is 1e-5. input, out,
    enable_pdl and errors as for ``rmsnorm``. Returns out.
    """


@function(_in_place(lambda d: d.norm(_sum(d), centred=True), MAYBE_WEIGHTS, MAYBE_BIAS))
def fused_add_layernorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """residual becomes input + residual, and input becomes ``layernorm`` of that sum, as in ``fused_add_rmsnorm``, but
    the order of arguments is that of ``layernorm``. FlashInfer has no such function. Returns None."""
