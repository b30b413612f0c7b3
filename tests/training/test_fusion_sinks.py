"""Attention with sinks in graphs that are compiled: what is found, what is left and why, values and gradients."""

import pytest
import torch
from torch.nn.functional import dropout, softmax

from graphfuse.torch import compile_report
from graphfuse.torch.compile_backend.compiled_graphs import replace_in
from graphfuse.torch.regions.selection import ELSEWHERE
from support.traces import recorded

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]

HALF, FULL = torch.bfloat16, torch.float32
B, H, G, N, M, D = 2, 4, 2, 5, 7, 8
SCALE = 0.3
LOWEST = torch.finfo(FULL).min


def repeated(t, times=H // G):
    """As models of transformers repeat keys and values."""
    b, g, n, d = t.shape
    return t[:, :, None, :, :].expand(b, g, times, n, d).reshape(b, g * times, n, d)


def column(s, q):
    return s.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)


def gpt_oss(q, k, v, s, m):
    k, v = repeated(k), repeated(v)
    logits = torch.matmul(q, k.transpose(2, 3)) * SCALE
    logits = logits + m
    logits = torch.cat([logits, column(s, q)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    probs = softmax(logits, dim=-1, dtype=logits.dtype)
    weights = dropout(probs[..., :-1], p=0.0, training=True).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def bare(q, k, v, s, m):
    """Nothing is subtracted, added or repeated."""
    probs = torch.cat((q @ k.transpose(-1, -2), column(s, q)), -1).softmax(-1)
    return probs[:, :, :, 0:-1] @ v


def in_float32(q, k, v, s, m):
    k, v = repeated(k), repeated(v)
    logits = (q.float() @ k.float().permute(0, 1, 3, 2)) / 8
    logits = torch.cat([m.float() + logits, s[None, :, None, None].float().expand(B, H, N, 1)], -1)
    logits = logits - logits.amax(-1, keepdim=True)
    return dropout(softmax(logits, -1)[..., :-1].to(q.dtype), 0.3, training=False) @ v


def interleaved(q, k, v, s, m):
    k, v = k.repeat_interleave(H // G, dim=1), torch.repeat_interleave(v, H // G, 1)
    logits = torch.cat([SCALE * (q @ k.transpose(-2, -1)) + m, s.view(1, H, 1, 1).expand(B, H, N, 1)], -1)
    return (torch.softmax(logits, dim=3)[..., :-1] @ v).view(B * H, N, D)


def where(q, k, v, s, m):
    logits = torch.where(m == 0, q @ k.transpose(-1, -2) * SCALE, float("-inf"))
    return torch.cat((logits, column(s, q)), -1).softmax(-1)[..., :-1] @ v


def filled(q, k, v, s, m):
    logits = (q @ k.transpose(-1, -2) * SCALE).masked_fill(m != 0, torch.finfo(q.dtype).min)
    return torch.cat((logits, column(s, q)), -1).softmax(-1)[..., :-1] @ v


def columns_first(q, k, v, s, m):
    """Keys that are stored with columns before tokens."""
    logits = q @ k.reshape(B, H, D, M) + m
    return torch.cat((logits, column(s, q)), -1).softmax(-1)[..., :-1] @ v


def changed_alone(q, k, v, s, m):
    """Logits are changed in place, which nobody else reads."""
    logits = q @ k.transpose(-1, -2)
    logits *= SCALE
    logits += m
    return torch.cat((logits, column(s, q)), -1).softmax(-1)[..., :-1] @ v


def given(dtype=FULL, groups=H, mask_dtype=None):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, n, D, generator=g).to(dtype) for h, n in ((H, N), (groups, M), (groups, M)))
    mask = torch.zeros(B, 1, N, M).masked_fill(torch.rand(B, 1, N, M, generator=g) < 0.3, LOWEST)
    mask = mask.to(mask_dtype or dtype).clamp(min=torch.finfo(mask_dtype or dtype).min)
    return [q, k, v, torch.randn(H, generator=g).to(dtype), mask]


def replaced(function, tensors):
    """The graph with operators, what it is called with, and the entries of attention."""
    graph, inputs = recorded(function, tensors, "dynamo")
    entries = replace_in(graph, declines=True)
    return graph, inputs, [e for e in entries if not e.why.endswith(ELSEWHERE)]


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]


