"""Attention masks in graphs that torch compiles: those that constants make go where torch has kernels without them, and
all others stay. Values and gradients are those of torch without a compiler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphfuse.torch import compile_report
from graphfuse.torch.attention import WINDOWED
from graphfuse.torch.fusion import attention, constant
from graphfuse.torch.fusion.attention import OPERATOR, has_grouped_kernel, rewrite
from graphfuse.torch.fusion.mask import ALL, CAUSAL, Seen, allows
from graphfuse.torch.fusion.surroundings import regions
from support.dispatched import Called

pytestmark = pytest.mark.usefixtures("nothing_compiled")
NAME = "scaled_dot_product_attention"
N = 6
CAUSED, SEEN = "causal: no mask", "all is seen: no mask"
INF = float("inf")


def heads(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(queries=N, keys=N, kv_heads=4, dtype=torch.float32):
    shapes = (2, 4, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)
    return tuple(heads(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def checked(function, *inputs, dynamic=None):
    """Compiles and compares values and gradients. Returns what the report says of attention."""
    torch.compiler.reset()  # as sizes would vary for torch otherwise
    mine, own = ([t.clone().requires_grad_(t.is_floating_point()) for t in inputs] for _ in range(2))
    run = torch.compile(function, backend="graphfuse", fullgraph=True, dynamic=dynamic, options={"then": "aot_eager"})
    got, want = run(*mine), function(*own)
    torch.testing.assert_close(got, want)
    of = [t for t in own if t.requires_grad]
    wanted = torch.autograd.grad(want.square().sum(), of, allow_unused=True)
    found = torch.autograd.grad(got.square().sum(), [t for t in mine if t.requires_grad], allow_unused=True)
    for grad, other in zip(found, wanted, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
    return [(e.became, e.why) for e in compile_report().graphs[-1].entries]


def with_mask(make, **more):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(), **more)


# Masks


def filled():
    mask = torch.zeros(N, N)
    mask.masked_fill_(torch.ones(N, N, dtype=torch.bool).triu(1), -INF)
    return mask


def set_row_by_row():
    mask = torch.zeros(N, N, dtype=torch.bool)
    for i in range(N):
        mask[i, : i + 1] = True
    return mask


def multiplied():
    mask = torch.full((N, N), torch.finfo(torch.float32).min)
    mask *= torch.arange(N) > torch.arange(N).reshape(-1, 1)
    return mask[None, None].expand(2, 1, -1, -1)


def of_documents():
    positions = torch.arange(N)[None]
    document = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, rows = torch.arange(2)[:, None, None, None], torch.arange(N)[None, None, :, None]
    columns = torch.arange(N)[None, None, None]
    document = document.expand(2, -1)
    return (columns <= rows) & (document[batch, rows] == document[batch, columns])


CAUSAL_MASKS = {
    "tril": lambda: torch.ones(N, N, dtype=torch.bool).tril(),
    "not triu": lambda: ~torch.triu(torch.ones(N, N), diagonal=1).bool(),
    "compared": lambda: torch.arange(N)[:, None] >= torch.arange(N),
    "-inf": lambda: torch.full((N, N), -INF).triu(1),
    "the least": lambda: torch.full((N, N), torch.finfo(torch.float32).min).triu(1),
    "where": lambda: torch.where(torch.arange(N)[:, None] < torch.arange(N), -INF, 0.0),
    "broadcast": lambda: (torch.arange(N)[:, None] >= torch.arange(N))[None, None].expand(2, 4, N, N),
    "a wide window": lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(-N),
    "filled": filled,
    "set": set_row_by_row,
    "multiplied": multiplied,
    "documents": of_documents,
}
SEEN_MASKS = {
    "ones": lambda: torch.ones(N, N, dtype=torch.bool),
    "zeros": lambda: torch.zeros(N, N),
    "a row": lambda: torch.arange(N)[None] <= N,
    "heads": lambda: torch.ones(2, 4, N, N).bool(),
}


def one_less():
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    mask[N - 1, 1] = False
    return mask


OTHER_MASKS = {
    "one more": lambda: torch.ones(N, N, dtype=torch.bool).tril(1),
    "upper": lambda: torch.ones(N, N, dtype=torch.bool).triu(),
    "transposed": lambda: (torch.arange(N)[:, None] >= torch.arange(N)).T.contiguous(),
    "a window": lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(-2),
    "one less": one_less,
    "added": lambda: torch.ones(N, N).tril(),
    "not hidden": lambda: torch.full((N, N), -1e9).triu(1),
    "of one sample": lambda: (
        torch.ones(2, 1, N, N, dtype=torch.bool).tril() | (torch.arange(2) == 1)[:, None, None, None]
    ),
}


@pytest.mark.parametrize("name", CAUSAL_MASKS)
def test_causal_masks_go(name, attention_calls):
    assert checked(with_mask(CAUSAL_MASKS[name]), *qkv()) == [(NAME, CAUSED)]
    (call,) = attention_calls
    assert call.get("attn_mask") is None and call["is_causal"] is True


@pytest.mark.parametrize("name", SEEN_MASKS)
def test_masks_that_hide_nothing_go(name, attention_calls):
    assert checked(with_mask(SEEN_MASKS[name], scale=0.3), *qkv()) == [(NAME, SEEN)]
    (call,) = attention_calls
    assert call.get("attn_mask") is None and not call.get("is_causal") and call["scale"] == 0.3


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_stay(name, attention_calls):
    ((became, why),) = checked(with_mask(OTHER_MASKS[name]), *qkv())
    assert not became and (
        "neither causal" in why or "no faster kernel for a window of 3 keys" in why or "not known" in why
    )
    assert attention_calls[0]["attn_mask"] is not None


def test_a_rectangle_is_not_causal(attention_calls):
    def lower_right():
        return torch.ones(N, N + 3, dtype=torch.bool).tril(3)

    def upper_left():
        return torch.ones(N, N + 3, dtype=torch.bool).tril()

    for make in (lower_right, upper_left):
        ((became, why),) = checked(with_mask(make), *qkv(keys=N + 3))
        assert not became and "neither causal" in why
    assert checked(with_mask(lambda: torch.ones(N, N + 3).bool()), *qkv(keys=N + 3)) == [(NAME, SEEN)]
    # Of one query, the lower right triangle is all.
    one = checked(with_mask(lambda: torch.ones(1, N, dtype=torch.bool).tril(N - 1)), *qkv(queries=1))
    assert one == [(NAME, SEEN)]


def test_rows_without_a_key_stay():
    ((became, why),) = checked(with_mask(lambda: torch.full((N, N), torch.finfo(torch.float32).min)), *qkv())
    assert not became and "neither" in why


def test_arguments_by_position(attention_calls):
    def function(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.5)

    assert checked(function, *qkv()) == [(NAME, CAUSED)]
    assert attention_calls[0]["scale"] == 0.5


def test_what_is_computed_from_inputs_stays(attention_calls):
    padding = torch.ones(2, N, dtype=torch.bool)
    padding[1, 4:] = False

    def padded(q, k, v, padding):
        mask = torch.ones(N, N, dtype=torch.bool).tril() & padding[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    ((became, why),) = checked(padded, *qkv(), padding)
    assert not became and why == "its mask stays: it is computed from l_padding_"

    def with_bias(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + torch.zeros(N, N))

    assert "computed from l_bias_" in checked(with_bias, *qkv(), torch.zeros(N, N))[0][1]
    assert all(call["attn_mask"] is not None for call in attention_calls)


def test_what_is_random_or_has_gradients_stays():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.rand(N, N) > -1)

    torch.compile(function, backend="graphfuse", options={"then": "aot_eager"})(*qkv())
    (entry,) = compile_report().left
    assert "not known that it is the same each time" in entry.why

    def learned(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(N, N, requires_grad=True))

    # Not in one graph, as Dynamo makes no leaves in some versions.
    torch.compile(learned, backend="graphfuse", options={"then": "aot_eager"})(*qkv())
    assert not compile_report().replaced


def test_a_mask_is_what_it_is_at_the_call(attention_calls):
    """Changed before the first call, between calls by a constant, and by an input."""

    def function(q, k, v):
        mask = torch.zeros(N, N, dtype=torch.bool)
        view = mask.view(-1)
        view.fill_(True)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask[:, 3:] = False
        return first + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    entries = checked(function, *qkv())
    assert "changes it later" in entries[0][1] and "neither causal" in entries[1][1]

    def by_input(q, k, v, seen):
        mask = torch.ones(N, N, dtype=torch.bool)
        mask[0].logical_and_(seen)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    seen = torch.arange(N) < 2
    assert "computed from l_seen_" in checked(by_input, *qkv(), seen)[0][1]
    assert all(call["attn_mask"] is not None for call in attention_calls)


def test_a_mask_that_is_read_elsewhere_is_still_made(attention_calls):
    def function(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + mask.sum()

    assert checked(function, *qkv()) == [(NAME, CAUSED)]


def test_numbers_of_tokens_that_vary():
    def function(q, k, v):
        n = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(n, n, dtype=torch.bool).tril())

    ((became, why),) = checked(function, *qkv(), dynamic=True)
    assert not became and "vary" in why


def test_sequences_that_vary_with_a_mask_that_does_not():
    inputs = qkv()
    for t in inputs:
        torch._dynamo.mark_dynamic(t, 0)
    run = torch.compile(with_mask(CAUSAL_MASKS["tril"]), backend="graphfuse", options={"then": "aot_eager"})
    torch.testing.assert_close(run(*inputs), F.scaled_dot_product_attention(*inputs, is_causal=True))
    (entry,) = compile_report().graphs[-1].entries
    assert (entry.became, entry.why) == (NAME, CAUSED)


def test_a_mask_that_is_too_large(monkeypatch):
    monkeypatch.setattr(constant, "LARGEST", N * N - 1)
    ((_, why),) = checked(with_mask(lambda: torch.ones(N, N, dtype=torch.bool)), *qkv())
    assert "too large to be looked at" in why


def test_transforms_are_left():
    q, k, v = qkv()
    function = torch.vmap(with_mask(CAUSAL_MASKS["compared"]), in_dims=(0, None, None))
    got = torch.compile(lambda *given: function(*given), backend="graphfuse", options={"then": "aot_eager"})(q, k, v)
    torch.testing.assert_close(got, function(q, k, v))
    assert all("torch.func" in e.why for e in compile_report().left) and not compile_report().replaced


def test_a_view_of_the_result_keeps_its_layout():
    def function(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL_MASKS["tril"]())
        return out[:, :2].view(2, 2, -1)

    ((became, why),) = checked(function, *qkv())
    assert not became and "needs the layout" in why


def test_nodes_of_a_mask_are_gone(attention_calls, monkeypatch):
    left, erase = [], attention.erase

    def erased(graph, dead):
        erase(graph, dead)
        left.extend(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))

    monkeypatch.setattr(attention, "erase", erased)
    checked(with_mask(of_documents), *qkv())
    assert left == [NAME]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_what_masks_allow(dtype, monkeypatch):
    monkeypatch.setattr("graphfuse.torch.fusion.mask._AT_ONCE", 16)  # rows at a time

    def made(seen):
        return seen if dtype is torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -INF)

    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    assert allows(made(lower), 7, 7) == CAUSAL and allows(made(lower)[None, None].expand(3, 2, 7, 7), 7, 7) == CAUSAL
    assert allows(made(torch.ones(5, 7).bool()), 5, 7) == ALL and allows(made(torch.ones(7).bool()), 5, 7) == ALL
    assert allows(made(torch.ones(1, 1).bool()), 1, 1) == ALL
    for other, keys in ((lower.T, 7), (~lower, 7), (lower[:, :5], 5), (lower[:1].expand(7, 7), 7), (lower & ~lower, 7)):
        assert allows(made(other), 7, keys) is None
    assert allows(made(lower[-1:]).expand(7, 7), 7, 7) == ALL
    for width in (1, 3, 6):
        assert allows(made(lower.triu(1 - width)), 7, 7) == Seen(True, width)
        assert allows(made(lower.triu(1 - width)[:5]), 5, 7) is None
    for i, j in ((0, 0), (6, 6), (6, 1), (3, 4)):
        changed = lower.clone()
        changed[i, j] = not changed[i, j]
        for other in (changed, torch.stack([lower, changed]), torch.stack([changed, lower])):
            assert allows(made(other), 7, 7) is None
        changed = lower.triu(-3)
        changed[i, j] = not changed[i, j]
        assert allows(made(changed), 7, 7) is None
    assert allows(torch.ones(2, 2, dtype=torch.int64), 2, 2) is None and allows(made(lower)[:0], 0, 7) is None
    if dtype is not torch.bool:
        assert allows(torch.full((2, 2), float("nan"), dtype=dtype), 2, 2) is None


# Heads


def expanded(t):
    return t[:, :, None].expand(2, 2, 2, N, 8).reshape(2, 4, N, 8)


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
    steps = with_mask(CAUSAL_MASKS["tril"])
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
        wide, other = expanded(k), expanded(v)
        k.mul_(2)
        return F.scaled_dot_product_attention(q, wide, other, is_causal=True) + expanded(k)

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


def test_what_a_function_changes_in_place_by_position_counts():
    def of_a_mask(q, k, v):
        i = torch.arange(N)
        mask = torch.where(i <= i[:, None], 0.0, -INF)
        F.relu(mask, True)  # all zeros
        return F.scaled_dot_product_attention(q, k, v, mask)

    def of_repeated_heads(q, k, v):
        k = k * 1
        many, values = (t.repeat_interleave(2, 1) for t in (k, v))
        F.relu(k, True)
        return F.scaled_dot_product_attention(q, many, values, is_causal=True)

    assert all("causal" not in why for _, why in checked(of_a_mask, *qkv()))
    assert all("not repeated" not in why for _, why in checked(of_repeated_heads, *qkv(kv_heads=2)))


def test_keys_that_are_changed_behind_the_call_are_repeated_as_before():
    def function(q, k, v):
        k = k * 1
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        k.mul_(2)
        return out

    assert checked(function, *qkv(kv_heads=2)) == []


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.5])
def test_causal_kernels_take_a_positive_scale(scale):
    function = with_mask(lambda: torch.arange(N) <= torch.arange(N)[:, None], scale=scale)
    q, k, v = qkv()
    run = torch.compile(function, backend="graphfuse", dynamic=False, options={"then": "aot_eager"})
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v), function(q, k, v))
    ((became, why),) = [(e.became, e.why) for e in compile_report().graphs[-1].entries]
    assert (became == NAME) is (scale > 0) and ("positive scale" in why) is (scale <= 0)


def test_a_copy_on_another_device_is_no_alias():
    graph = torch.fx.Graph()
    mask = graph.call_function(torch.ones, ((4, 4),), {"dtype": torch.bool})
    there = graph.call_method("to", (mask, "cuda"))
    changed = graph.call_method("fill_", (mask, False))
    read = graph.call_method("clone", (there,))
    graph.output(read)
    with FakeTensorMode():
        for node, device in ((mask, "cpu"), (changed, "cpu"), (there, "cuda"), (read, "cuda")):
            node.meta["example_value"] = torch.ones(4, 4, dtype=torch.bool, device=device)
    assert constant.Constants(graph).value(read, read).all()


# Windows
ANY = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def band(width):
    return lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(1 - width)


@pytest.fixture
def windows(monkeypatch):
    """Kernels are chosen as if they all took windows: what the operator makes a mask of is computed."""
    monkeypatch.setattr(attention, "kernel_of", lambda *given: WINDOWED)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("width", [1, 2, N - 1])
def test_windows_go(width, attention_calls):
    def function(q, k, v):
        return with_mask(band(width))(q, expanded(k), expanded(v))

    note = f"a window of {width} keys: no mask, k and v not repeated"
    assert checked(function, *qkv(kv_heads=2)) == [(OPERATOR, note)]
    assert checked(with_mask(band(width), scale=0.3), *qkv()) == [(OPERATOR, note.partition(",")[0])]
    assert not attention_calls


@pytest.mark.usefixtures("windows")
def test_windows_stay_where_the_operator_has_other_rules():
    def in_three(q, k, v):
        return with_mask(band(2))(q[:, 0], k[:, 0], v[:, 0])

    def by_one_head(q, k, v):
        return with_mask(band(2))(q, k[:1], v[:1])

    def dropped(q, k, v):
        return with_mask(band(2), dropout_p=0.5)(q, k, v) * 0

    def other_scale(q, k, v):
        return with_mask(band(2), scale=-1.0)(q, k, v)

    def chosen(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return with_mask(band(2))(q, k, v)

    for function, why in (
        (in_three, "no faster kernel for a window of 2 keys"),
        (by_one_head, "no faster kernel for a window of 2 keys"),
        (dropped, "no faster kernel for a window of 2 keys"),
        (other_scale, "positive scale"),
        (chosen, "which kernels attention may take is set"),
    ):
        ((became, reason),) = checked(function, *qkv())
        assert not became and why in reason


@pytest.mark.usefixtures("windows")
def test_windows_stay_where_the_result_is_changed():
    """Torch's kernels but the mathematical one, and the operator, read the result in backward."""

    def changed(q, k, v):
        out = with_mask(band(2))(q, k, v)
        out.transpose(1, 2).mul_(2)
        return out

    with sdpa_kernel(SDPBackend.MATH):
        assert checked(changed, *qkv()) == [("", "its mask stays: its result is changed in place")]


