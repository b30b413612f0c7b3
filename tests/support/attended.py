"""Attention with all its options and its gradients in float64: a list of seen columns for each row, and autograd."""

import math

import torch


def slope(head: int, heads: int) -> float:
    """ALiBi's: 2^-(8/n), 2^-(16/n), ... of the largest power of two n, then every other one of 2 n."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    return 2.0 ** (-8.0 / n * (head + 1)) if head < n else 2.0 ** (-4.0 / n * (2 * (head - n) + 1))


def attention(
    q,
    k,
    v,
    scale=1.0,
    bias=None,
    *,
    left=None,
    right=None,
    bottom_right=False,
    alibi=False,
    lengths=None,
    tiles=None,
    sink=None,
    kept=None,
    loss=None,
):
    """{"O", "Stats", "score_max", "score_sum_exp"} and, of a loss, the gradients of q, k, v, bias and sink.

    lengths: (rows, columns) of each sequence. tiles: (batch, head, i, j) -> whether those 128 x 128 scores are seen.
    kept: what the probabilities are multiplied by.
    """
    leaves = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    leaves = {n: t.detach().double().requires_grad_() for n, t in leaves.items() if t is not None}
    q, k, v = (leaves[n] for n in "qkv")
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    o = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64)
    made = {n: torch.full((batch, heads, rows, 1), -math.inf, dtype=torch.float64) for n in ("Stats", "score_max")}
    made["score_sum_exp"] = torch.zeros(batch, heads, rows, 1, dtype=torch.float64)
    whole = leaves["bias"].expand(batch, heads, rows, columns) if "bias" in leaves else None
    total = 0.0
    for b in range(batch):
        last, end = (rows, columns) if lengths is None else (lengths[0][b], lengths[1][b])
        for h in range(heads):
            keys, values = k[b, h // (heads // k.shape[1])], v[b, h // (heads // v.shape[1])]
            for i in range(last):
                diagonal = i + (end - last if bottom_right else 0)
                seen = [
                    j
                    for j in range(end)
                    if (right is None or j <= diagonal + right)
                    and (left is None or j > diagonal - left)
                    and (tiles is None or tiles(b, h, i // 128, j // 128))
                    and (whole is None or whole[b, h, i, j] != -math.inf)
                ]
                scores = keys[seen] @ q[b, h, i] * scale
                if whole is not None:
                    scores = scores + whole[b, h, i, seen]
                if alibi:
                    away = torch.tensor(seen, dtype=torch.float64) - i
                    scores = scores + slope(h, heads) * away
                if sink is not None:
                    scores = torch.cat([scores, leaves["sink"][0, h, 0]])
                if not len(scores):
                    continue
                p = torch.softmax(scores, 0)[: len(seen)]
                if kept is not None:
                    p = p * kept[b, h, i, seen]
                row = p @ values[seen]
                o[b, h, i] = row.detach()
                made["Stats"][b, h, i] = scores.detach().logsumexp(0)
                made["score_max"][b, h, i] = scores.detach().max()
                made["score_sum_exp"][b, h, i] = (scores - scores.max()).exp().sum().detach()
                if loss is not None:
                    total = total + row @ loss[b, h, i].double()
    gradients = {}
    if loss is not None:
        total.backward()
        gradients = {f"d{n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
    return {"O": o, **made, **gradients}