FOUND = {
    gpt_oss: G,
    bare: H,
    in_float32: G,
    interleaved: G,
    where: H,
    filled: H,
    columns_first: H,
    changed_alone: H,
}


def masked(condition, write):
    """Attention whose mask is made of constants. condition: of places of queries and of keys."""

    def function(q, k, v, s):
        places = torch.arange(N)
        logits = write(q @ k.transpose(-1, -2) * SCALE, condition(places[:, None], places))
        return torch.cat((logits, column(s, q)), -1).softmax(-1)[..., :-1] @ v

    return function


def add(logits, seen):
    return logits + torch.where(seen, 0.0, float("-inf"))


def choose(logits, seen):
    return torch.where(seen, logits, float("-inf"))


def fill(logits, seen):
    return logits.masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize("write", [add, choose, fill], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "condition, is_causal, note",
    [
        (lambda i, j: i >= j, True, "causal: no mask"),
        (lambda i, j: i + 1 > j, True, "causal: no mask"),
        (lambda i, j: i < j + 9, False, "all is seen: no mask"),
        (lambda i, j: (i >= j) & (i < j + 2), None, ""),
        (lambda i, j: i > j - 2, None, ""),
    ],
    ids=["causal", "causal, otherwise", "all", "window", "later by one"],
)
def test_a_mask_of_constants(condition, is_causal, note, write):
    q, _, _, s, _ = given()
    k, v = (torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    function = masked(condition, write)
    graph, inputs, entries = replaced(function, [q, k, v, s])
    assert [(e.became, e.why) for e in entries] == [("attention_with_sinks", note)]
    (call,) = [n for n in graph.graph.nodes if "attention_with_sinks" in str(n.target)]
    assert (call.args[4] is None) is (is_causal is not None) and call.args[5] is bool(is_causal)
    assert any("arange" in name for name in targets(graph)) is (is_causal is None)
    torch.testing.assert_close(graph(*inputs)[0], function(q, k, v, s))


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_it_is_found_and_computes_the_same(function, dtype):
    leaves = [t.requires_grad_() for t in given(dtype, FOUND[function])[:4]]
    mask = given(dtype)[4]
    graph, inputs, entries = replaced(function, [*leaves, mask])
    assert [(e.became, e.kind.split(":")[0]) for e in entries] == [("attention_with_sinks", "test_fusion_sinks.py")]
    assert entries[0].name == function.__name__
    names = targets(graph)
    assert names.count("graphfuse.attention_with_sinks.default") == 1
    assert not [n for n in names if any(w in n for w in ("matmul", "softmax", "cat", "max", "dropout", "amax"))]
    if FOUND[function] == G:  # heads are not repeated
        assert not [n for n in names if "expand" in n or "repeat" in n]
    made, wanted = graph(*inputs)[0], function(*leaves, mask)
    bound = {FULL: 1e-5, HALF: 0.04}[dtype]
    torch.testing.assert_close(made, wanted, rtol=bound, atol=bound)
    outer = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for a, b in zip(*(torch.autograd.grad(y, leaves, outer) for y in (made, wanted)), strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max()


def test_keys_and_mask_are_what_is_given():
    """The operator reads what the model has, and makes nothing of it."""
    graph, _, _ = replaced(gpt_oss, given(FULL, G))
    (call,) = (node for node in graph.graph.nodes if "attention_with_sinks" in str(node.target))
    assert all(node.op == "placeholder" for node in call.args[:5])
    assert [tuple(node.meta["example_value"].shape) for node in call.args[1:3]] == [(B, G, M, D)] * 2
    assert call.args[5:] == (False, SCALE)
    graph, _, _ = replaced(columns_first, given())
    assert sum("transpose" in name for name in targets(graph)) == 1


def joined(q, k, s, m=None):
    logits = q @ k.transpose(-1, -2) * SCALE
    return torch.cat([logits if m is None else logits + m, column(s, q)], -1)


def in_training(q, k, v, s, m):
    return dropout(joined(q, k, s, m).softmax(-1)[..., :-1], 0.1, training=True) @ v


def probabilities_too(q, k, v, s, m):
    weights = joined(q, k, s, m).softmax(-1)[..., :-1]
    return weights @ v, weights


def sinks_too(q, k, v, s, m):
    probs = joined(q, k, s, m).softmax(-1)
    return probs[..., :-1] @ v, probs[..., -1]


def logits_too(q, k, v, s, m):
    logits = q @ k.transpose(-1, -2)
    return torch.cat([logits + m, column(s, q)], -1).softmax(-1)[..., :-1] @ v, logits


def first_dropped(q, k, v, s, m):
    return joined(q, k, s, m).softmax(-1)[..., 1:] @ v


def all_used(q, k, v, s, m):
    return joined(q, k, s, m).softmax(-1) @ torch.cat([v, v[:, :, :1]], 2)


def of_rows(q, k, v, s, m):
    return torch.cat([q @ k.transpose(-1, -2), s.view(1, H, 1, 1) + q[..., :1]], -1).softmax(-1)[..., :-1] @ v


def of_samples(q, k, v, s, m):
    per_sample = (s.view(1, H, 1, 1) * q[:, :1, :1, :1]).expand(B, H, N, 1)
    return torch.cat([q @ k.transpose(-1, -2), per_sample], -1).softmax(-1)[..., :-1] @ v


def mask_scaled(q, k, v, s, m):
    logits = (q @ k.transpose(-1, -2) + m) * SCALE
    return torch.cat([logits, column(s, q)], -1).softmax(-1)[..., :-1] @ v


def two_masks(q, k, v, s, m):
    logits = torch.where(m == 0, q @ k.transpose(-1, -2) + m, float("-inf"))
    return torch.cat([logits, column(s, q)], -1).softmax(-1)[..., :-1] @ v


def capped(q, k, v, s, m):
    logits = torch.tanh(q @ k.transpose(-1, -2)) * 5
    return torch.cat([logits, column(s, q)], -1).softmax(-1)[..., :-1] @ v


def without_gradient(q, k, v, s, m):
    with torch.no_grad():
        weights = joined(q, k, s, m).softmax(-1)[..., :-1]
    return weights @ v


def changed_within(q, k, v, s, m):
    v = v.clone()
    weights = joined(q, k, s, m).softmax(-1)[..., :-1]
    v[:, :, 0] = 0
    return weights @ v


def rounded_by_values(q, k, v, s, m):
    """Queries and keys are float32 themselves, values are not."""
    return torch.matmul(joined(q.float() * 1.01, k.float(), s.float(), m.float()).softmax(-1)[..., :-1].to(HALF), v)


def bool_added(q, k, v, s, m):
    return torch.cat([q @ k.transpose(-1, -2) + (m == 0), column(s, q)], -1).softmax(-1)[..., :-1] @ v


def keys_without_gradient(q, k, v, s, m):
    with torch.no_grad():
        k = k.transpose(-1, -2)
    return torch.cat([q @ k, column(s, q)], -1).softmax(-1)[..., :-1] @ v


def keys_with_hook(q, k, v, s, m):
    k = k.transpose(-1, -2)
    k.register_hook(lambda g: 2 * g)
    return torch.cat([q @ k, column(s, q)], -1).softmax(-1)[..., :-1] @ v


LEFT = {
    bool_added: "no product of queries and keys with a scale and a mask",
    keys_without_gradient: "the mode of gradients, autocast or torch.func changes within it",
    in_training: "dropout follows its probabilities",
    probabilities_too: "its probabilities are read elsewhere, too",
    sinks_too: "its probabilities are read elsewhere, too",
    logits_too: "of it is read elsewhere, too",
    first_dropped: "not without the sink's",
    all_used: "not without the sink's",
    of_rows: "its sinks are not one number for each head",
    of_samples: "its sinks are not one number for each head",
    mask_scaled: "more than one mask, or one that is scaled",
    two_masks: "more than one mask, or one that is scaled",
    capped: "no product of queries and keys with a scale and a mask",
    without_gradient: "the mode of gradients, autocast or torch.func changes within it",
    changed_within: "something is changed in place within it",
    rounded_by_values: "its logits are computed in another type than its result",
}


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_what_is_left_and_why(function):
    tensors = given(HALF if function is rounded_by_values else FULL)
    for t in tensors[:4]:
        t.requires_grad_()
    graph, inputs, (entry,) = replaced(function, tensors)
    assert not entry.became and LEFT[function] in entry.why
    torch.manual_seed(0)
    made = graph(*inputs)[0]
    torch.manual_seed(0)
    wanted = function(*tensors)
    assert torch.equal(made, wanted[0] if isinstance(wanted, tuple) else wanted)


def test_each_is_judged_by_itself():
    def both(*tensors):
        return bare(*tensors) + two_masks(*tensors) + where(*tensors)

    graph, inputs, entries = replaced(both, given())
    assert [e.name for e in entries] == ["bare", "two_masks", "where"]
    assert [bool(e.became) for e in entries] == [True, False, True]
    torch.testing.assert_close(graph(*inputs)[0], both(*given()))


def test_attention_of_attention():
    def twice(q, k, v, s, m):
        one = bare(q, k, v, s, m)
        return bare(q, one, one, s, m) + bare(one, k, one, s, m)

    tensors = given()
    tensors[1:3] = (t[:, :, :N] for t in tensors[1:3])
    graph, inputs, entries = replaced(twice, tensors)
    assert [e.became for e in entries] == ["attention_with_sinks"] * 3
    torch.testing.assert_close(graph(*inputs)[0], twice(*tensors))


def test_masks_that_are_left():
    tensors = given()
    tensors[4] = (tensors[4] * 1e-38).requires_grad_()
    assert "no tensor without a gradient" in replaced(gpt_oss_full, tensors)[2][0].why
    tensors = given(HALF, H, FULL)  # which torch adds in float32
    assert "its mask is of another type" in replaced(gpt_oss_full, tensors)[2][0].why


def gpt_oss_full(q, k, v, s, m):
    return joined(q, k, s, m).softmax(-1)[..., :-1].to(v.dtype) @ v


def test_a_mask_of_another_type_that_only_takes_logits_away():
    def attended(q, k, v, s, m):
        return gpt_oss_full(q, k, v, s, torch.where(m == 0, torch.zeros(()), LOWEST))

    tensors = given(HALF)
    graph, inputs, (entry,) = replaced(attended, tensors)
    assert entry.became == "attention_with_sinks"
    torch.testing.assert_close(graph(*inputs)[0], attended(*tensors), rtol=0.02, atol=0.02)


def test_other_softmax_is_not_reported():
    def plain(q, k, v, s, m):
        rows = torch.cat([q, q], -1).softmax(-1)
        return (q @ k.transpose(-1, -2) + m).softmax(-1) @ v, rows, torch.cat([q, q[..., :1]], 1 - 2).softmax(1)

    graph, _, entries = replaced(plain, given())
    assert entries == [] and sum("softmax" in name for name in targets(graph)) == 3


def test_hooks_run():
    """Whether or not the graph ends at one."""
    leaves, mask = [t.requires_grad_() for t in given()[:4]], given()[4]
    made, wanted = (
        f(*leaves, mask)
        for f in (torch.compile(keys_with_hook, backend="graphfuse", options={"then": "aot_eager"}), keys_with_hook)
    )
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (made, wanted)), strict=True):
        # The largest are about 10, and small ones are sums of terms like them.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6 * b.abs().max().item())


