"""Attention by torch's own operators, with its result and its log-sum-exp: the logarithm of each row's sum of
exponentials.

``torch.nn.functional.scaled_dot_product_attention`` does not return the log-sum-exp; the operators that it calls do.
`select_kernel` chooses the operator from facts alone. Backward accepts any result and log-sum-exp from the caller. If
both include logits that have no key, so do the gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.functional import pad

_aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)

WIDEST, WIDEST_WITH_GRADIENTS = 256, 192
"""Most columns of a head that flash attention supports: without gradients, and with gradients on all GPUs."""
ALL_WIDTHS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities on which flash attention supports the widest heads with gradients, too."""
MULTIPLE = 8
"""Divisor of a bias's strides and of a head's columns on GPUs. Columns are padded to it."""
_LOGARITHMS = 32
"""Multiple to which the memory-efficient operator pads the number of log-sum-exps of a head, and expects it padded."""

State = tuple[torch.Tensor, ...]
Attended = tuple[torch.Tensor, torch.Tensor, State]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """Options of a call. scale: factor of the logits. is_causal: whether query i attends to keys 0 to i alone. window:
    how many of these it attends to, the last ones; None for all."""

    scale: float
    is_causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class AttentionKernel:
    """One of torch's operators, or the formula.

    forward: function of (q, k, v, bias, options) that returns the result, the log-sum-exps [batch, heads, queries] and
    the state that backward needs in addition.
    backward: function of (the result's gradient, q, k, v, bias, result, log-sum-exps, state, options).
    is_grouped: whether it supports fewer heads of keys than of queries.
    has_window: whether it supports a window.
    multiple: divisor of the columns that it requires.
    """

    name: str
    forward: Callable[..., Attended]
    backward: Callable[..., Gradients]
    is_grouped: bool = False
    has_window: bool = False
    multiple: int = 1


