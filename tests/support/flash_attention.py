"""Flash attention of rows one behind another in float64 on the CPU, where torch has none: what its kernels promise."""

import contextlib
import math

import torch

from graphfuse.engines.torch_calls import sequences


def _parts(starts):
    return [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


def _scores(q, k, causal, scale, left, right):
    """[heads, rows, columns], -infinity outside of a band whose diagonal ends at the last of both."""
    q, k = (t.double().transpose(0, 1) for t in (q, k))
    scores = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(-1, -2) * scale
    rows, columns = scores.shape[-2:]
    beyond = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    right = 0 if causal else right
    for hidden in ([] if right is None else [beyond > right]) + ([] if left is None else [beyond < -left]):
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _told(causal, left, right, most_k):
    """What the kernels make of a band: one wider than k at most is none."""
    left, right = None if left is None or left >= most_k else left, 0 if causal else right
    right = None if right is None or right >= most_k else right
    if left is None and right == 0:
        return True, None, None
    if left is None is not right:
        left = most_k
    if right is None is not left:
        right = most_k
    return False, left, right


def _forward(
    q, k, v, of_q, of_k, most_q, most_k, dropout, causal, debug, *, scale, window_size_left=None, window_size_right=None
):
    assert of_q.dtype is of_k.dtype is torch.int32 and len(of_q) == len(of_k) <= 65536
    causal, left, right = _told(causal and most_q > 1, window_size_left, window_size_right, most_k)
    if most_q == 1 and q.shape[1] > k.shape[1] and left is right is None and not causal:
        q.reshape(len(of_q) - 1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])  # groups of heads in place of rows
    out, sums = torch.full_like(q, math.nan), torch.full((q.shape[1], q.shape[0]), math.nan)
    for rows, others in zip(_parts(of_q), _parts(of_k), strict=True):
        if rows.start == rows.stop:
            continue
        rows = slice(rows.start, min(rows.stop, rows.start + most_q))
        scores = _scores(q[rows], k[others], causal, scale, left, right)
        values = v[others].double().transpose(0, 1).repeat_interleave(q.shape[1] // v.shape[1], 0)
        seen = scores.logsumexp(-1)
        none = seen == -math.inf
        weights = torch.where(none[:, :, None], 0.0, scores.softmax(-1))
        out[rows] = (weights @ values).transpose(0, 1).to(q.dtype)
        sums[:, rows] = torch.where(none | seen.isnan(), math.inf, seen).float()
    empty = q.new_empty(2)
    return out, sums, empty, empty, empty


def _backward(loss, q, k, v, o, sums, of_q, of_k, most_q, most_k, dropout, causal, seed, offset, *, scale, **band):
    found = [torch.full_like(t, math.nan) for t in (q, k, v)]
    causal, left, right = _told(causal, band.get("window_size_left"), band.get("window_size_right"), most_k)
    for rows, others in zip(_parts(of_q), _parts(of_k), strict=True):
        if rows.start == rows.stop:
            found[1][others] = found[2][others] = 0
            continue
        scores = _scores(q[rows], k[others], causal, scale, left, right)
        times = q.shape[1] // k.shape[1]
        more = [t[others].double().transpose(0, 1).repeat_interleave(times, 0) for t in (k, v)]
        weights = (scores - sums[:, rows, None].double()).exp()
        by, own = (t[rows].double().transpose(0, 1) for t in (loss, o))
        shifted = weights * (by @ more[1].transpose(-1, -2) - (by * own).sum(-1, keepdim=True)) * scale
        made = (
            shifted @ more[0],
            (shifted.transpose(-1, -2) @ q[rows].double().transpose(0, 1)).unflatten(0, (-1, times)).sum(1),
            (weights.transpose(-1, -2) @ by).unflatten(0, (-1, times)).sum(1),
        )
        for to, at, t in zip(found, (rows, others, others), made, strict=True):
            to[at] = t.transpose(0, 1).to(to.dtype)
    return tuple(found)


@contextlib.contextmanager
def on_cpu():
    """Torch has these kernels for the CPU meanwhile."""
    library = torch.library.Library("aten", "IMPL")
    sequences.DEVICES.add("cpu")
    try:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield
    finally:
        sequences.DEVICES.remove("cpu")
        library._destroy()