def test_autocast():
    def attended(q, k, v, s, m):
        return gpt_oss_full(q, k, v, s, torch.where(m == 0, 0.0, LOWEST))

    leaves = [t.requires_grad_() for t in given()[:4]]
    compiled = torch.compile(attended, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    with torch.autocast("cpu", HALF):
        made, wanted = (f(*leaves, given()[4]) for f in (compiled, attended))
    assert [e.became for e in compile_report().replaced] == ["attention_with_sinks"]
    assert made.dtype is wanted.dtype is HALF
    torch.testing.assert_close(made, wanted, rtol=0.02, atol=0.02)
    for a, b in zip(*(torch.autograd.grad(y.float().square().sum(), leaves) for y in (made, wanted)), strict=True):
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


def test_lengths_that_vary():
    compiled = torch.compile(gpt_oss, backend="graphfuse", options={"then": "aot_eager"}, fullgraph=True)
    for n, m in ((5, 7), (6, 9), (8, 8)):
        q, k, v, s, _ = given(FULL, G)
        tensors = [q.repeat(1, 1, 2, 1)[:, :, :n], *(t.repeat(1, 1, 2, 1)[:, :, :m] for t in (k, v)), s]
        mask = torch.zeros(B, 1, n, m).masked_fill(torch.ones(n, m).triu(m - n + 1) > 0, LOWEST)
        for t in (*tensors[:3], mask):
            torch._dynamo.mark_dynamic(t, 2)
        torch._dynamo.mark_dynamic(mask, 3)
        torch.testing.assert_close(compiled(*tensors, mask), gpt_oss(*tensors, mask))
    assert len(compile_report().graphs) == 1 and len(compile_report().replaced) == 1


def of_an_index(q, k, v, s, m):
    return bare(q, k, v, s[[3, 0, 2, 1]], m)


def of_another_type(q, k, v, s, m):
    return bare(q, k, v, s.half().view(torch.bfloat16), m)


@pytest.mark.parametrize("function", [of_an_index, of_another_type], ids=lambda f: f.__name__)
def test_sinks_are_those_that_are_read(function):
    tensors = given()
    graph, inputs, _ = replaced(function, tensors)
    torch.testing.assert_close(graph(*inputs)[0], function(*tensors))


def result(q, k, v, s, m):
    out = bare(q, k, v, s, m)
    same = out.view_as(out)
    out.mul_(2)
    return same


def mask_behind(q, k, v, s, m):
    m = m * 1
    out = torch.cat((q @ k.transpose(-1, -2) + m, column(s, q)), -1).softmax(-1)[..., :-1] @ v
    m.fill_(0)
    return out


def sinks_behind(q, k, v, s, m):
    s = s * 1
    same, out = s.view_as(s), bare(q, k, v, s, m)
    s.mul_(2)
    return out + same.mean()


@pytest.mark.parametrize("function", [result, mask_behind, sinks_behind], ids=lambda f: f.__name__)
def test_what_is_changed_in_place_is_left(function):
    *leaves, mask = given()
    wanted = [t.clone().requires_grad_() for t in leaves]
    function(*wanted, mask).sum().backward()
    found = [t.clone().requires_grad_() for t in leaves]
    graph, inputs, entries = replaced(function, [*found, mask])
    assert "changed in place" in entries[0].why
    graph(*inputs)[0].sum().backward()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_other_types_and_numbers_are_left():
    def rounded(q, k, v, s, m):
        probs = torch.cat((q @ k.transpose(-1, -2), column(s, q)), -1).softmax(-1)
        return probs.to(torch.float8_e4m3fn).to(q.dtype)[..., :-1] @ v

    def divided(q, k, v, s, m):
        return torch.cat(((q @ k.transpose(-1, -2)) / 0.0, column(s, q)), -1).softmax(-1)[..., :-1] @ v

    for function in (rounded, divided):
        _, _, entries = replaced(function, given())
        assert not any(e.became for e in entries)
