"""Attention with sinks: values and gradients of every kernel, which kernel is chosen and what it is given, errors,
torch's machinery around it."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphfuse import GraphNotSupportedError, VariantPackError, VariantPackTypeError
from graphfuse.torch import attention_with_sinks
from graphfuse.torch.attention import operator as attention
from graphfuse.torch.attention.operator import CPU, EFFICIENT, FLASH, PLAIN, WINDOWED, AttentionCase, select_kernel
from support.dispatched import Called

pytestmark = pytest.mark.torch

HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def reference(q, k, v, sinks, mask=None, is_causal=False, scale=None):
    """The definition: one more logit in each row, whose probability is dropped."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v


def drawn(dtype, queries, keys, heads=(4, 4), columns=16, value_columns=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (
        (2, heads[0], queries, columns),
        (2, heads[1], keys, columns),
        (2, heads[1], keys, value_columns or columns),
        (heads[0],),
    )
    return [torch.randn(shape, generator=g, dtype=DOUBLE).to(dtype) for shape in shapes]


def window(queries, keys, width):
    """The last queries of the keys' sequence, each of which sees so many keys."""
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)
    return (j <= i) & (j > i - width)


def additive(seen, dtype):
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def check(given, mask=None, is_causal=False, scale=None, outer=None):
    dtype = given[0].dtype
    leaves = [t.detach().requires_grad_() for t in given]
    made = attention_with_sinks(*leaves, attn_mask=mask, is_causal=is_causal, scale=scale)
    outer = torch.randn(made.shape, generator=torch.Generator().manual_seed(9)).to(dtype) if outer is None else outer
    found = (made, *torch.autograd.grad(made, leaves, outer))
    assert [t.dtype for t in found] == [dtype] * 5
    wide = [t.detach().double().requires_grad_() for t in given]
    of_mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    exact = reference(*wide, of_mask, is_causal, scale)
    wanted = (exact, *torch.autograd.grad(exact, wide, outer.double()))
    bound = {DOUBLE: 1e-12, FULL: 1e-5, HALF: 0.02, torch.float16: 0.01}[dtype]
    out, dq, dk, dv, _ = (t.abs().max() for t in wanted)
    # Gradients of q, k and sinks are sums of terms of either sign, each as exact as it is large.
    of_one_sign = outer.double().abs() * exact.detach().sign()
    dsinks = torch.autograd.grad(reference(*wide, of_mask, is_causal, scale), wide[3], of_one_sign)[0].abs().max()
    sizes = {"out": out, "q": 4 * dq, "k": 4 * dk, "v": dv, "sinks": dsinks}
    for (name, size), a, b in zip(sizes.items(), found, wanted, strict=True):
        assert (a.double() - b).abs().max() <= bound * size, name
    with torch.no_grad():
        assert torch.equal(attention_with_sinks(*given, attn_mask=mask, is_causal=is_causal, scale=scale), made)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, FULL, DOUBLE], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_values_and_gradients(dtype, heads):
    check(drawn(dtype, 7, 7, heads), is_causal=True)
    check(drawn(dtype, 5, 9, heads), scale=0.3)
    check(drawn(dtype, 5, 9, heads), is_causal=True)
    check(drawn(dtype, 7, 7, heads), additive(window(7, 7, 3), dtype))
    check(drawn(dtype, 5, 9, heads), window(5, 9, 4).expand(2, 1, 5, 9))
    for mask in (None, additive(window(1, 9, 4), dtype), torch.randn(2, 4, 1, 9).to(dtype)):
        check(drawn(dtype, 1, 9, heads), mask)
    check(drawn(dtype, 1, 9, heads), is_causal=True)


@pytest.mark.parametrize("dtype", [HALF, FULL, DOUBLE], ids=str)
def test_heads_of_any_size(dtype):
    for columns, value_columns in ((7, 7), (33, 33), (8, 6), (1, 1)):
        given = drawn(dtype, 5, 9, (4, 2), columns, value_columns)
        check(given)
        check(given, torch.randn(5, 9).to(dtype))


