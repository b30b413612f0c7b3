"""A Llama of transformers with its norms replaced: what that does to a prefill and to a training step.

    python -m graphfuse.benchmarks.programs.llama [--record FOLDER] [--rounds 200] [--quick]

Random weights, 8 layers of 1,024, bfloat16. Its 17 norms are transformers' own, torch.nn.RMSNorm, or
graphfuse.torch.RMSNorm, with the same weights. Wall time of a call until the GPU is done, the models in turns: small
problems, where the GPU waits for the host. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import turns
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

if TYPE_CHECKING:
    import torch

CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
PREFILL, STEP = "prefill", "training step"
SIZES = {PREFILL: ((1, 128),), STEP: ((1, 128), (4, 512))}
"""Sequences and tokens of each."""
OURS, TORCH, OWN = "graphfuse.torch.RMSNorm", "torch.nn.RMSNorm", "LlamaRMSNorm"
TOLERANCE = 0.05
"""Accepted distance of the logits from those with the model's own norms, over their size."""


def slowest(kind: str, to: str, limit: float) -> Target:
    """The model with ours over the one with other norms, at worst."""

    def figures(content: dict):
        return ((case["ours_over"][to], case["name"]) for case in content["cases"] if case["kind"] == kind)

    return Target(f"{kind}: time with ours over {to}'s, at worst", limit, False, figures)


TARGETS = (slowest(PREFILL, TORCH, 1.0), slowest(PREFILL, OWN, 0.8), slowest(STEP, TORCH, 1.0), slowest(STEP, OWN, 1.0))


def why_not() -> str | None:
    """Why there is no Llama here; None if there is."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    except ImportError as error:
        return f"transformers and its LlamaForCausalLM are not there ({error})"
    return None


def models(config: Mapping[str, int], device: str) -> dict[str, torch.nn.Module]:
    """The same model with each of the norms."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import graphfuse.torch as ours

    torch.manual_seed(7)
    own = LlamaForCausalLM(LlamaConfig(**config)).to(device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in own.parameters():  # norms' weights are all 1 otherwise
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    made = {OURS: replaced(copy.deepcopy(own), ours.RMSNorm), TORCH: replaced(copy.deepcopy(own), torch.nn.RMSNorm)}
    return made | {OWN: own}


def replaced(model: torch.nn.Module, norm: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """The model with `norm` in place of its own norms, on their weights. ValueError if that is not two a layer and
    one."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == OWN
    ]
    wanted = 2 * model.config.num_hidden_layers + 1
    if len(places) != wanted:
        raise ValueError(f"the model has {len(places)} modules {OWN}; expected: {wanted}")
    for parent, name, child in places:
        weight = child.weight
        made = norm(weight.shape[0], child.variance_epsilon, device=weight.device, dtype=weight.dtype)
        made.weight = weight
        setattr(parent, name, made)
    return model


def differing(models: Mapping[str, torch.nn.Module], tokens: torch.Tensor) -> dict[str, float]:
    """How far the logits are from those with the model's own norms, over their size, where that is too far."""
    import torch

    with torch.no_grad():
        logits = {name: model(input_ids=tokens).logits.double() for name, model in models.items()}
    own = logits[OWN]
    far = {name: float((found - own).norm() / own.norm()) for name, found in logits.items()}
    return {name: error for name, error in far.items() if not error <= TOLERANCE}  # NaN is too far


def prefill(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
    import torch

    def call():
        with torch.no_grad():
            return model(input_ids=tokens)

    return call


def step(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
    """Forward, loss, backward, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def call():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return call


WORK = {PREFILL: prefill, STEP: step}


def milliseconds(call: Callable[[], object], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1e3


def measure(
    models: Mapping[str, torch.nn.Module], kind: str, size: tuple[int, int], rounds: int, wait: Callable[[], None]
) -> dict:
    """The record's entry of one case."""
    import torch

    model = models[OWN]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator).to(model.device)
    if far := differing(models, tokens):
        raise SystemExit(f"the logits differ from those with {OWN}, relative to their size: {far}")
    samplers = {}
    for name, model in models.items():
        model.train(kind == STEP)
        call = WORK[kind](model, tokens)
        for _ in range(3):  # kernels are compiled, the allocator finds its sizes
            call()
        samplers[name] = functools.partial(milliseconds, call, wait)
    taken = turns.take(samplers, rounds)
    return {
        "name": f"{kind}, {size[0]} x {size[1]} tokens",
        "kind": kind,
        "ms": {name: turns.quartiles(times) for name, times in taken.items()},
        "ours_over": {name: turns.ratio(taken[OURS], taken[name]) for name in (TORCH, OWN)},
    }


def table(content: dict) -> tables.Table:
    return tables.Table(
        "milliseconds: median (quartiles), and time with ours over each",
        ("", OURS, TORCH, OWN, f"over {TORCH}", f"over {OWN}"),
        [
            (
                case["name"],
                *(tables.spread(case["ms"][name], 2) for name in (OURS, TORCH, OWN)),
                *(f"{case['ours_over'][name]:.3f}" for name in (TORCH, OWN)),
            )
            for case in content["cases"]
        ],
    )


STUDY = Study(
    name="llama",
    about=__doc__,
    tables=lambda content: (table(content),),
    targets=TARGETS,
    distributions=("transformers", "torch", "triton"),
    rounds=200,
    quick="20 rounds",
)


def main() -> None:
    arguments = STUDY.asked()
    if reason := why_not():
        STUDY.parser().exit(2, f"llama needs transformers: {reason}\n")
    import torch

    rounds = 20 if arguments.quick else arguments.rounds
    content: dict[str, object] = {
        "config": CONFIG,
        "rounds": rounds,
        "versions": STUDY.versions(),
        "cases": [],
    }
    with untuned():
        for kind, sizes in SIZES.items():
            for size in sizes:
                entry = measure(models(CONFIG, "cuda"), kind, size, rounds, torch.cuda.synchronize)
                content["cases"].append(entry)
                torch.cuda.empty_cache()
    STUDY.report(content, arguments.record)


if __name__ == "__main__":
    main()
