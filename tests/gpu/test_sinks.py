"""Attention with sinks on the GPU: torch's kernels, values and gradients against float64."""

import pytest
import torch

from graphfuse.torch import attention_with_sinks, compile_report

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LOWEST = {t: torch.finfo(t).min for t in (torch.bfloat16, torch.float16, torch.float32)}


def exact(q, k, v, sinks, mask, is_causal):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        logits = logits + mask
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v


def window(queries, keys, width, dtype, last=True):
    """last: whether queries are the last of the keys' tokens, or the first."""
    i, j = torch.arange(queries, device=DEVICE)[:, None] + (keys - queries) * last, torch.arange(keys, device=DEVICE)
    seen = (j <= i) & (j > i - width)
    return torch.zeros(seen.shape, device=DEVICE, dtype=dtype).masked_fill(~seen, LOWEST[dtype]).expand(2, 1, -1, -1)


# Queries, keys, heads, columns, columns of values, type, and the window of a mask, "causal", a window or None.
CASES = [
    (300, 300, (8, 2), 64, 64, torch.bfloat16, "causal"),
    (300, 300, (8, 8), 36, 36, torch.float16, "causal"),
    (1, 333, (8, 2), 64, 64, torch.bfloat16, None),
    (200, 333, (8, 2), 64, 64, torch.bfloat16, "causal"),
    (300, 300, (8, 2), 64, 64, torch.bfloat16, 100),
    (201, 333, (8, 2), 64, 64, torch.float16, 50),
    (1, 333, (8, 2), 64, 64, torch.bfloat16, 100),
    (130, 130, (4, 2), 64, 64, torch.float32, 40),
    (300, 300, (8, 8), 256, 256, torch.bfloat16, "causal"),
    (300, 300, (8, 2), 64, 64, torch.bfloat16, "window 100"),
    (777, 777, (8, 2), 256, 256, torch.bfloat16, "window 128"),
    (300, 300, (8, 8), 36, 36, torch.float16, "window 1"),
    (130, 130, (4, 2), 64, 64, torch.float32, "window 40"),
    (130, 200, (4, 2), 64, 64, torch.bfloat16, "window 40"),
    (100, 100, (4, 2), 33, 20, torch.float32, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    queries, keys, heads, columns, value_columns, dtype, kind = case
    g = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((heads[0], queries, columns), (heads[1], keys, columns), (heads[1], keys, value_columns))
    given = [torch.randn(2, *shape, generator=g, device=DEVICE).to(dtype) for shape in shapes]
    given.append(torch.randn(heads[0], generator=g, device=DEVICE).to(dtype))
    mask, options = None, {"is_causal": kind == "causal"}
    if isinstance(kind, int):
        mask = window(queries, keys, kind, dtype)
        options = {"attn_mask": mask}
    elif kind not in ("causal", None):
        width = int(kind.removeprefix("window "))
        mask, options = window(queries, keys, width, dtype, last=False), {"is_causal": True, "window": width}
    leaves = [t.requires_grad_() for t in given]
    made = attention_with_sinks(*leaves, **options)
    outer = torch.randn(made.shape, generator=g, device=DEVICE).to(dtype)
    found = (made, *torch.autograd.grad(made, leaves, outer))
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = exact(*wide, None if mask is None else mask.double(), kind == "causal")
    wanted = (wanted, *torch.autograd.grad(wanted, wide, outer.double()))
    bound = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.03}[dtype]
    for name, a, b in zip(("out", "q", "k", "v", "sinks"), found, wanted, strict=True):
        assert (a.double() - b).abs().max() <= bound * b.abs().max(), name


@pytest.mark.parametrize("lowest", [-torch.inf, LOWEST[torch.bfloat16]], ids=str)
def test_rows_without_keys_are_0(lowest):
    q, k, v = (torch.randn(1, 4, 64, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    sinks, mask = torch.zeros(4, device=DEVICE, requires_grad=True), torch.zeros(64, 64, device=DEVICE).to(q.dtype)
    mask[5] = lowest
    made = attention_with_sinks(q, k, v, sinks, attn_mask=mask)
    grads = torch.autograd.grad(made.float().square().sum(), (q, k, v, sinks))
    assert not made[:, :, 5].any() and made[:, :, 4].any()
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, :, 5].any()


@pytest.mark.parametrize("queries", [257, 1])
def test_compiled(queries):
    """What inductor makes of torch's operators and their neighbours is what runs without it."""

    def called(q, k, v, sinks, mask):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention_with_sinks(q, k, v, sinks, attn_mask=mask).transpose(1, 2).contiguous()

    given = [
        torch.randn(2, n, h, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for n, h in ((queries, 8), (257, 2), (257, 2))
    ]
    given.append(torch.randn(8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True))
    mask = window(queries, 257, 100, torch.bfloat16)
    made, wanted = torch.compile(called, fullgraph=True)(*given, mask), called(*given, mask)
    torch.testing.assert_close(made, wanted, rtol=0.01, atol=0.01)
    pairs = (torch.autograd.grad(y.float().square().sum(), given) for y in (made, wanted))
    for a, b in zip(*pairs, strict=True):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_window_in_a_graph(is_trained):
    """Torch's attention with the mask of a window, and what is compiled in its place."""

    def called(q, k, v):
        places = torch.arange(513, device=DEVICE)
        seen = (places <= places[:, None]) & (places > places[:, None] - 128)
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    given = [
        torch.randn(2, heads, 513, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_(is_trained)
        for heads in (8, 2, 2)
    ]
    made, wanted = torch.compile(called, fullgraph=True, backend="graphfuse")(*given), called(*given)
    (entry,) = compile_report().graphs[-1].entries
    assert entry.became == "attention_with_sinks" and "a window of 128 keys: no mask, k and v not repeated" in entry.why
    torch.testing.assert_close(made, wanted, rtol=0.01, atol=0.01)
    if is_trained:
        pairs = (torch.autograd.grad(y.float().square().sum(), given) for y in (made, wanted))
        for a, b in zip(*pairs, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()