def test_masks_that_broadcast():
    for shape in ((9,), (5, 1), (4, 1, 9), (2, 1, 1, 9), (1, 4, 5, 9), ()):
        check(drawn(FULL, 5, 9), torch.randn(shape))
    check(drawn(FULL, 5, 9), torch.randn(9, 5).mT)


@pytest.mark.parametrize("dtype", [HALF, FULL, DOUBLE], ids=str)
def test_rows_without_keys_are_0(dtype):
    seen = window(5, 9, 4)
    seen[2] = False
    for mask in (seen, additive(seen, dtype), torch.zeros(5, 9, dtype=dtype).masked_fill(~seen, -torch.inf)):
        given = [t.requires_grad_() for t in drawn(dtype, 5, 9)]
        made = attention_with_sinks(*given, attn_mask=mask)
        assert not made[:, :, 2].any() and made[:, :, 1].any()
        assert all(g.isfinite().all() for g in torch.autograd.grad(made.sum(), given))
        check([t.detach() for t in given], mask)


def test_sinks_that_take_all_and_nothing():
    q, k, v, sinks = drawn(FULL, 5, 9)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    none = attention_with_sinks(q, k, v, torch.full_like(sinks, -torch.inf))
    torch.testing.assert_close(none, plain)
    assert not attention_with_sinks(q, k, v, torch.full_like(sinks, 1e4)).any()
    for sink in (-30.0, 30.0, 60.0):
        check([q, k, v, sinks + sink])


def test_layouts():
    q, k, v, sinks = drawn(HALF, 7, 7, (4, 2))
    by_tokens = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    check([*by_tokens, sinks], is_causal=True)
    check([t.mT.contiguous().mT for t in (q, k, v)] + [sinks])
    check([q, k, v, sinks], outer=torch.ones((), dtype=HALF).expand(q.shape))


def test_nothing_at_all():
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        given = [t.requires_grad_() for t in drawn(FULL, queries, keys)]
        made = attention_with_sinks(*given)
        assert made.shape == given[0].shape and not made.any()
        assert all(not g.any() for g in torch.autograd.grad(made.sum(), given))


def test_gradients_that_are_asked_for():
    given = drawn(FULL, 5, 9, (4, 2))
    full = [t.requires_grad_() for t in given]
    wanted = torch.autograd.grad(attention_with_sinks(*full).square().sum(), full)
    for asked in ((3,), (0, 2), (1,)):
        leaves = [t.detach().requires_grad_(i in asked) for i, t in enumerate(given)]
        found = torch.autograd.grad(attention_with_sinks(*leaves).square().sum(), [leaves[i] for i in asked])
        assert all(torch.equal(a, wanted[i]) for a, i in zip(found, asked, strict=True))


def test_sinks_of_another_type():
    *given, sinks = drawn(HALF, 5, 5)
    sinks = sinks.float().requires_grad_()
    made = attention_with_sinks(*given, sinks)
    (grad,) = torch.autograd.grad(made.sum(), sinks)
    assert made.dtype is HALF and grad.dtype is FULL
    assert torch.equal(made, attention_with_sinks(*given, sinks.detach().to(HALF)))


