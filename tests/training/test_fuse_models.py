"""Models of transformers, small and with random weights: every norm is found, values and gradients stay within their
bounds, and unfused models are what they were."""

import copy
import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from graphfuse.torch import compile_report, fuse, unfuse
from graphfuse.torch.attention import mask_pass as attention
from graphfuse.torch.compile_backend.compiled_graphs import clear_reports
from support.dispatched import regions
from support.norm_modules import HALF, HIDDEN, LlamaNorm

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers", minversion="5.0")
deprecation = pytest.importorskip("transformers.utils.deprecation")

DOCS = Path(__file__).resolve().parents[2] / "docs"

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
ATTENTION = {"gpt_oss": {"attention_with_sinks": 2}}
GATED = {"model.layers.0.linear_attn.norm": "rmsnorm, mul, swish"}  # of Qwen3-Next

LLAMA, PLAIN, ADDED_TO_ONE = "rmsnorm, mul", "rmsnorm", "add, rmsnorm"  # in the type that models are made in

GEMMA = {
    "add, rmsnorm; with post_attention_layernorm and pre_feedforward_layernorm": 2,
    "add, rmsnorm; with post_feedforward_layernorm": 2,
}

# Of each: its configuration, what its norms compute, and what norms with the sums around them do.
MODELS = {
    "llama": ({}, LLAMA, {"add, rmsnorm, mul; with post_attention_layernorm": 2}),
    "mistral": ({}, LLAMA, {"add, rmsnorm, mul; with post_attention_layernorm": 2}),
    "phi3": ({}, LLAMA, {"add, rmsnorm, mul; with post_attention_layernorm": 2}),
    "qwen3": ({}, LLAMA, {"add, rmsnorm, mul; with post_attention_layernorm": 2}),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        PLAIN,
        {"add, rmsnorm; with post_attention_layernorm": 2},
    ),
    "olmo2": (
        {},
        PLAIN,
        {
            "rmsnorm, add; with post_attention_layernorm": 2,
            "rmsnorm, add; with post_feedforward_layernorm": 2,
        },
    ),
    "gemma2": ({}, ADDED_TO_ONE, GEMMA),
    "gemma3_text": ({}, ADDED_TO_ONE, GEMMA),
    "qwen3_next": (EXPERTS | LINEAR, ADDED_TO_ONE, {}),
}
TOKENS = torch.tensor([[5, 9, 33, 7, 101, 64, 3], [17, 4, 88, 2, 19, 55, 120]])


def made(name, dtype=torch.bfloat16, device="cpu"):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL | MODELS[name][0])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if device == "cpu":
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "norm" in n:
                    p.add_(torch.randn(p.shape) * 0.1)
    return model.eval()


def norms(model):
    """By the names of their weights."""
    return {n.removesuffix(".weight") for n in model.state_dict() if re.search(r"norm\.weight$", n)}


@pytest.mark.some(9)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MODELS)
def test_every_norm_is_found(name, device):
    model = made(name, device=device)
    _, operations, sums = MODELS[name]
    report = fuse(model)
    found = {e.name: e for e in report.entries if re.search(r"norm$", e.name)}
    assert found.keys() == norms(model)
    assert len(found) >= 5
    assert {n: e.why for n, e in found.items() if e.why != operations} == (GATED if name == "qwen3_next" else {})
    others = [e for e in report.replaced if e.name not in found]
    assert Counter(e.why for e in others if e.became == "region") == Counter(sums)
    assert Counter(e.became for e in others if e.became != "region") == Counter(ATTENTION.get(name))


GATED_CLASSES = [
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, "rmsnorm, mul, swish"),
    ("mamba2", "MambaRMSNormGated", {"group_size": 16}, "swish, mul, rmsnorm"),
    ("bamba", "BambaRMSNormGated", {"group_size": 64}, "swish, mul, rmsnorm"),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 32}, "swish, mul, rmsnorm"),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4}, "rmsnorm, mul, swish"),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 2, "norm_before_gate": False}, "swish, mul, rmsnorm"),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, "rmsnorm, sigmoid, mul"),
]


@pytest.mark.parametrize(("model", "name", "options", "operations"), GATED_CLASSES)
def test_gated_norms_of_models(model, name, options, operations):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    norm = getattr(module, name)(64, **options).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(2, 5, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
        want = norm(x, gate)
        assert [e.why for e in fuse(norm).entries] == [operations]
        assert (norm(x, gate) != want).float().mean() < 0.01
        torch.testing.assert_close(norm(x, gate), want, rtol=0.01, atol=0.01)


def test_the_report_that_the_docs_show():
    assert f"```\n{fuse(made('llama', device='meta'))}\n```" in (DOCS / "models.md").read_text()


def gradients(model):
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name):
    """Values are the model's own but where the order of a row's sum moves one across the middle of two. Gradients are
    no further from those in float32 than the model's own."""
    model = made(name)
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        want = model(TOKENS).logits
    own, exact = gradients(model), gradients(wide)
    fuse(model)
    with torch.no_grad():
        got = model(TOKENS).logits
        exact_logits = wide(TOKENS).logits
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    if name in ATTENTION:  # it is rounded once, and the model's own is rounded more often
        assert (got - exact_logits).norm() <= 1.1 * (want - exact_logits).norm()
    else:
        assert (got != want).float().mean() <= 0.05
    fused = gradients(model)
    assert fused.keys() == exact.keys()
    for n, g in exact.items():
        rounded = 2**-5 if name in ATTENTION and "router" in n else 2**-8  # sums of few, of what attention rounds
        assert (fused[n] - g).norm() <= 1.25 * (own[n] - g).norm() + rounded * g.norm(), n
    unfuse(model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, want)
    assert all(torch.equal(g, own[n]) for n, g in gradients(model).items())


