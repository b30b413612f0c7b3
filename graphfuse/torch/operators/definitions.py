"""The operators with gradients: names, argument order, documentation. What each computes is data in the other files."""

import torch
from torch import Tensor

from graphfuse.torch.operators.adaptive import AdaLayerNorm
from graphfuse.torch.operators.formula import Operator, differentiable
from graphfuse.torch.operators.norm import Norm
from graphfuse.torch.operators.norm_by_columns import NormByColumns
from graphfuse.torch.operators.normalize import Normalize
from graphfuse.torch.operators.softmax import Softmax

Norms = tuple[Tensor, Tensor]


_EPS = {torch.float64: torch.finfo(torch.float64).eps}


def epsilon(eps: float | None, x: Tensor) -> float:
    """eps as a number. None gives torch's default: the epsilon of the type that is computed in, float32 or float64."""
    return _EPS.get(getattr(x, "dtype", None), torch.finfo(torch.float32).eps) if eps is None else eps


def _norm(name: str, **kind: bool) -> Operator:
    by_columns = NormByColumns(Norm(**kind))
    return differentiable(name, by_columns.norm, by_columns.forward, by_columns.backward)


RMS_NORM = _norm("rms_norm")
RMS_NORM_SILU = _norm("rms_norm_silu", silu=True)
RMS_NORM_SILU_GATE = _norm("rms_norm_silu_gate", silu=True, gate=True)
ADD_RMS_NORM = _norm("add_rms_norm", residual=True)
# Separate operators, so that those without a bias do not look for one.
RMS_NORM_BIAS = _norm("rms_norm_bias", bias=True)
ADD_RMS_NORM_BIAS = _norm("add_rms_norm_bias", residual=True, bias=True)
GEMMA_RMS_NORM = _norm("gemma_rms_norm", zero_centred=True)
GEMMA_ADD_RMS_NORM = _norm("gemma_add_rms_norm", residual=True, zero_centred=True)
LLAMA_RMS_NORM = _norm("llama_rms_norm", rounded=True)
LLAMA_ADD_RMS_NORM = _norm("llama_add_rms_norm", residual=True, rounded=True)
LAYER_NORM = _norm("layer_norm", centred=True)
LAYER_NORM_BIAS = _norm("layer_norm_bias", centred=True, bias=True)
ADD_LAYER_NORM = _norm("add_layer_norm", residual=True, centred=True)
ADD_LAYER_NORM_BIAS = _norm("add_layer_norm_bias", residual=True, centred=True, bias=True)
ADA_LAYER_NORM = differentiable("ada_layer_norm", AdaLayerNorm())
# The functions without gradients have the shorter names.
NORMALIZE = differentiable("differentiable_normalize", Normalize())
SOFTMAX = differentiable("differentiable_softmax", Softmax())
LOG_SOFTMAX = differentiable("differentiable_log_softmax", Softmax(log=True))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, bias: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (+ bias) over the last dimension, computed in float32, rounded once to x's
    type.

    x: (..., hidden), bfloat16, float16, float32 or float64, any strides. It may have any number of dimensions, of which
    at most 8 remain after those are merged whose strides allow it. weight: (hidden,), or (heads, hidden) for an x of
    (..., heads, hidden), of any of these types; None for 1. bias: of weight's shape, (hidden,) without a weight, any of
    these types. eps: None for the epsilon of float32, or of float64 for a float64 x, as in
    ``torch.nn.functional.rms_norm``.

    Returns a new tensor like x. Its gradients have the types of x and weight, and cannot be differentiated again.
    Backward needs x, weight and one number a row. Raises VariantPackError, and VariantPackTypeError for wrong types,
    naming the argument, before anything is written.
    """
    if bias is None:
        return RMS_NORM.run(x, weight, epsilon(eps, x))
    return RMS_NORM_BIAS.run(x, weight, bias, epsilon(eps, x))


def rms_norm_silu(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """SiLU of ``rms_norm``, rounded once. Backward computes the norm again from what ``rms_norm`` keeps."""
    return RMS_NORM_SILU.run(x, weight, epsilon(eps, x))


def rms_norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``rms_norm_silu`` times gate, rounded once. gate: of x's shape, any of x's types. Backward needs gate, too."""
    return RMS_NORM_SILU_GATE.run(x, gate, weight, epsilon(eps, x))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, bias: Tensor | None = None
) -> Norms:
    """Norm and residual sum: ``rms_norm`` of total in x's type, and total = x + residual in residual's type.

    residual: of x's shape, any of x's types. The norm is that of the rounded total that is returned, as in torch's two
    steps; ``graphfuse.functional.fused_add_rmsnorm`` normalizes the unrounded sum. Backward keeps total in place of x,
    and adds total's own gradient.
    """
    if bias is None:
        return ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))
    return ADD_RMS_NORM_BIAS.run(x, residual, weight, bias, epsilon(eps, x))


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """``rms_norm`` times weight + 1 instead of weight; weight + 1 is not rounded."""
    return GEMMA_RMS_NORM.run(x, weight, epsilon(eps, x))


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None) -> Norms:
    """``add_rms_norm`` times weight + 1 instead of weight; weight + 1 is not rounded."""
    return GEMMA_ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """``rms_norm`` that is rounded to x's type before it is multiplied by weight, and again after. The classes of Llama
    and most models of transformers compute this. Gradients are those of ``rms_norm``."""
    return LLAMA_RMS_NORM.run(x, weight, epsilon(eps, x))