# Which kernel: of the device, the type, and what there is.
CASES = [
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True), FLASH),
    (AttentionCase("cuda", HALF, 1, 64, 64, 64, False, False), FLASH),
    (AttentionCase("cuda", torch.float16, 5, 64, 192, 192, False, False), FLASH),
    (AttentionCase("cuda", HALF, 5, 64, 256, 256, False, False), FLASH),
    (AttentionCase("cuda", HALF, 5, 64, 256, 256, False, False, capability=(8, 6)), EFFICIENT),
    (AttentionCase("cuda", HALF, 5, 64, 264, 264, False, False), EFFICIENT),
    (AttentionCase("cuda", HALF, 5, 64, 64, 64, False, True), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, True, False), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 32, False, False), EFFICIENT),
    (AttentionCase("cuda", FULL, 64, 64, 64, 64, False, True), EFFICIENT),
    (AttentionCase("cuda", torch.float16, 64, 64, 64, 64, False, True, capability=(7, 5)), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, capability=(7, 5)), PLAIN),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, capability=(9, 0), has_flash=False), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, has_window=True), WINDOWED),
    (AttentionCase("cuda", HALF, 64, 64, 256, 256, False, True, has_window=True, capability=(9, 0)), WINDOWED),
    (AttentionCase("cuda", HALF, 5, 64, 64, 64, False, True, has_window=True), EFFICIENT),
    (AttentionCase("cuda", FULL, 64, 64, 64, 64, False, True, has_window=True), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, has_window=True, has_flash=False), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, has_window=True, is_sharded=True), EFFICIENT),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, is_sharded=True), FLASH),
    (AttentionCase("cpu", HALF, 64, 64, 64, 64, False, True, has_window=True), CPU),
    (AttentionCase("cuda", DOUBLE, 64, 64, 64, 64, False, True), PLAIN),
    (AttentionCase("cuda", HALF, 0, 64, 64, 64, False, False), PLAIN),
    (AttentionCase("cpu", HALF, 64, 64, 7, 7, True, False), CPU),
    (AttentionCase("cpu", FULL, 5, 64, 64, 64, False, True), CPU),
    (AttentionCase("cpu", FULL, 5, 64, 64, 32, False, True), PLAIN),
    (AttentionCase("cpu", DOUBLE, 5, 64, 64, 64, False, True), PLAIN),
    (AttentionCase("meta", HALF, 64, 64, 64, 64, False, True), PLAIN),
    (AttentionCase("cpu", FULL, 64, 64, 64, 64, False, True, scale=0.0), PLAIN),
    (AttentionCase("cuda", HALF, 64, 64, 64, 64, False, True, scale=-0.5), PLAIN),
    (AttentionCase("cpu", FULL, 64, 64, 64, 64, False, False, scale=-0.5), CPU),
]


