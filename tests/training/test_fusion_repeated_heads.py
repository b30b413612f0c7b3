"""Heads of keys and values that graphs repeat for attention: where they are read as they were before, and where not."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.attention.mask_pass import has_grouped_kernel
from support.attention_graphs import CAUSED, NAME, N, checked, expanded, qkv, with_mask

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]

REPEATS = {
    "expand": expanded,
    "interleave": lambda t: t.repeat_interleave(2, dim=1),
    "torch's": lambda t: torch.repeat_interleave(t, 2, -3).contiguous(),
    "repeat": lambda t: t.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2),
    "stacked in rows": lambda t: t.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2),
}
OTHER_REPEATS = {
    "tiled": lambda t: t.repeat(1, 2, 1, 1),
    "tiled by views": lambda t: t[:, None].expand(2, 2, 2, N, 8).reshape(2, 4, N, 8),
    "scaled": lambda t: expanded(t) * 2,
    "by tokens": lambda t: t[:, :, : N // 2].repeat_interleave(2, dim=2).repeat_interleave(2, dim=1).contiguous(),
    "none": lambda t: torch.cat((t, t), dim=1),
}


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("name", REPEATS)
def test_heads_are_not_repeated(name, is_masked, attention_calls):
    repeat = REPEATS[name]

    def function(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril() if is_masked else None
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=mask, is_causal=not is_masked)

    note = "k and v not repeated"
    assert checked(function, *qkv(kv_heads=2)) == [(NAME, f"{CAUSED}, {note}" if is_masked else note)]
    (call,) = attention_calls
    assert call["enable_gqa"] is True and call["is_causal"] is True
    assert call["key"].meta["example_value"].shape == call["value"].meta["example_value"].shape == (2, 2, N, 8)


def test_one_head_for_all(attention_calls):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k.expand(2, 4, N, 8), v.repeat(1, 4, 1, 1))

    assert checked(function, *qkv(kv_heads=1)) == [(NAME, "k and v not repeated")]
    assert attention_calls[0]["key"].meta["example_value"].shape == (2, 1, N, 8)


@pytest.mark.parametrize("name", OTHER_REPEATS)
def test_what_repeats_otherwise_is_as_it_was(name, attention_calls):
    repeat = OTHER_REPEATS[name]
    steps = with_mask(lambda: torch.ones(N, N, dtype=torch.bool).tril())
    inputs = qkv(kv_heads=2)
    if name == "by tokens":
        # Heads go, tokens are repeated as before.
        assert checked(lambda q, k, v: steps(q, repeat(k), repeat(v)), *inputs) == [
            (NAME, f"{CAUSED}, k and v not repeated")
        ]
        assert attention_calls[0]["key"].meta["example_value"].shape == (2, 2, N, 8)
        return
    assert checked(lambda q, k, v: steps(q, repeat(k), repeat(v)), *inputs) == [(NAME, CAUSED)]
    assert not attention_calls[0].get("enable_gqa")


def test_heads_that_are_read_or_changed_elsewhere_stay_repeated(attention_calls):
    def read(q, k, v):
        wide = expanded(k)
        return F.scaled_dot_product_attention(q, wide, expanded(v), is_causal=True) + wide

    def changed(q, k, v):
        k, v = k * 1, v * 1
        wide, other, same = expanded(k), expanded(v), k.view_as(k)
        k.mul_(2)
        return F.scaled_dot_product_attention(q, wide, other, is_causal=True) + expanded(same)

    def keys_alone(q, k, v):
        return F.scaled_dot_product_attention(q, expanded(k), v, is_causal=True)

    q, k, v = qkv(kv_heads=2)
    for function, inputs in ((read, (q, k, v)), (changed, (q, k, v)), (keys_alone, (q, k, q * 2))):
        assert checked(function, *inputs) == []
    assert not any(call.get("enable_gqa") for call in attention_calls)


def test_where_torch_has_a_fast_kernel_for_groups_of_heads():
    hopper, half = (9, 0), torch.bfloat16
    assert has_grouped_kernel("cpu", torch.float32, {64}, True, None)
    assert has_grouped_kernel("cuda", half, {128}, True, hopper) and has_grouped_kernel(
        "cuda", half, {256}, True, hopper
    )
    assert has_grouped_kernel("cuda", torch.float16, {256}, False, (8, 9))
    assert not has_grouped_kernel("cuda", torch.float32, {128}, False, hopper)
    assert not has_grouped_kernel("cuda", half, {128, 64}, False, hopper)
    assert not has_grouped_kernel("cuda", half, {264}, False, hopper)
    assert not has_grouped_kernel("cuda", half, {256}, True, (8, 6))
    assert not has_grouped_kernel("cuda", half, {128}, False, (7, 5))
    assert not has_grouped_kernel("mps", half, {128}, False, None)


@pytest.mark.parametrize("is_read", [True, False])
def test_keys_that_are_changed_behind_the_call(is_read):
    """They are repeated as before if another tensor has their memory."""

    def function(q, k, v):
        k = k * 1
        same = k.view_as(k)
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        k.mul_(2)
        return out + same[0, 0, 0, 0] if is_read else out

    assert checked(function, *qkv(kv_heads=2)) == ([] if is_read else [(NAME, "k and v not repeated")])
