"""Attention masks of models of transformers where torch compiles them: in prefill, training and decoding."""

import dataclasses

import pytest
import torch

from graphfuse.benchmarks.programs.model_cases import DECODE, MODELS, PREFILL, STEP
from graphfuse.torch import compile_report
from support.small_models import SMALL

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.torch]

NAME = "scaled_dot_product_attention"
GROUPED = ("llama-3-8b", "qwen3-8b", "olmo-2-7b", "gemma-3-12b")


def made(name, work, **fields):
    """Two layers in float32, and their input."""
    model = MODELS[name]
    shapes = {PREFILL.name: (1, 16), DECODE.name: (3, 1), STEP.name: (2, 8)}
    small = dataclasses.replace(model, fields={**model.fields, **SMALL, **fields}, shapes=shapes)
    module, (x,) = small.make(dataclasses.replace(work, layers=2) if work is STEP else work, "cpu")
    return module.float(), x.float()


def ran(module, x, gradients, compiles):
    run = (
        torch.compile(module, backend="graphfuse", fullgraph=True, options={"then": "aot_eager"})
        if compiles
        else module
    )
    with torch.set_grad_enabled(gradients):
        out = run(x)
    if not gradients:
        return out, {}
    loss = out.square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)  # of the embedding there is none
    return out, {n: g for (n, _), g in zip(module.named_parameters(), grads, strict=True) if g is not None}


def checked(module, x, gradients=False):
    """Compares values and gradients. Returns the report's entries of attention."""
    want, wanted = ran(module, x, gradients, compiles=False)
    got, found = ran(module, x, gradients, compiles=True)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert found.keys() == wanted.keys() and len(wanted) >= 10 * gradients
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4 * max(1.0, grad.abs().max().item()))
    return [(e.became, e.why) for e in compile_report().graphs[-1].entries if "attn" in e.name.rpartition(".")[2]]


@pytest.mark.some(2)
@pytest.mark.parametrize("work", [PREFILL, STEP], ids=lambda work: work.name)
@pytest.mark.parametrize("name", GROUPED)
def test_causal_masks_go(name, work, attention_calls):
    entries = checked(*made(name, work), gradients=work is STEP)
    assert len(attention_calls) == 2
    for call in attention_calls:
        assert call.get("attn_mask") is None and call["is_causal"] is True
        # Some versions of transformers repeat no heads.
        assert call["key"].meta["example_value"].shape[1] == 2 and call["enable_gqa"] is True
    assert len(entries) == 2 and all(e[0] == NAME and e[1].startswith("causal: no mask") for e in entries)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", GROUPED)
def test_no_mask_in_a_decoding_step(name, attention_calls):
    checked(*made(name, DECODE))
    assert [call.get("attn_mask") for call in attention_calls] == [None, None]
    assert not any(call.get("is_causal") for call in attention_calls)
    assert all(call["key"].meta["example_value"].shape[1] == 2 for call in attention_calls)


def test_attention_that_is_written_out_is_as_it_was(attention_calls):
    regions = checked(*made("gemma-2-9b", PREFILL))
    assert regions == [("region", "mul, div, tanh, add, softmax")] * 2 and attention_calls == []


@pytest.mark.some(1)
@pytest.mark.parametrize("window, notes", [(16, ["causal: no mask"] * 2), (4, ["", "causal: no mask"])], ids=str)
@pytest.mark.parametrize("work", [PREFILL, STEP], ids=lambda work: work.name)
def test_causal_masks_go_where_there_are_sinks(work, window, notes):
    entries = checked(*made("gpt-oss-20b", work, sliding_window=window), gradients=work is STEP)
    assert entries == [("attention_with_sinks", note) for note in notes]


def test_a_window_stays_where_it_hides_something(attention_calls):
    entries = checked(*made("gemma-3-12b", PREFILL, sliding_window=4))
    assert entries == [("", "its mask stays: there is no faster kernel for a window of 4 keys")] * 2
    assert all(call["attn_mask"] is not None for call in attention_calls)


def test_a_window_of_all_tokens_goes(attention_calls):
    checked(*made("gemma-3-12b", PREFILL, sliding_window=16))
    assert [(call.get("attn_mask"), call["is_causal"]) for call in attention_calls] == [(None, True)] * 2


def test_padding_stays(attention_calls):
    layers, x = made("llama-3-8b", STEP)
    padding = torch.ones(2, 8, dtype=torch.int64)
    padding[1, :3] = 0

    def function(x, padding):
        return layers.model(inputs_embeds=x, attention_mask=padding, use_cache=False).last_hidden_state

    with torch.no_grad():
        run = torch.compile(function, backend="graphfuse", fullgraph=True, options={"then": "aot_eager"})
        got, want = run(x, padding), function(x, padding)
    seen = padding.bool()
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-3, atol=1e-4)
    assert all(call["attn_mask"] is not None for call in attention_calls) and len(attention_calls) == 2
    left = [e.why for e in compile_report().left if "self_attn" in e.name]
    assert len(left) == 2 and all("computed from" in why for why in left)
