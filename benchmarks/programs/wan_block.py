"""A residual block of the WAN VAE's decoder: our norms around cuDNN's convolutions, beside torch.

    python -m graphfuse.benchmarks.programs.wan_block [--record FOLDER] [--quick]

The graph of `examples/wan_vae_block.py`: twice norm, SiLU and a causal 3-D convolution with bias, plus the input. Peers
are the same block by torch's functions, on tensors in either layout, and compiled by torch.compile with max-autotune.
Ours is autotuned, too; it prints what each candidate took. Beside it is ours with the plans that cuDNN puts first.

GPU time of a call in a captured graph, all in turns. A tensor is larger than the L2, so each call finds it cold.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

if TYPE_CHECKING:
    import torch

OURS = "graphfuse with cuDNN, autotuned"
UNTUNED = "graphfuse with cuDNN, cuDNN's first plans"
EAGER, CONTIGUOUS, COMPILED = "torch", "torch, contiguous", "torch.compile (max-autotune)"
SHAPES = ((1, 96, 4, 480, 832), (1, 192, 4, 240, 416))
"""(samples, channels, frames, height, width): the last two stages of the decoder."""
WORKSPACE = 2 << 30
"""Bytes that plans may choose among."""
SECONDS = 90.0
"""Of autotuning: a convolution has some 40 plans, of which the slowest take a second to time."""
TOLERANCE = 2.0**-7
"""Accepted distance from float32, over its size."""


def fastest(over: str, limit: float) -> Target:
    """The time of a peer over ours, at worst."""

    def figures(content: dict):
        return ((case["us"][over]["median"] / case["us"][OURS]["median"], case["name"]) for case in content["cases"])

    return Target(f"times as fast as {over}, at worst", limit, True, figures)


TARGETS = (fastest(EAGER, 1.25), fastest(COMPILED, 1.05))


def example() -> ModuleType:
    """The example's file as a module: it has the graph and the same block by torch."""
    spec = importlib.util.spec_from_file_location("wan_vae_block", record.CHECKOUT / "examples/wan_vae_block.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values(shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """The block's inputs by name, channels last."""
    import torch

    generator = torch.Generator(device).manual_seed(7)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = (torch.randn(shape, device=device, generator=generator) * scale).bfloat16()
        return made.contiguous(memory_format=torch.channels_last_3d)

    channels = shape[1]
    pack = {"x": drawn(*shape)}
    for i in (1, 2):
        pack[f"gamma{i}"] = drawn(1, channels, 1, 1, 1, scale=0.25) + 1
        pack[f"weight{i}"] = drawn(channels, channels, 3, 3, 3, scale=(27 * channels) ** -0.5)
        pack[f"bias{i}"] = drawn(1, channels, 1, 1, 1)
    return pack


def calls(
    block: ModuleType, shape: tuple[int, ...], pack: dict[str, torch.Tensor]
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict]:
    """The block by everybody on inputs by name, and what the record tells of ours. Each call returns its result."""
    import torch

    from graphfuse.base.enums import heur_mode

    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def ours(tuned: bool) -> tuple[str, Callable[[], torch.Tensor]]:
        """The plan's name, and a call. GraphNotSupportedError where the reference engine would run some of it."""
        graph = block.build(shape, ["rows", "cudnn"], [heur_mode.A])
        out = torch.empty_like(pack["x"])
        if tuned:
            print(graph.autotune(pack | {"out": out}, workspace, time_budget=SECONDS))
        bound = graph.bind(pack | {"out": out}, workspace)

        def call() -> torch.Tensor:
            bound()
            return out

        account = graph.explanation()
        return account.plans[account.selected].name, call

    (first_plan, first), (best_plan, best) = ours(False), ours(True)
    flat = {name: value.contiguous() for name, value in pack.items()}
    torch._dynamo.reset()
    compiled = torch.compile(block.exact, mode="max-autotune-no-cudagraphs", dynamic=False)
    made = {
        OURS: best,
        UNTUNED: first,
        EAGER: functools.partial(block.exact, pack, torch.bfloat16),
        CONTIGUOUS: functools.partial(block.exact, flat, torch.bfloat16),
        COMPILED: functools.partial(compiled, pack, torch.bfloat16),
    }
    return made, {"plan": best_plan, "first_plan": first_plan}


def differing(made: Mapping[str, Callable[[], torch.Tensor]], exact: torch.Tensor) -> dict[str, float]:
    """How far results are from the exact one, over its size, where that is too far."""
    far = {name: float((call().float() - exact).norm() / exact.norm()) for name, call in made.items()}
    return {name: error for name, error in far.items() if not error <= TOLERANCE}  # NaN is too far


def measure(shape: tuple[int, ...]) -> dict:
    """The record's entry of one case."""
    import torch

    from graphfuse.runtime import timing

    block, pack = example(), values(shape, "cuda")
    made, plan = calls(block, shape, pack)
    with torch.backends.cudnn.flags(allow_tf32=False):
        exact = block.exact(pack, torch.float32)
    if far := differing(made, exact):
        raise SystemExit(f"results differ from float32, relative to its size: {far}")
    times = timing.compare([timing.capture([call], least_calls=2) for call in made.values()])
    return {
        "name": "x".join(map(str, shape)),
        **plan,
        "us": {name: vars(t) for name, t in zip(made, times, strict=True)},
    }


def table(content: dict) -> tables.Table:
    names = (OURS, UNTUNED, EAGER, CONTIGUOUS, COMPILED)
    return tables.Table(
        "microseconds: median (least to most)",
        ("", *names),
        [(case["name"], *(tables.spread(case["us"][name], 0) for name in names)) for case in content["cases"]],
    )


STUDY = Study(
    name="wan-block",
    about=__doc__,
    tables=lambda content: (table(content),),
    targets=TARGETS,
    distributions=("torch", "triton", "nvidia-cudnn-frontend"),
    quick="the first shape alone",
)


def main() -> None:
    arguments = STUDY.asked()
    content: dict[str, object] = {"versions": STUDY.versions(), "cases": []}
    with untuned():
        for shape in SHAPES[: 1 if arguments.quick else None]:
            content["cases"].append(measure(shape))
    for case in content["cases"]:
        print(f"{case['name']}: {case['plan']}\n  cuDNN's first: {case['first_plan']}")
    STUDY.report(content, arguments.record)


if __name__ == "__main__":
    main()
