"""The operators: names, argument order, documentation. The computation of each is data beside it."""

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
    """eps as a number. None is what torch takes for it: the epsilon of the type that is computed in."""
    return _EPS.get(getattr(x, "dtype", None), torch.finfo(torch.float32).eps) if eps is None else eps


def _norm(name: str, **kind: bool) -> Operator:
    by_columns = NormByColumns(Norm(**kind))
    return differentiable(name, by_columns.norm, by_columns.forward, by_columns.backward)


RMS_NORM = _norm("rms_norm")
RMS_NORM_SILU = _norm("rms_norm_silu", silu=True)
RMS_NORM_SILU_GATE = _norm("rms_norm_silu_gate", silu=True, gate=True)
ADD_RMS_NORM = _norm("add_rms_norm", residual=True)
# Operators of their own, so that those without a bias do not look for one.
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

    x: (..., hidden), bfloat16, float16, float32 or float64, any strides. It may have any number of dimensions, up to 8
    that no stride joins. weight: (hidden,), or (heads, hidden) for an x of (..., heads, hidden), of any of these types;
    None for 1. bias: of weight's shape, (hidden,) without a weight, any of these types. eps: None for float32's
    epsilon, for x in float64 float64's, which is what ``torch.nn.functional.rms_norm`` takes.

    Returns a new tensor like x. Its gradients have the types of x and weight; backward needs x, weight and one
    number a row. Gradients cannot be differentiated again. Raises VariantPackError, and VariantPackTypeError for
    wrong types, naming the argument, before anything is written.
    """
    if bias is None:
        return RMS_NORM.run(x, weight, epsilon(eps, x))
    return RMS_NORM_BIAS.run(x, weight, bias, epsilon(eps, x))


def rms_norm_silu(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """SiLU of ``rms_norm``, rounded once. Backward makes the norm again from what ``rms_norm`` keeps."""
    return RMS_NORM_SILU.run(x, weight, epsilon(eps, x))


def rms_norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``rms_norm_silu`` times gate, rounded once. gate: of x's shape, any of x's types. Backward needs gate, too."""
    return RMS_NORM_SILU_GATE.run(x, gate, weight, epsilon(eps, x))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, bias: Tensor | None = None
) -> Norms:
    """(``rms_norm`` of total in x's type, total = x + residual in residual's type).

    residual: of x's shape, any of x's types. What is normalized is total as it is returned, rounded, so that these
    are torch's two steps in one; ``graphfuse.functional.fused_add_rmsnorm`` normalizes the sum unrounded. Backward
    keeps total in place of x, and adds total's own gradient on the way.
    """
    if bias is None:
        return ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))
    return ADD_RMS_NORM_BIAS.run(x, residual, weight, bias, epsilon(eps, x))


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """``rms_norm`` times weight + 1 instead of weight; the sum is not rounded."""
    return GEMMA_RMS_NORM.run(x, weight, epsilon(eps, x))


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None) -> Norms:
    """``add_rms_norm`` times weight + 1 instead of weight; the sum is not rounded."""
    return GEMMA_ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """``rms_norm`` that is rounded to x's type before it is multiplied by weight, and again after: what the classes of
    Llama and most models of transformers compute. Gradients are those of ``rms_norm``."""
    return LLAMA_RMS_NORM.run(x, weight, epsilon(eps, x))


def llama_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None) -> Norms:
    """``add_rms_norm`` that is rounded before it is multiplied by weight, as ``llama_rms_norm``."""
    return LLAMA_ADD_RMS_NORM.run(x, residual, weight, epsilon(eps, x))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last dimension, computed in float32, rounded
    once to x's type: ``torch.nn.functional.layer_norm``.

    x, weight: as of ``rms_norm``. bias: of weight's shape, (hidden,) without a weight, any of x's types, or None.
    Returns a new tensor like x. Backward needs x, weight and two numbers a row; otherwise as of ``rms_norm``.
    """
    if bias is None:
        return LAYER_NORM.run(x, weight, eps)
    return LAYER_NORM_BIAS.run(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Norms:
    """(``layer_norm`` of total in x's type, total = x + residual in residual's type), as ``add_rms_norm``."""
    if bias is None:
        return ADD_LAYER_NORM.run(x, residual, weight, eps)
    return ADD_LAYER_NORM_BIAS.run(x, residual, weight, bias, eps)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """``layer_norm`` without a weight, times scale + 1, plus shift: adaptive layer norm (Peebles and Xie 2023).

    x: (samples, ..., hidden), as of ``rms_norm``. scale: (samples, 1, ..., hidden), one row of values for each sample;
    (hidden,) or (1, ..., 1, hidden), the same for all rows; or x's shape; any of x's types. shift: of scale's shape,
    any of these types. Returns a new tensor like x. Backward needs x, scale and two numbers a row; it is one kernel
    where scale is the same for all rows. Else the gradient of x is one, and the sums over the rows of a sample another.
    """
    return ADA_LAYER_NORM.run(x, scale, shift, eps)


def normalize(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / max(sqrt(sum(x^2)), eps) over the last dimension, computed in float32, rounded once to x's type:
    ``torch.nn.functional.normalize``. x: as of ``rms_norm``. Backward needs x and a number a row. Of a row shorter
    than eps, what it is divided by is a constant. Errors as of ``rms_norm``."""
    return NORMALIZE.run(x, eps)


def softmax(x: Tensor) -> Tensor:
    """e^x over its sum along the last dimension, computed in float32, rounded once to x's type.

    x: as of ``rms_norm``. The largest element of each row is subtracted first. -infinity becomes 0; a row of nothing
    else, and one with infinity or NaN, becomes NaN, as torch's. Backward needs the result alone, as it was rounded.
    Errors, and what cannot be differentiated, as of ``rms_norm``.
    """
    return SOFTMAX.run(x)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of ``softmax``, exact where that is next to 0. -infinity remains; otherwise as there."""
    return LOG_SOFTMAX.run(x)