def test_tokens_are_generated_as_before():
    model = made("qwen3")
    want = model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False)
    fuse(model)
    assert torch.equal(model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False), want)


class Summed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaNorm()

    def forward(self, x, residual=None):
        total = x + residual
        return total + self.norm(total)


def renamed(forward):
    return deprecation.deprecate_kwarg("before", "99.0", new_name="residual")(forward)


def doubled(forward):
    @functools.wraps(forward)
    def twice(*args, **kwargs):
        return 2 * forward(*args, **kwargs)

    return twice


class Renamed(Summed):
    forward = renamed(Summed.forward)


class Doubled(Summed):
    forward = renamed(doubled(Summed.forward))


@torch.no_grad()
def test_forwards_in_wrappers():
    """One that gives an argument by another name is gone around where a call does not have that; others are left."""
    made, (x, y) = Renamed().to(HALF), torch.randn(2, 3, HIDDEN).to(HALF)
    want = made(x, y)
    fuse(made)
    for call in (lambda: made(x, y), lambda: made(x, residual=y)):
        assert regions(call) == ["add, rmsnorm, mul"]
        torch.testing.assert_close(call(), want, rtol=0.02, atol=0.02)
    with pytest.warns(FutureWarning, match="`before` is deprecated"):
        assert regions(lambda: made(x, before=y)) == ["rmsnorm, mul"]
    other = Doubled().to(HALF)
    assert [e.why for e in fuse(other).left] == [f"residual sums: its forward is wrapped by {__name__}.twice"]
    torch.testing.assert_close(other(x, y), 2 * want, rtol=0.02, atol=0.02)


def test_checkpointing():
    """The layer's own forward checkpoints, with the norms that were replaced."""
    model = made("llama")
    own = gradients(model)
    fuse(model)
    model.train()
    model.gradient_checkpointing_enable()
    assert model.model.layers[0].gradient_checkpointing
    for n, g in gradients(model).items():
        torch.testing.assert_close(g, own[n], rtol=0.1, atol=0.02 * own[n].abs().max().item())


# In the graphs that torch.compile makes, sums are found across layers, too, and rotations of queries and keys.
SUMMED, JOINED = "add, rmsnorm", "with post_attention_layernorm"
COMPILED = {
    "llama": {"rmsnorm, mul": 1, f"{SUMMED}, mul": 4},
    "qwen3": {"rmsnorm, mul": 1, f"{SUMMED}, mul": 4, "rmsnorm, mul, turn_pairs, add": 2, "with q_norm": 2},
    "olmo2": {"rmsnorm": 4, "rmsnorm, add": 4, "with post_feedforward_layernorm": 1},
    "gemma2": {
        SUMMED: 5,
        JOINED: 2,
        "with post_feedforward_layernorm": 2,
        "mul, div, tanh, add, softmax, cast to BFLOAT16": 2,
    },
    "gemma3_text": {
        SUMMED: 5,
        JOINED: 2,
        "with post_feedforward_layernorm": 2,
        "add, rmsnorm, mul, turn_pairs": 2,
        "with q_norm": 2,
    },
    "gpt_oss": {"rmsnorm": 1, SUMMED: 4, "softmax": 2} | ATTENTION["gpt_oss"],
}
"""Operations of regions, and other operators: how many."""


@pytest.fixture
def compiler():
    torch.compiler.reset()
    clear_reports()  # what backends report that torch does not know any more
    yield lambda model, then: torch.compile(model, backend="graphfuse", options={"then": then})
    torch.compiler.reset()


def of_rows(report):
    """Entries without those of losses and masks, which are not in the graphs of all versions."""
    return [e for e in report.replaced if e.became != attention.NAME and "cross_entropy" not in e.why]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_values(name, compiler):
    model = made(name)
    with torch.no_grad():
        want, got = model(TOKENS).logits, compiler(model, "eager")(TOKENS).logits
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    if "attention_with_sinks" in COMPILED[name]:  # rounded once, and the model's own more often
        with torch.no_grad():
            exact = model.float()(TOKENS).logits
        assert (got - exact).norm() <= 1.1 * (want - exact).norm()
    else:
        assert (got != want).float().mean() <= 0.05
    report = compile_report()
    assert not norms(model) & {entry.name for entry in report.left}
    replaced = of_rows(report)
    became = Counter(e.why.partition(";")[0] if e.became == "region" else e.became for e in replaced)
    if (
        torch.__version__.startswith("2.10.") and name == "gpt_oss"
    ):  # whose experts end graphs there: places are shorter
        assert became.total() == sum(COMPILED[name].values())
        return
    assert became == COMPILED[name]
    assert norms(model) <= {e.name for e in replaced}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_compiled_gradients(name, compiler):
    model = made(name)
    wide = copy.deepcopy(model).float()
    own, exact = gradients(model), gradients(wide)
    fused = {n.removeprefix("_orig_mod."): g for n, g in gradients(compiler(model, "aot_eager")).items()}
    assert norms(model) <= {e.name for e in of_rows(compile_report())}
    assert fused.keys() == exact.keys()
    for n, g in exact.items():
        rounded = 2**-7 if "self_attn" in n else 2**-8  # rotations are rounded elsewhere
        assert (fused[n] - g).norm() <= 1.25 * (own[n] - g).norm() + rounded * g.norm(), n
    if name == "llama" and attention.NAME not in {e.became for e in compile_report().replaced}:
        assert f"```\n{compile_report()}\n```" in (DOCS / "models.md").read_text()