@pytest.mark.parametrize(("case", "kernel"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_which_kernel(case, kernel):
    assert select_kernel(case) is kernel


def on_gpus(monkeypatch, given, mask=None, is_causal=False, window=None):
    """Calls on the meta device with the kernel of GPUs, forward and backward: what it is given."""
    q, k, v = given[:3]
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    kernel = select_kernel(AttentionCase("cuda", q.dtype, *sizes, mask is not None, is_causal, window is not None))
    monkeypatch.setattr(attention, "select_kernel", lambda case: kernel)
    leaves = [t.to("meta").requires_grad_() for t in given]
    with Called() as called:
        mask = None if mask is None else mask.to("meta")
        made = attention_with_sinks(*leaves, attn_mask=mask, is_causal=is_causal, window=window)
        grads = torch.autograd.grad(made, leaves, torch.empty_like(made))
        made.mul_(2)  # a caller may change it
    assert made.shape == (*q.shape[:3], v.shape[3])
    assert [g.shape for g in grads] == [t.shape for t in given]
    return called.found


@pytest.mark.parametrize("columns", [64, 36, 7])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_flash_attention_is_given_what_it_takes(monkeypatch, heads, columns):
    found = on_gpus(monkeypatch, drawn(HALF, 50, 50, heads, columns), is_causal=True)
    forward, backward = (found[f"aten::_scaled_dot_product_flash_attention{part}"] for part in ("", "_backward"))
    wide = -(-columns // 8) * 8
    for call in (forward, backward):
        assert call["query"].shape == (2, 8, 50, wide) and call["is_causal"] is True
        assert call["key"].shape == call["value"].shape == (2, heads[1], 50, wide)  # it takes fewer heads itself
        assert call["scale"] == pytest.approx(columns**-0.5)
        assert all(t.stride(-1) == 1 for t in call.values() if isinstance(t, torch.Tensor) and t.dim() == 4)
    assert backward["out"].shape == backward["grad_out"].shape == (2, 8, 50, wide)
    assert backward["logsumexp"].shape == (2, 8, 50) and backward["logsumexp"].dtype is FULL
    assert backward["logsumexp"].is_contiguous() and (backward["max_q"], backward["max_k"]) == (50, 50)


@pytest.mark.parametrize("columns", [64, 36, 256])
def test_flash_attention_with_a_window_is_given_what_it_takes(monkeypatch, columns):
    found = on_gpus(monkeypatch, drawn(HALF, 50, 50, (8, 2), columns), is_causal=True, window=20)
    forward, backward = (found[f"aten::_flash_attention_{part}"] for part in ("forward", "backward"))
    wide = -(-columns // 8) * 8
    for call in (forward, backward):  # by tokens, then by heads
        assert call["query"].shape == (2, 50, 8, wide)
        assert call["key"].shape == call["value"].shape == (2, 50, 2, wide)
        assert (call["window_size_left"], call["window_size_right"], call["is_causal"]) == (19, 0, False)
        assert (call["max_q"], call["max_k"], call["dropout_p"]) == (50, 50, 0.0)
        assert call["scale"] == pytest.approx(columns**-0.5)
        assert all(t.stride(-1) == 1 for t in call.values() if isinstance(t, torch.Tensor) and t.dim() == 4)
    assert backward["out"].shape == backward["grad_out"].shape == (2, 50, 8, wide)
    assert backward["logsumexp"].shape == (2, 8, 50) and backward["logsumexp"].is_contiguous()


@pytest.mark.parametrize("columns", [64, 36])
@pytest.mark.parametrize("kernel", [FLASH, WINDOWED, EFFICIENT], ids=lambda kernel: kernel.name)
def test_results_have_one_layout_in_all_modes(monkeypatch, kernel, columns):
    """What compilers are told of by tensors without values is what they get."""
    monkeypatch.setattr(attention, "select_kernel", lambda case: kernel)
    given = [t.to("meta") for t in drawn(HALF, 50, 50, (8, 2), columns)]
    options = {"is_causal": True, "window": 20 if kernel is WINDOWED else None}
    strides = set()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            leaves = [t.clone().requires_grad_(mode is torch.enable_grad) for t in given]
            strides.add(attention_with_sinks(*leaves, **options).stride())
    assert len(strides) == 1


@pytest.mark.parametrize("dtype", [HALF, FULL, DOUBLE], ids=str)
def test_windows(dtype):
    """They are what their masks are, on every kernel."""
    for queries, keys, width in ((9, 9, 1), (9, 9, 4), (9, 9, 9), (5, 9, 2), (9, 5, 3), (1, 9, 1)):
        given = drawn(dtype, queries, keys, (4, 2))
        seen = torch.ones(queries, keys, dtype=torch.bool).tril().triu(1 - width)
        made = attention_with_sinks(*given, is_causal=True, window=width)
        near = {"rtol": 0.02, "atol": 0.02} if dtype is HALF else {}
        torch.testing.assert_close(made, attention_with_sinks(*given, attn_mask=seen), **near)
        if queries <= keys:
            check(given, seen)
        outer = torch.randn_like(made)
        pairs = []
        for options in ({"is_causal": True, "window": width}, {"attn_mask": seen}):
            leaves = [t.clone().requires_grad_() for t in given]
            pairs.append(torch.autograd.grad(attention_with_sinks(*leaves, **options), leaves, outer))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, **near)


def test_without_sinks():
    """As compiled graphs have windows."""
    call = torch.ops.graphfuse.attention_with_sinks
    given = [t.requires_grad_() for t in drawn(DOUBLE, 9, 9, (4, 2))[:3]]
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    made = call(*given, None, None, True, None, 4)
    plain = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(made, plain)
    pairs = (torch.autograd.grad(out.square().sum(), given) for out in (made, plain))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("keys", [64, 70])
@pytest.mark.parametrize("queries", [50, 1])
def test_the_memory_efficient_kernel_is_given_what_it_takes(monkeypatch, queries, keys, dtype):
    mask = additive(window(queries, keys, 30), dtype).expand(2, 1, queries, keys)
    found = on_gpus(monkeypatch, drawn(dtype, queries, keys, (8, 2), 36, 20), mask)
    forward, backward = (found[f"aten::_scaled_dot_product_efficient_attention{part}"] for part in ("", "_backward"))
    heads, rows = (8, 50) if queries > 1 else (2, 4)  # one query of heads that share keys: as many of one head
    for call in (forward, backward):
        assert call["query"].shape == (2, heads, rows, 40)
        assert call["key"].shape == (2, heads, keys, 40) and call["value"].shape == (2, heads, keys, 24)
        bias = call["attn_bias"]
        assert bias.shape == (2, heads, rows, keys) and bias.dtype is dtype
        assert bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1])
        assert call["scale"] == pytest.approx(36**-0.5)
    assert forward["compute_log_sumexp"] is True and backward["grad_input_mask"] == [True, True, True, False]
    for name in ("out", "grad_out_"):  # a token's heads beside each other
        assert backward[name].shape == (2, heads, rows, 24) and backward[name].transpose(1, 2).is_contiguous()
    assert backward["logsumexp"].shape == (2, heads, -(-rows // 32) * 32)


def refused(error, message, *given, **named):
    with pytest.raises(error, match=message):
        attention_with_sinks(*given, **named)


def test_windows_of_dtensors(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "select_kernel", lambda case: select_kernel(replace(case, device="cuda")))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        *given, sinks = [t.to("meta").requires_grad_() for t in drawn(HALF, 9, 9, (4, 2))]
        given = [DTensor.from_local(t, mesh, [Shard(0)]) for t in given]
        sinks = DTensor.from_local(sinks, mesh, [Replicate()])
        made = attention_with_sinks(*given, sinks, is_causal=True, window=4)
        assert made.placements == (Shard(0),) and made.shape == given[0].shape
        grads = torch.autograd.grad(made.sum(), [*given, sinks])
        assert [g.shape for g in grads] == [t.shape for t in (*given, sinks)]
    finally:
        torch.distributed.destroy_process_group()


def test_errors_name_the_argument():
    q, k, v, sinks = drawn(FULL, 5, 9, (4, 2))
    for options in ({"window": 3}, {"window": 0, "is_causal": True}, {"window": -1, "is_causal": True}):
        refused(VariantPackError, f"window is {options['window']} with is_causal", q, k, v, sinks, **options)
    refused(VariantPackTypeError, "q is torch.int64", q.long(), k, v, sinks)
    refused(VariantPackTypeError, "k is torch.bfloat16; accepted: torch.float32, as q", q, k.to(HALF), v, sinks)
    refused(VariantPackTypeError, "v is torch.float64", q, k, v.double(), sinks)
    refused(VariantPackTypeError, "sinks is torch.int32", q, k, v, sinks.int())
    refused(VariantPackError, "v is on meta; accepted: cpu", q, k, v.to("meta"), sinks)
    refused(VariantPackError, r"q has shape \(4, 5, 16\)", q[0], k, v, sinks)
    refused(VariantPackError, r"k has shape \(2, 2, 9, 15\); accepted: \(2, 4 or a divisor", q, k[..., 1:], v, sinks)
    refused(VariantPackError, r"k has shape \(2, 3, 9, 16\)", q, k[:, [0, 1, 0]], v, sinks)
    refused(VariantPackError, r"k has shape \(1, 2, 9, 16\)", q, k[:1], v, sinks)
    refused(VariantPackError, r"v has shape \(2, 2, 8, 16\); accepted: \(2, 2, 9, columns\)", q, k, v[:, :, 1:], sinks)
    refused(VariantPackError, r"sinks has shape \(2,\); accepted: \(4,\)", q, k, v, sinks[:2])
    refused(VariantPackError, "is_causal is True with an attn_mask", q, k, v, sinks, attn_mask=q, is_causal=True)
    refused(VariantPackTypeError, "attn_mask is torch.float64", q, k, v, sinks, attn_mask=torch.ones(5, 9).double())
    refused(VariantPackError, r"attn_mask has shape \(5, 8\)", q, k, v, sinks, attn_mask=torch.ones(5, 8))
    refused(
        VariantPackError, r"attn_mask has shape \(1, 1, 1, 5, 9\)", q, k, v, sinks, attn_mask=torch.ones(1, 1, 1, 5, 9)
    )
    mask = torch.ones(5, 9, requires_grad=True)
    refused(VariantPackTypeError, "attn_mask requires a gradient", q, k, v, sinks, attn_mask=mask)
    with torch.no_grad():
        attention_with_sinks(q, k, v, sinks, attn_mask=mask)


def test_derivatives_that_are_refused():
    given = [t.requires_grad_() for t in drawn(FULL, 3, 3)]
    (dq,) = torch.autograd.grad(attention_with_sinks(*given).square().sum(), given[:1], create_graph=True)
    with pytest.raises(GraphNotSupportedError, match="attention_with_sinks: its gradient has no derivative"):
        dq.sum().backward()
    with pytest.raises(GraphNotSupportedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda s: attention_with_sinks(*given[:3], s), (given[3].detach(),), (torch.ones(4),))
    with pytest.raises(GraphNotSupportedError, match="differentiated by torch.func"):
        torch.func.grad(lambda s: attention_with_sinks(*given[:3], s).sum())(given[3].detach())


def test_opcheck():
    operator = torch.ops.graphfuse.attention_with_sinks.default
    leaves = [t.requires_grad_() for t in drawn(HALF, 3, 5, (4, 2))]
    found = torch.library.opcheck(operator, (*leaves, torch.randn(3, 5).to(HALF), False, 0.5))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "gradients"])
def test_compiled(mode):
    """What a compiler gets are torch's operators."""
    graphs = []

    def kept(graph, inputs):
        graphs.append({str(n.target) for n in graph.graph.nodes})
        return graph

    def called(q, k, v, sinks, mask):
        return attention_with_sinks(q, k, v, sinks, attn_mask=mask) * 2

    given, mask = [t.requires_grad_(mode == "gradients") for t in drawn(HALF, 5, 9, (4, 2))], torch.randn(5, 9).to(HALF)
    compiled = torch.compile(called, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)():
        made, wanted = compiled(*given, mask), called(*given, mask)
    assert torch.equal(made, wanted)
    if mode != "inference_mode":  # where some versions of torch leave autograd out, and with it what is traced through
        assert any("_scaled_dot_product_flash_attention_for_cpu" in name for name in graphs[0])
        assert not any("graphfuse" in name for name in graphs[0])
    if mode == "gradients":
        pairs = (torch.autograd.grad(y.float().square().sum(), given) for y in (made, wanted))
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, sinks):
            return attention_with_sinks(q, k, v, sinks, is_causal=True)

    given = drawn(FULL, 5, 5)
    program = torch.export.export(Module(), tuple(given))
    assert torch.equal(program.module()(*given), Module()(*given))


def test_exported_with_a_window_for_any_number_of_tokens():
    class Module(torch.nn.Module):
        def forward(self, q, k, v, sinks):
            return attention_with_sinks(q, k, v, sinks, is_causal=True, window=4)

    tokens = torch.export.Dim("tokens")
    shapes = (*({2: tokens},) * 3, None)
    module = torch.export.export(Module(), tuple(drawn(FULL, 9, 9)), dynamic_shapes=shapes).module()
    for number in (2, 4, 30):
        given = drawn(FULL, number, number)
        torch.testing.assert_close(module(*given), Module()(*given))
