"""Models of transformers that are no decoders of text alone: losses and gradients are those of eager mode, compiled by
our backend and after ``fuse``."""

import copy

import pytest
import torch

from graphfuse.torch import fuse

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

transformers = pytest.importorskip("transformers")

TEXT = 100
SMALL = {"hidden_size": 64, "num_hidden_layers": 2}
ENCODER = SMALL | {"num_attention_heads": 4, "intermediate_size": 96}


def words(rows, columns, seed=0):
    return torch.randint(1, TEXT, (rows, columns), generator=torch.Generator().manual_seed(seed))


def bert():
    config = transformers.BertConfig(**ENCODER, vocab_size=TEXT, max_position_embeddings=64)
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
    given = {"input_ids": words(2, 8), "labels": words(2, 8, 1), "attention_mask": mask}
    return transformers.BertForMaskedLM(config), given


def vit():
    config = transformers.ViTConfig(**ENCODER, image_size=32, patch_size=8, num_labels=10)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(3)}


def t5():
    layers = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
    config = transformers.T5Config(**layers, vocab_size=TEXT, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": words(2, 8), "labels": words(2, 9, 1)}


def mamba2():
    heads = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 4}
    config = transformers.Mamba2Config(**SMALL, **heads, vocab_size=TEXT, pad_token_id=0)
    return transformers.Mamba2ForCausalLM(config), {"input_ids": words(2, 8), "labels": words(2, 8, 1)}


def step(model, given):
    """Loss, logits and gradients by name."""
    made = model(**given)
    made.loss.backward()
    named = ((name.removeprefix("_orig_mod."), p.grad) for name, p in model.named_parameters())
    return {"loss": made.loss.detach(), "logits": made.logits.detach()} | {n: g for n, g in named if g is not None}


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="graphfuse", options={"then": "aot_eager", "decline": False})


def fused(model):
    assert fuse(model).replaced
    return model


@pytest.mark.some(2)
@pytest.mark.parametrize("way", [compiled, fused])
@pytest.mark.parametrize("of", [bert, vit, t5, mamba2])
def test_a_training_step(of, way):
    torch.manual_seed(0)
    model, given = of()
    model.eval()  # without dropout
    other = way(copy.deepcopy(model))
    wanted, made = step(model, given), step(other, given)
    assert made.keys() == wanted.keys()
    for name, t in wanted.items():
        far = (made[name] - t).norm()
        assert far <= 1e-4 * t.norm() + 1e-7, name
