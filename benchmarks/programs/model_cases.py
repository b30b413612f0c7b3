"""What is measured of which models, as data: sizes of published models, with few layers and random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]

CACHED = 1024
"""Tokens that a decoding step attends to, its own among them."""


@dataclass(frozen=True)
class ModelWork:
    """layers: of the model. gradients: a step of training, with an optimizer. graph: the call is a CUDA graph."""

    name: str
    layers: int
    gradients: bool = False
    graph: bool = False


PREFILL, DECODE = ModelWork("prefill", 2), ModelWork("decode", 2, graph=True)
STEP = ModelWork("training-step", 4, gradients=True)
WORKS = {work.name: work for work in (PREFILL, DECODE, STEP)}


class Model(Protocol):
    """name, title: of the record and the tables. is_decoder: whether targets are for it. shapes: of the input, by
    work."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def is_decoder(self) -> bool: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def why_not(self) -> str | None:
        """Why it cannot be made here; None if it can."""

    def make(self, work: ModelWork, device: str) -> Made:
        """The module in bfloat16 and its inputs. Called with them, it returns one tensor. The same values each time."""


@dataclass(frozen=True)
class Decoder:
    """Layers of a language model of transformers, without embedding and head.

    config: the name of its configuration class. fields: of it, but for the number of layers. norm: what the weights of
    its norms are around. changed: what is done to the model before its weights are cast.
    """

    name: str
    title: str
    config: str
    fields: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {PREFILL.name: (1, 4096), DECODE.name: (64, 1), STEP.name: (1, 4096)}
    )
    changed: Callable[[torch.nn.Module], None] = lambda model: None
    is_decoder: bool = True

    def why_not(self) -> str | None:
        try:
            import transformers
        except ImportError as error:
            return f"transformers is not there ({error})"
        return (
            None
            if hasattr(transformers, self.config)
            else f"transformers {transformers.__version__} has no {self.config}"
        )

    def make(self, work: ModelWork, device: str) -> Made:
        import torch
        import transformers

        from graphfuse.benchmarks.programs import model_decoder

        # A vocabulary is not used: layers are given vectors.
        config = getattr(transformers, self.config)(
            **self.fields, num_hidden_layers=work.layers, vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )
        torch.manual_seed(7)
        with torch.device(device):
            model = transformers.AutoModel.from_config(config, dtype=torch.float32)
            self.changed(model)
        _draw_norms(model)
        shape = (*self.shapes[work.name], config.hidden_size)
        layers = model_decoder.Cached(model, shape[0], CACHED) if work is DECODE else model_decoder.Layers(model)
        return layers.to(device=device, dtype=torch.bfloat16), (_drawn(shape, device),)


@dataclass(frozen=True)
class Block:
    """Blocks of model_blocks. kind: their class. arguments: of it. conditions: of the call, their shapes."""

    name: str
    title: str
    kind: str
    arguments: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    conditions: tuple[tuple[int, ...], ...] = ()
    is_decoder: bool = False

    def why_not(self) -> str | None:
        return None

    def make(self, work: ModelWork, device: str) -> Made:
        import torch

        from graphfuse.benchmarks.programs import model_blocks

        torch.manual_seed(7)
        with torch.device(device):
            blocks = [getattr(model_blocks, self.kind)(*self.arguments) for _ in range(work.layers)]
        module = model_blocks.Stack(blocks)
        _draw_norms(module)
        inputs = [_drawn(shape, device) for shape in (self.shapes[work.name], *self.conditions)]
        module = module.to(dtype=torch.bfloat16)
        for tensor in (*inputs, *module.parameters()):
            if tensor.dim() == 5:  # so what a norm over channels reads is a row, and cuDNN's convolutions are fastest
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last_3d)
        return module, tuple(inputs)