def llama_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None) -> Norms:
    """``add_rms_norm`` that is rounded before it is multiplied by weight, as in ``llama_rms_norm``."""
    return LLAMA_ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last dimension, computed in float32, rounded
    once to x's type: ``torch.nn.functional.layer_norm``.

    x, weight: as in ``rms_norm``. bias: of weight's shape, (hidden,) without a weight, any of x's types, or None.
    Returns a new tensor like x. Backward needs x, weight and two numbers a row. Gradients and errors as in
    ``rms_norm``.
    """
    if bias is None:
        return LAYER_NORM.run(x, weight, eps)
    return LAYER_NORM_BIAS.run(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Norms:
    """Norm and residual sum, as in ``add_rms_norm``: ``layer_norm`` of total in x's type, and total = x + residual in
    residual's type."""
    if bias is None:
        return ADD_LAYER_NORM.run(x, residual, weight, eps)
    return ADD_LAYER_NORM_BIAS.run(x, residual, weight, bias, eps)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """``layer_norm`` without a weight, times scale + 1, plus shift: adaptive layer norm (Peebles and Xie 2023).

    x: (samples, ..., hidden), as in ``rms_norm``. scale: (samples, 1, ..., hidden), one row of values for each sample;
    (hidden,) or (1, ..., 1, hidden), the same for all rows; or x's shape; any of x's types. shift: of scale's shape,
    any of these types. Returns a new tensor like x. Backward needs x, scale and two numbers a row. It is one kernel if
    scale is the same for all rows. Otherwise one kernel makes the gradient of x, and another the sums over the rows of
    a sample.
    """
    return ADA_LAYER_NORM.run(x, scale, shift, eps)


def normalize(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / max(sqrt(sum(x^2)), eps) over the last dimension, computed in float32, rounded once to x's type:
    ``torch.nn.functional.normalize``. x: as in ``rms_norm``. Backward needs x and a number a row. For a row whose
    length is below eps, the divisor is a constant. Errors as in ``rms_norm``."""
    return NORMALIZE.run(x, eps)


def softmax(x: Tensor) -> Tensor:
    """e^x over its sum along the last dimension, computed in float32, rounded once to x's type.

    x: as in ``rms_norm``. The largest element of each row is subtracted first. -infinity becomes 0. A row that is
    -infinity throughout, or has infinity or NaN, becomes NaN, as in torch. Backward needs the rounded result alone.
    Gradients and errors as in ``rms_norm``.
    """
    return SOFTMAX.run(x)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of ``softmax``, exact also where softmax is next to 0. -infinity remains. All else as in
    ``softmax``."""
    return LOG_SOFTMAX.run(x)
