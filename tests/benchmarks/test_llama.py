"""The bench of a Llama with its norms replaced: what is replaced, what is compared, what is judged."""

import subprocess
import sys
import types

import pytest
import torch

import graphfuse.torch as ours
from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import llama
from support import bench_record

CONFIG = llama.CONFIG | {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class LlamaRMSNorm(torch.nn.Module):
    """By transformers' name, with its fields."""

    def __init__(self, columns: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(columns) + 0.5)
        self.variance_epsilon = 1e-3

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * self.weight


class Model(torch.nn.Module):
    """Logits of tokens by norms and a product, where transformers has a Llama."""

    def __init__(self, norms: int = 3):
        super().__init__()
        self.config = types.SimpleNamespace(num_hidden_layers=1, vocab_size=11)
        self.table = torch.nn.Embedding(11, 64)
        self.block = torch.nn.Sequential(*(LlamaRMSNorm(64) for _ in range(norms)))

    def forward(self, input_ids):
        return types.SimpleNamespace(logits=self.block(self.table(input_ids)) @ self.table.weight.T)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 11, (2, 5))


@pytest.mark.parametrize("norm", [ours.RMSNorm, torch.nn.RMSNorm], ids=["ours", "torch"])
def test_every_norm_is_replaced_on_its_weight(norm, tokens):
    model, own = Model(), Model()
    own.load_state_dict(model.state_dict())
    weights = [m.weight for m in model.block]
    made = llama.replaced(model, norm)
    assert [type(m) for m in made.block] == [norm] * 3 and {m.eps for m in made.block} == {1e-3}
    assert all(m.weight is weight for m, weight in zip(made.block, weights, strict=True))
    assert llama.differing({llama.OURS: made, llama.OWN: own}, tokens) == {}


def test_another_number_of_norms_is_refused():
    with pytest.raises(ValueError, match="the model has 2 modules LlamaRMSNorm; expected: 3"):
        llama.replaced(Model(2), torch.nn.RMSNorm)


@pytest.mark.parametrize("factor", [0.5, float("nan")])
def test_other_logits_are_seen(factor, tokens):
    model, own = Model(), Model()
    own.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.block[2].weight.mul_(factor)
    assert list(llama.differing({llama.OURS: model, llama.OWN: own}, tokens)) == [llama.OURS]


def test_targets_are_of_the_slowest_case():
    content = bench_record.llama_model()
    assert [t.verdict(content).met for t in llama.TARGETS] == [True] * 4
    step = content["cases"][2]
    step["ours_over"][llama.TORCH] = 1.01
    found = llama.TARGETS[2].verdict(content)
    assert (found.met, found.value, found.where) == (False, 1.01, "training step, 4 x 512 tokens")
    content["cases"] = [step]
    assert llama.TARGETS[0].verdict(content).met is None
    assert "| 1.010 | 0.667 |" in tables.markdown(llama.table(content))


def test_a_real_one_is_measured():
    if llama.why_not():
        pytest.skip(llama.why_not())
    for kind in llama.SIZES:
        models = llama.models(CONFIG, "cpu")
        entry = llama.measure(models, kind, (1, 8), 2, lambda: None)
        assert entry["kind"] == kind and set(entry["ms"]) == {llama.OURS, llama.TORCH, llama.OWN}
        assert all(ms["low"] > 0 for ms in entry["ms"].values())
        assert not any(p.grad is not None for model in models.values() for p in model.parameters())


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert llama.why_not().startswith("transformers and its LlamaForCausalLM are not there (")


@pytest.mark.parametrize(
    "arguments, said",
    [(["--help"], "--rounds"), (["--rounds", "1"], "two rounds"), (["--quick", "--record", "x"], "leaves no record")],
)
def test_the_command_line(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "graphfuse.benchmarks.programs.llama", *arguments], capture_output=True, text=True
    )
    assert done.returncode == (0 if arguments == ["--help"] else 2) and said in done.stdout + done.stderr