@dataclass(frozen=True)
class VideoBlocks:
    """Transformer blocks of WAN, of diffusers: attention of all tokens of a video, and to a text.

    heads, inner: of a block; a head has 128 columns. grid: patches along frames, height and width. text: its tokens.
    """

    name: str
    title: str
    heads: int
    inner: int
    grid: tuple[int, int, int]
    text: int
    is_decoder: bool = False
    head: int = 128

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {PREFILL.name: (1, math.prod(self.grid), self.heads * self.head)}

    def why_not(self) -> str | None:
        try:
            from diffusers import WanTransformer3DModel  # noqa: F401
        except ImportError as error:
            return f"diffusers is not there ({error})"
        return None

    def make(self, work: ModelWork, device: str) -> Made:
        import torch
        from diffusers.models.transformers import transformer_wan

        from graphfuse.benchmarks.programs import model_blocks

        shape = self.shapes[work.name]
        width = shape[-1]
        torch.manual_seed(7)
        with torch.device(device):
            blocks = [
                transformer_wan.WanTransformerBlock(width, self.inner, self.heads, cross_attn_norm=True)
                for _ in range(work.layers)
            ]
            patches = torch.empty(1, 1, *self.grid, device="meta")
            rotation = transformer_wan.WanRotaryPosEmbed(self.head, (1, 1, 1), 1024)(patches)
        module = model_blocks.Rotated(blocks, rotation)
        _draw_norms(module)
        module = module.to(dtype=torch.bfloat16)
        for name, parameter in module.named_parameters():
            if any(part in name for part in transformer_wan.WanTransformer3DModel._keep_in_fp32_modules):
                parameter.data = parameter.data.float()
        text, times = (_drawn((1, tokens, width), device) for tokens in (self.text, 6))
        return module, (_drawn(shape, device), text, times)


def _drawn(shape: tuple[int, ...], device: str) -> torch.Tensor:
    import torch

    generator = torch.Generator(device).manual_seed(8)
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def _draw_norms(model: torch.nn.Module) -> None:
    """Weights of norms are all alike otherwise, 1 or 0, and a norm that forgets them would be right."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))


def _dense(model: torch.nn.Module) -> None:
    """GPT-OSS without experts: what they cost depends on where tokens go."""
    from graphfuse.benchmarks.programs.model_blocks import DenseExperts

    config = model.config
    for layer in model.layers:
        layer.mlp = DenseExperts(config.hidden_size, config.num_experts_per_tok * config.intermediate_size)


def _sizes(hidden: int, inner: int, heads: int, kv_heads: int, head: int, **more: object) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": 8192,
    } | more


_EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 4, "max_position_embeddings": 131072}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Decoder("llama-3-8b", "Llama-3-8B", "LlamaConfig", _sizes(4096, 14336, 32, 8, 128)),
        Decoder("gemma-2-9b", "Gemma-2-9B", "Gemma2Config", _sizes(3584, 14336, 16, 8, 256)),
        Decoder("gemma-3-12b", "Gemma-3-12B", "Gemma3TextConfig", _sizes(3840, 15360, 16, 8, 256, sliding_window=1024)),
        Decoder("qwen3-8b", "Qwen3-8B", "Qwen3Config", _sizes(4096, 12288, 32, 8, 128)),
        Decoder(
            "gpt-oss-20b",
            "GPT-OSS-20B, dense part",
            "GptOssConfig",
            _sizes(2880, 2880, 64, 8, 64, sliding_window=128, **_EXPERTS),
            changed=_dense,
        ),
        Decoder("olmo-2-7b", "OLMo-2-7B", "Olmo2Config", _sizes(4096, 11008, 32, 32, 128)),
        Block(
            "dit",
            "DiT blocks (adaLN), 3,072",
            "DiTBlock",
            (3072, 24),
            {PREFILL.name: (1, 4096, 3072), STEP.name: (1, 4096, 3072)},
            ((1, 3072),),
        ),
        VideoBlocks("wan-dit", "WAN transformer blocks, 1,536", 12, 8960, (21, 30, 52), 512),
        Block("wan-vae", "WAN VAE decoder blocks", "WanBlock", (96,), {PREFILL.name: (1, 96, 4, 480, 832)}),
    )
}


@dataclass(frozen=True)
class ModelCase:
    """A model at a work, as the record names it. size: of the input."""

    model: str
    work: str
    size: str
    layers: int

    def __str__(self) -> str:
        return f"{self.model}/{self.work}"


def cases(models: Mapping[str, Model]) -> tuple[ModelCase, ...]:
    return tuple(
        ModelCase(model.name, work, "x".join(map(str, shape)), WORKS[work].layers)
        for model in models.values()
        for work, shape in model.shapes.items()
    )


CASES = cases(MODELS)
QUICK = tuple(case for case in CASES if case.model in ("qwen3-8b", "dit"))