@pytest.mark.parametrize(
    ("dtype", "columns", "allowed", "became", "why"),
    [
        (torch.bfloat16, 256, ANY, OPERATOR, "a window of 16 keys: no mask"),
        (torch.bfloat16, 264, ANY, "", "no faster kernel for a window of 16 keys"),
        (torch.float32, 64, ANY, "", "no faster kernel for a window of 16 keys"),
        (torch.float16, 36, ANY, OPERATOR, "a window of 16 keys: no mask"),
        (torch.float16, 36, [SDPBackend.EFFICIENT_ATTENTION], "", "which kernels attention may take is set"),
    ],
)
def test_windows_on_a_gpu(dtype, columns, allowed, became, why):
    """What is put into a graph of tensors on one: torch's flash attention and nothing of the mask."""
    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    places = graph.call_function(torch.arange, (64,), {"device": "cuda"})
    own = graph.call_method("unsqueeze", (places, 1))
    first = graph.call_function(torch.sub, (own, 16))
    seen = [graph.call_function(torch.le, (places, own)), graph.call_function(torch.gt, (places, first))]
    mask = graph.call_function(torch.logical_and, tuple(seen))
    many = [graph.call_method("repeat_interleave", (t, 4, 1)) for t in (k, v)]
    out = graph.call_function(F.scaled_dot_product_attention, (q, *many), {"attn_mask": mask})
    graph.output(out)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as fake:
        given = [torch.empty(2, heads, 64, columns, device="cuda", dtype=dtype) for heads in (8, 2, 2)]
        Recorded(module).run(*given)
    with sdpa_kernel(allowed):
        (outcome,) = rewrite(module, regions(graph))
    assert outcome.became == became and why in outcome.why
    if became:
        assert outcome.node.args[0] is q and outcome.node.args[3:] == (None, None, True, None, 16)
        assert not any(step in graph.nodes for step in (places, own, first, mask, *seen))
        with fake, Called() as called:
            made = module(*given)
        assert (made.shape, made.dtype) == (given[0].shape, dtype)
        assert list(called.found) == ["aten::_flash_attention_forward"]


class Recorded(torch.fx.Interpreter):
    def run_node(self, node):
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]
