"""Attention with sinks: each head has one more logit in every row, which has no key and no value.

Attention without the sink returns a result and lse, the logarithm of the sum of exponentials, for each row. The sink
adds one term to the row's sum, so the result is multiplied by sigmoid(lse - sink). Backward is that of attention
without the sink, with two arguments replaced: the result, and logaddexp(lse, sink) for lse. It reads nothing else of
the row's sum. The sink's own probability is exp(sink - logaddexp(lse, sink)). The gradient of its logit is minus this
probability times the row's sum of the result times its gradient, as for any softmax.

``graphfuse::attention_with_sinks`` is the operator that users call. A compiler sees torch's operators and the
operations around them, forward and backward.
"""

import math

import torch

from graphfuse.base.errors import VariantPackError, VariantPackTypeError
from graphfuse.functional.operator import LIBRARY
from graphfuse.runtime import torch_private
from graphfuse.torch.attention import operator as attention
from graphfuse.torch.operators.graph_operator import once_differentiable, refuse_tangents, refuse_transforms

NAME = "attention_with_sinks"

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_any_requires_grad = torch_private.any_requires_grad()


def _check(q, k, v, sinks, mask, is_causal, window) -> None:
    """Raises VariantPackError, or VariantPackTypeError for wrong types, if the arguments do not fit together."""
    if q.dtype not in TYPES:
        raise VariantPackTypeError(f"q is {q.dtype}; accepted: {', '.join(map(str, TYPES))}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype is not q.dtype:
            raise VariantPackTypeError(f"{name} is {t.dtype}; accepted: {q.dtype}, as q")
    if sinks is not None and sinks.dtype not in TYPES:
        raise VariantPackTypeError(f"sinks is {sinks.dtype}; accepted: {', '.join(map(str, TYPES))}")
    given = (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("attn_mask", mask))
    for name, t in given:
        if t is not None and t.device != q.device:
            raise VariantPackError(f"{name} is on {t.device}; accepted: {q.device}, as q")
    for name, t in given[:3]:
        if t.dim() != 4:
            raise VariantPackError(f"{name} has shape {_text(t)}; accepted: (batch, heads, rows, columns)")
    batch, heads, queries, columns = q.shape
    if k.shape[0] != batch or k.shape[3] != columns or k.shape[1] == 0 or heads % k.shape[1]:
        raise VariantPackError(
            f"k has shape {_text(k)}; accepted: ({batch}, {heads} or a divisor of it, keys, {columns}), as q is given"
        )
    if v.shape[:3] != k.shape[:3]:
        raise VariantPackError(
            f"v has shape {_text(v)}; accepted: ({_text(k)[1:-1].rpartition(',')[0]}, columns), as k"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise VariantPackError(f"sinks has shape {_text(sinks)}; accepted: ({heads},), one for each head of q")
    if window is not None and not (is_causal and window > 0):
        raise VariantPackError(
            f"window is {window} with is_causal={is_causal}; accepted: a positive number with is_causal=True, or None"
        )
    if mask is None:
        return
    if is_causal:
        raise VariantPackError("is_causal is True with an attn_mask; accepted: one of both")
    if mask.dtype not in (torch.bool, q.dtype):
        raise VariantPackTypeError(f"attn_mask is {mask.dtype}; accepted: torch.bool, or {q.dtype}, as q")
    full = (batch, heads, queries, k.shape[2])
    tail = full[4 - mask.dim() :] if mask.dim() <= 4 else ()
    if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape, tail, strict=True)):
        raise VariantPackError(f"attn_mask has shape {_text(mask)}; accepted: one that broadcasts to {full}")


def _text(t: torch.Tensor) -> str:
    return str(tuple(t.shape))


def _attend(q, k, v, sinks, mask, is_causal, scale, window):
    """The result, the log-sum-exps without the sink, the state for backward, and the mask and options in use."""
    _check(q, k, v, sinks, mask, is_causal, window)
    options = attention.Options(1 / math.sqrt(q.shape[-1]) if scale is None else scale, is_causal, window)
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    out, lse, state = attention.attend(q, k, v, mask, options)
    if sinks is not None:
        kept = torch.sigmoid(lse - _in_rows(sinks, lse)).unsqueeze(-1)
        # Autograd would reject later in-place changes of a view.
        out = (out * kept).to(out.dtype) if out._is_view() else out.mul_(kept)
    return out, lse, state, mask, options