@dataclass(frozen=True)
class AttentionCase:
    """Facts that decide which kernel runs.

    device: device type.
    queries, keys: number of each.
    columns: columns of a head of queries and keys.
    value_columns: columns of a head of values.
    has_window: whether queries attend to the last keys alone, which is causal.
    is_sharded: whether the tensors are DTensors.
    capability: compute capability of the GPU.
    has_flash: whether torch was built with flash attention for this GPU.
    scale: factor of the logits.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    columns: int
    value_columns: int
    has_mask: bool
    is_causal: bool
    has_window: bool = False
    is_sharded: bool = False
    capability: tuple[int, int] = (8, 0)
    has_flash: bool = True
    scale: float = 1.0


def select_kernel(case: AttentionCase) -> AttentionKernel:
    if case.queries == 0 or case.keys == 0 or case.columns == 0 or case.value_columns == 0:
        return PLAIN
    if case.is_causal and not case.scale > 0:  # torch's kernels multiply the mask's -inf by the scale
        return PLAIN
    is_alike = case.columns == case.value_columns
    if case.device == "cpu":
        return CPU if is_alike and case.dtype in (*HALVES, torch.float32) else PLAIN
    if case.device != "cuda" or case.dtype not in (*HALVES, torch.float32):
        return PLAIN
    if case.capability < (8, 0):
        return PLAIN if case.dtype is torch.bfloat16 else EFFICIENT
    widest = WIDEST if case.capability in ALL_WIDTHS else WIDEST_WITH_GRADIENTS
    fits = case.has_flash and case.dtype in HALVES and not case.has_mask and is_alike and case.columns <= widest
    # If the numbers of queries and keys differ, flash attention aligns the last of both, torch the first.
    if not fits or case.is_causal and case.queries != case.keys:
        return EFFICIENT
    if not case.has_window:
        return FLASH
    return EFFICIENT if case.is_sharded else WINDOWED  # torch has no rule for windowed attention of DTensors


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: Options) -> Attended:
    """The result, the log-sum-exps and the state of attention. q: [batch, heads, queries, columns]. k, v: [batch, heads
    or a divisor, keys, columns]. mask: boolean, True for keys that are attended to, or a summand; of four dimensions;
    None with a window. The result of a row without any key is 0. The result may be a view."""
    kernel, given, options = _as_kernel_requires(q, k, v, mask, options)
    out, lse, state = kernel.forward(*given, options)
    shape = (*q.shape[:3], v.shape[-1])
    if out.shape != shape:  # in its own memory, with the same layout in all modes
        out = _first(out, v.shape[-1]).reshape(shape).clone()
    return out, lse.reshape(shape[:3]), state


def differentiate(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: State,
    options: Options,
) -> Gradients:
    """The gradients of q, k and v. out, lse: result and log-sum-exp over all logits of a row, including those without
    keys."""
    kernel, given, options = _as_kernel_requires(q, k, v, mask, options)
    rows = given[0].shape[:3]
    grad, out = (_padded(t.reshape(*rows, t.shape[-1]), kernel.multiple) for t in (grad, out))
    lse = lse.reshape(rows).contiguous()
    dq, dk, dv = kernel.backward(grad, *given, out, lse, state, options)
    return _first(dq, q.shape[-1]).reshape(q.shape), _joined(dk, k), _joined(dv, v)


def _as_kernel_requires(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: Options
) -> tuple[AttentionKernel, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Options]:
    """The kernel, with the arguments in the form that it supports."""
    queries = q.shape[2]
    if options.window is not None and isinstance(queries, int) and options.window >= queries:
        options = replace(options, window=None)  # a dynamic number would be guarded on one side of the comparison
    kernel = kernel_of(q, k, v, mask is not None, options)
    if options.window is not None and not kernel.has_window:
        every = q.new_ones((1, 1, queries, k.shape[2]), dtype=torch.bool)
        mask, options = every.tril().triu(1 - options.window), Options(options.scale)
    bias = None if mask is None else _bias(mask, q)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and not kernel.is_grouped:
        # grouped heads become queries of one head, so that keys need not be repeated
        if q.shape[2] == 1 and not options.is_causal:
            q = q.reshape(q.shape[0], k.shape[1], groups, q.shape[3])
            if bias is not None and bias.shape[1] > 1:
                bias = bias.reshape(bias.shape[0], k.shape[1], groups, bias.shape[3])
        else:
            k, v = (_repeated(t, groups) for t in (k, v))
    tensors = (_padded(t, kernel.multiple) for t in (q, k, v))
    if bias is not None:
        bias = (_aligned(bias, k.shape[2]) if kernel.multiple > 1 else bias).expand(*q.shape[:3], k.shape[2])
    return kernel, (*tensors, bias), options


def kernel_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, has_mask: bool, options: Options) -> AttentionKernel:
    """The kernel for these tensors, which may be fake tensors."""
    gpu = _gpu(q.device.index or 0) if q.device.type == "cuda" else ()
    sizes = q.shape[2] if q.shape[0] else 0, k.shape[2], q.shape[3], v.shape[3]
    masking = has_mask, options.is_causal, options.window is not None
    return select_kernel(
        AttentionCase(q.device.type, q.dtype, *sizes, *masking, is_wrapper(q), *gpu, scale=options.scale)
    )


def is_wrapper(t: torch.Tensor) -> bool:
    """True if a tensor is a wrapper of others, as DTensors are."""
    return hasattr(type(t), "__tensor_flatten__")


@cache
def _gpu(index: int) -> tuple[tuple[int, int], bool] | tuple[()]:
    """The compute capability, and whether flash attention is built in. Empty without a GPU, such as while a model is
    traced for one: then the defaults of `AttentionCase` hold."""
    if not torch.cuda.is_available():
        return ()
    return torch.cuda.get_device_capability(index), torch.backends.cuda.is_flash_attention_available()


def _bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))


def _aligned(bias: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask with stride 1 along keys and other strides that GPUs can load along, in padded memory if necessary."""
    bias = bias.expand(*bias.shape[:-1], keys)
    if bias.stride(-1) == 1 and all(stride % MULTIPLE == 0 for stride in bias.stride()[:-1]):
        return bias
    room = -keys % MULTIPLE
    return _first(pad(bias, (0, room)), keys) if room else bias.contiguous()


