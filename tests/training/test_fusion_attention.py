"""Attention masks in graphs that torch compiles: those that constants make go where torch has kernels without them, and
all others stay. Values and gradients are those of torch without a compiler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from graphfuse.torch import compile_report
from graphfuse.torch.attention import constants
from graphfuse.torch.attention import mask_pass as attention
from support.attention_graphs import CAUSED, NAME, N, checked, qkv, with_mask

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]
SEEN = "all is seen: no mask"
INF = float("inf")


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
    assert not became and why == "its mask stays: it is computed from padding"

    def with_bias(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + torch.zeros(N, N))

    assert "computed from bias" in checked(with_bias, *qkv(), torch.zeros(N, N))[0][1]
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
    assert "computed from seen" in checked(by_input, *qkv(), seen)[0][1]
    assert all(call["attn_mask"] is not None for call in attention_calls)


def test_a_mask_that_is_read_elsewhere_is_still_made(attention_calls):
    def function(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + mask.sum()

    assert (NAME, CAUSED) in checked(function, *qkv())


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
    monkeypatch.setattr(constants, "LARGEST", N * N - 1)
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


def test_what_a_function_changes_in_place_by_position_counts():
    def of_a_mask(q, k, v):
        i = torch.arange(N)
        mask = torch.where(i <= i[:, None], 0.0, -INF)
        same = mask.view_as(mask)
        F.relu(mask, True)  # all zeros
        return F.scaled_dot_product_attention(q, k, v, same)

    def of_repeated_heads(q, k, v):
        k = k * 1
        many, values, same = *(t.repeat_interleave(2, 1) for t in (k, v)), k.view_as(k)
        F.relu(k, True)
        return F.scaled_dot_product_attention(q, many, values, is_causal=True) + same.mean()

    assert all("causal" not in why for _, why in checked(of_a_mask, *qkv()))
    assert all("not repeated" not in why for _, why in checked(of_repeated_heads, *qkv(kv_heads=2)))


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
    assert constants.Constants().value(read, read).all()


class Biased(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(N, N))

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias * 2)


def test_reasons_name_parameters_as_the_model_does_and_layers_together():
    layers = torch.nn.ModuleList([Biased(), Biased()])

    def function(q, k, v):
        return layers[1](layers[0](q, k, v), k, v)

    with torch.no_grad():
        torch.compile(function, backend="graphfuse", options={"then": "aot_eager"})(*qkv())
    report = compile_report()
    assert [e.why for e in report.left] == [f"its mask stays: it is computed from layers.{n}.bias" for n in range(2)]
    assert "x2  Biased  left: its mask stays: it is computed from layers.*.bias" in str(report)