def _in_rows(sinks, lse):
    return sinks.to(lse.dtype).unsqueeze(1)


def _infer(q, k, v, sinks, attn_mask=None, is_causal=False, scale=None, window=None):
    return _attend(q, k, v, sinks, attn_mask, is_causal, scale, window)[0]


def _differentiate(grad, q, k, v, sinks, mask, out, lse, *rest):
    """The gradients of q, k, v and the sinks. lse: with the sink. rest: the state, the options, and whether attention
    and the sinks need gradients."""
    *state, options, needs_attention, needs_sinks = rest
    dq = dk = dv = dsinks = None
    if needs_attention:
        dq, dk, dv = attention.differentiate(grad, q, k, v, mask, out, lse, tuple(state), options)
    if needs_sinks:
        share = torch.exp(_in_rows(sinks, lse) - lse)
        dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dsinks


_once = once_differentiable(NAME, _differentiate)


class AttentionWithSinks(torch.autograd.Function):
    """Autograd function of attention with sinks. torch names its graph node after the class."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attn_mask, is_causal, scale, window):
        out, lse, state, mask, ctx.options = _attend(q, k, v, sinks, attn_mask, is_causal, scale, window)
        lse = lse if sinks is None else torch.logaddexp(lse, _in_rows(sinks, lse))
        ctx.save_for_backward(q, k, v, sinks, mask, out, lse, *state)
        return out

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad
        values = (grad, *ctx.saved_tensors, ctx.options, any(needs[:3]), needs[3])
        made = _once(*values) if torch.is_grad_enabled() else _differentiate(*values)
        return *(d if needed else None for d, needed in zip(made, needs, strict=False)), None, None, None, None


def _watched(q, k, v, sinks, attn_mask=None, is_causal=False, scale=None, window=None):
    values = (q, k, v, sinks, attn_mask, is_causal, scale, window)
    refuse_tangents(NAME, values)
    if torch.is_grad_enabled() and _any_requires_grad(*values):
        refuse_transforms(NAME)
        if attn_mask is not None and attn_mask.requires_grad:
            raise VariantPackTypeError("attn_mask requires a gradient; accepted: one that does not")
        return AttentionWithSinks.apply(*values)
    return _infer(*values)  # by torch's operators, which compilers then see


LIBRARY.define(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? attn_mask=None, bool is_causal=False, "
    "float? scale=None, int? window=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl(NAME, _infer, "CompositeExplicitAutograd")
LIBRARY.impl(NAME, _watched, "Autograd")
torch.library.register_fake(f"graphfuse::{NAME}", _infer, lib=LIBRARY)
_operator = getattr(torch.ops.graphfuse, NAME).default


def attention_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention whose softmax has one more logit in each row: the head's sink, which has no value.

    It computes softmax(cat(q @ k^T * scale + attn_mask, sink))[..., :-1] @ v, as in GPT-OSS, without a matrix of all
    logits in memory. q: (batch, heads, queries, columns), bfloat16, float16, float32 or float64. k, v: (batch, heads or
    a divisor of it, keys, columns), of q's type. If they have fewer heads, consecutive heads of q share one. v may have
    another number of columns. sinks: (heads,), any of these types. attn_mask: a summand of q's type, or bool, True for
    keys that are attended to; it broadcasts to (batch, heads, queries, keys). is_causal: whether query i attends to
    keys 0 to i alone, as in ``torch.nn.functional.scaled_dot_product_attention``. scale: None for 1 / sqrt(columns).
    window: with is_causal, query i attends to keys i - window + 1 to i alone; None for all up to i.

    Returns (batch, heads, queries, columns of v), in q's type. A row that attends to no key is 0. torch's own attention
    runs: flash attention on GPUs for half types without a mask, the memory-efficient kernel with one or in float32,
    flash attention on the CPU. Flash attention on GPUs supports a window itself, for as many queries as keys; other
    kernels get it as a mask. float64 and what these kernels do not support is computed by the formula above. q, k, v
    and sinks have gradients, which cannot be differentiated again. Raises VariantPackError, and VariantPackTypeError
    for wrong types, naming the argument.
    """
    return _operator(q, k, v, sinks, attn_mask, is_causal, scale, window)