def _repeated(t: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, rows, columns = t.shape
    return t.unsqueeze(2).expand(batch, heads, groups, rows, columns).reshape(batch, heads * groups, rows, columns)


def _padded(t: torch.Tensor, multiple: int) -> torch.Tensor:
    room = -t.shape[-1] % multiple
    if room:
        return pad(t, (0, room))
    return t if t.stride(-1) == 1 else t.contiguous()


def _joined(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values, without padded columns, summed over all heads that read them."""
    grad = _first(grad, of.shape[-1])
    if grad.shape[1] == of.shape[1]:
        return grad
    return grad.unflatten(1, (of.shape[1], -1)).sum(2)


def _first(t: torch.Tensor, columns: int) -> torch.Tensor:
    return t if t.shape[-1] == columns else t.narrow(-1, 0, columns)


def _flash(q, k, v, bias, options):
    made = _aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, options.is_causal, False, scale=options.scale
    )
    out, lse, _, _, _, _, rng, unused, _ = made
    return out, lse, (rng, unused)


def _flash_backward(grad, q, k, v, bias, out, lse, state, options):
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, *lengths, 0.0, options.is_causal, *state, scale=options.scale
    )


def _windowed(q, k, v, bias, options):
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    lengths = (None, None, q.shape[2], k.shape[2])
    made = _aten._flash_attention_forward.default(
        queries, keys, values, *lengths, 0.0, False, False, scale=options.scale, **_window(options)
    )
    out, lse, rng, unused, _ = made
    return out.transpose(1, 2), lse, (rng, unused)


def _windowed_backward(grad, q, k, v, bias, out, lse, state, options):
    grad, queries, keys, values, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))
    lengths = (None, None, q.shape[2], k.shape[2])
    made = _aten._flash_attention_backward.default(
        grad, queries, keys, values, out, lse, *lengths, 0.0, False, *state, scale=options.scale, **_window(options)
    )
    return tuple(t.transpose(1, 2) for t in made)


def _window(options):
    """Numbers of keys before and after a query's own position. The latter alone makes a window causal in torch's
    operators."""
    return {"window_size_left": options.window - 1, "window_size_right": 0}


def _efficient(q, k, v, bias, options):
    out, lse, *state = _aten._scaled_dot_product_efficient_attention.default(
        q, k, v, bias, True, 0.0, options.is_causal, scale=options.scale
    )
    return out, _first(lse, q.shape[2]), tuple(state)


def _efficient_backward(grad, q, k, v, bias, out, lse, state, options):
    room = -lse.shape[-1] % _LOGARITHMS
    lse = pad(lse, (0, room), value=float("inf")) if room else lse
    grad, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (grad, out))  # otherwise the kernel may crash
    # Before 2.12 torch's rule for DTensors returns a gradient for each bias.
    needed = [True, True, True, bias is not None and is_wrapper(bias) and torch.__version__ < (2, 12)]
    return _aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, bias, out, lse, *state, 0.0, needed, options.is_causal, scale=options.scale
    )[:3]


def _cpu(q, k, v, bias, options):
    call = _aten._scaled_dot_product_flash_attention_for_cpu.default
    return (*call(q, k, v, 0.0, options.is_causal, attn_mask=bias, scale=options.scale), ())


def _cpu_backward(grad, q, k, v, bias, out, lse, state, options):
    call = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return call(grad, q, k, v, out, lse, 0.0, options.is_causal, attn_mask=bias, scale=options.scale)


def _scores(q, k, bias, options):
    scores = q @ k.mT * options.scale
    if bias is not None:
        scores = scores + bias
    if options.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _wide(*tensors):
    kind = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return (None if t is None else t.to(kind) for t in tensors)


def _plain(q, k, v, bias, options):
    wide_q, wide_k, wide_v, wide_bias = _wide(q, k, v, bias)
    scores = _scores(wide_q, wide_k, wide_bias, options)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), 0)  # a row without keys: its exponentials are then 0
    return ((scores - lse.unsqueeze(-1)).exp() @ wide_v).to(q.dtype), lse, ()


def _plain_backward(grad, q, k, v, bias, out, lse, state, options):
    wide_q, wide_k, wide_v, wide_bias, wide_grad, wide_out = _wide(q, k, v, bias, grad, out)
    probs = (_scores(wide_q, wide_k, wide_bias, options) - lse.unsqueeze(-1)).exp()
    inner = wide_grad @ wide_v.mT - (wide_grad * wide_out).sum(-1, keepdim=True)
    dscores = probs * inner * options.scale
    made = (dscores @ wide_k, dscores.mT @ wide_q, probs.mT @ wide_grad)
    return tuple(d.to(t.dtype) for d, t in zip(made, (q, k, v), strict=True))


FLASH = AttentionKernel("flash attention", _flash, _flash_backward, is_grouped=True, multiple=MULTIPLE)
WINDOWED = AttentionKernel(
    "flash attention with a window", _windowed, _windowed_backward, is_grouped=True, has_window=True, multiple=MULTIPLE
)
EFFICIENT = AttentionKernel("memory-efficient attention", _efficient, _efficient_backward, multiple=MULTIPLE)
CPU = AttentionKernel("flash attention for the CPU", _cpu, _cpu_backward)
PLAIN = AttentionKernel("the formula", _plain, _plain_backward)
