"""The VAE of WAN as diffusers has it, at the published widths with random weights: decode and encode, by everybody.

    python -m graphfuse.benchmarks.programs.wan_vae [--record FOLDER] [--only CASE ...] [--ways WAY ...] [--rounds N]
                                                    [--quick] [--top N]

diffusers must be installed, or in a folder that PYTHONPATH names. Times are of whole calls, from CUDA events, all ways
in turns; the time by kind of kernel is the profiler's; memory is torch's peak over what is allocated before a call.
"""

from __future__ import annotations

import argparse
import copy
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.target import Target

if TYPE_CHECKING:
    import torch

EAGER, BY_HAND, COMPILED, COMPILED_MOST, OURS = (
    "eager",
    "eager, channels-last",
    "torch.compile",
    "torch.compile, channels-last, max-autotune",
    "fuse",
)
QUICK_WAYS = (EAGER, BY_HAND, OURS)
KINDS = {
    "layout": r"nchwToNhwc|nhwcToNchw|AddPadding|nchwAdd|transpose",
    "attention": r"fmha|flash|attention|softmax",
    "convolution": r"fprop|conv|implicit|xmma|cudnn",
    "matrix product": r"gemm|nvjet|cublas|cutlass|splitK",
    "graphfuse": r"^gf_|graphfuse|by_row|persistent_rows|rows",
    "copies, padding": r"copy|Cat|[Mm]emcpy|[Mm]emset|pad|[Ff]ill|upsample",
}
"""Kinds of kernels by what their names have, the first that fits; others are elementwise."""
OTHER = "elementwise"
DISTRIBUTIONS = ("torch", "triton", "diffusers")


@dataclass(frozen=True)
class Case:
    """What is called: decode of latents, or encode of the frames that they stand for."""

    call: str
    frames: int
    height: int = 60
    width: int = 104

    def __str__(self) -> str:
        return f"{self.call}-{self.frames}x{self.height}x{self.width}"

    @property
    def shape(self) -> tuple[int, ...]:
        if self.call == "decode":
            return (1, 16, self.frames, self.height, self.width)
        return (1, 3, 4 * self.frames - 3, 8 * self.height, 8 * self.width)


CASES = (Case("decode", 3), Case("decode", 21), Case("encode", 3))
QUICK = (CASES[0], CASES[2])


def _times_as_fast(over: str, call: str, limit: float) -> Target:
    def figure(content: dict):
        found = [
            (case["ways"][over]["ms"]["median"] / case["ways"][OURS]["ms"]["median"], case["name"])
            for case in content["cases"]
            if case["name"].startswith(call) and {over, OURS} <= {n for n, w in case["ways"].items() if "ms" in w}
        ]
        return min(found, default=None)

    return Target(f"{call}: times as fast as {over}, at worst", limit, True, figure)


TARGETS = (
    _times_as_fast(EAGER, "decode", 2.1),
    _times_as_fast(COMPILED, "decode", 2.1),
    _times_as_fast(EAGER, "encode", 1.8),
)


def model(dtype: torch.dtype, device: str) -> torch.nn.Module:
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(7)
    made = AutoencoderKLWan().eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("gamma"):
                p.add_(torch.randn_like(p) * 0.1)
    return made.to(device, dtype)


def called(vae: torch.nn.Module, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    if case.call == "decode":
        return lambda x: vae.decode(x).sample
    return lambda x: vae.encode(x).latent_dist.parameters


def _by_hand(vae: torch.nn.Module) -> torch.nn.Module:
    """A model whose convolutions have channels-last weights, as a user would set them."""
    import torch

    formats = {5: torch.channels_last_3d, 4: torch.channels_last}
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=formats[module.weight.dim()])
    return vae


def _compiled(vae: torch.nn.Module, **options: object) -> torch.nn.Module:
    import torch

    torch._dynamo.reset()
    for part in (vae.encoder, vae.decoder):
        part.compile(**options)
    return vae


def _fused(vae: torch.nn.Module) -> torch.nn.Module:
    from graphfuse.torch import fuse

    fuse(vae)
    return vae


WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    EAGER: lambda vae: vae,
    BY_HAND: _by_hand,
    COMPILED: _compiled,
    COMPILED_MOST: lambda vae: _compiled(_by_hand(vae), mode="max-autotune-no-cudagraphs"),
    OURS: _fused,
}


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def by_kernel(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Numbers of launches and milliseconds of each kernel of a call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, ms = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, ms + event.time_range.elapsed_us() / 1000)
    return found


def sample(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call has allocated at most, beside what there was before."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, ways: list[str], rounds: int, top: int) -> dict:
    """The record's entry of one case."""
    import torch

    x = torch.randn(case.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    if case.call == "encode":
        x = x.clamp(-1, 1)
    tf32 = torch.backends.cudnn.flags(allow_tf32=False)
    with torch.no_grad(), tf32:
        exact = called(model(torch.float32, "cuda"), case)(x)
    given, entry, calls = x.bfloat16(), {}, {}
    base = model(torch.bfloat16, "cuda")
    with torch.no_grad():
        for way in ways:
            try:
                begin = time.perf_counter()
                call = called(WAYS[way](copy.deepcopy(base)), case)
                out = call(given)
                torch.cuda.synchronize()
                first = time.perf_counter() - begin
                far = float((out.float() - exact).norm() / exact.norm())
                del out
                calls[way] = lambda call=call: call(given)
                for _ in range(2):
                    calls[way]()
                entry[way] = {"first_s": first, "error": far, "peak_bytes": peak(calls[way])}
            except Exception as error:  # a peer that fails is said
                calls.pop(way, None)
                entry[way] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            gc.collect()
        times = {way: [] for way in calls}
        for _ in range(rounds):
            for way, call in calls.items():
                times[way].append(sample(call))
        for way, call in calls.items():
            found = by_kernel(call)
            kinds: dict[str, float] = {}
            for name, (_, ms) in found.items():
                kinds[kind(name)] = kinds.get(kind(name), 0.0) + ms
            low, median, high = statistics.quantiles(times[way], n=4)
            entry[way] |= {"ms": {"median": median, "low": low, "high": high}, "kinds": kinds}
            entry[way]["kernels"] = sum(count for count, _ in found.values())
            if top and way in (OURS, BY_HAND):
                print(f"\n{case}, {way}: kernels by time")
                for name, (count, ms) in sorted(found.items(), key=lambda item: -item[1][1])[:top]:
                    print(f"{ms:9.3f} ms {count:5d} x  {kind(name):16} {name[:150]}")
    return {"name": str(case), "ways": entry}


def times(content: dict) -> tables.Table:
    lines = [
        (
            case["name"],
            way,
            *(
                (f"{w['ms']['median']:.1f} ({w['ms']['low']:.1f} to {w['ms']['high']:.1f})", f"{w['error']:.4f}")
                if "ms" in w
                else ("-", w.get("failed", "-"))
            ),
            f"{w['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in w else "-",
            f"{w['first_s']:.1f}" if "first_s" in w else "-",
        )
        for case in content["cases"]
        for way, w in case["ways"].items()
    ]
    return tables.Table(
        "a call", ("case", "way", "ms: median (quartiles)", "error against float32", "peak GiB", "first call s"), lines
    )


def kinds(content: dict) -> tables.Table:
    names = [*KINDS, OTHER]
    lines = [
        (case["name"], way, *(f"{w['kinds'].get(name, 0.0):.1f}" for name in names), str(w["kernels"]))
        for case in content["cases"]
        for way, w in case["ways"].items()
        if "kinds" in w
    ]
    return tables.Table("milliseconds by kind of kernel", ("case", "way", *names, "kernels"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write wan-vae-DEVICE.json into FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=", ".join(map(str, CASES)))
    parser.add_argument("--ways", nargs="+", default=[], metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=12, help="samples of each way")
    parser.add_argument("--quick", action="store_true", help="short cases, without what is compiled, and no record")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    arguments = parser.parse_args()
    if arguments.quick and arguments.record:
        parser.error("--quick leaves no record; accepted: one of --quick and --record")
    if unknown := {*arguments.only}.difference(map(str, CASES)) | {*arguments.ways}.difference(WAYS):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(map(str, CASES))}; ways {', '.join(WAYS)}")
    if reason := record.gpu_needed("wan_vae"):
        parser.exit(2, f"{reason}\n")
    from rich.console import Console

    cases = [c for c in (QUICK if arguments.quick else CASES) if not arguments.only or str(c) in arguments.only]
    ways = arguments.ways or [*(QUICK_WAYS if arguments.quick else WAYS)]
    content: dict = {"versions": {name: record.version(name) for name in DISTRIBUTIONS}, "cases": []}
    console = Console(highlight=False, width=200)
    for case in cases:
        content["cases"].append(measure(case, ways, 5 if arguments.quick else arguments.rounds, arguments.top))
        if arguments.record:
            record.write(arguments.record, "wan-vae", record.environment(record.CHECKOUT), content)
    for each in (times(content), kinds(content), tables.judged(TARGETS, content)):
        console.print(tables.terminal(each))


if __name__ == "__main__":
    main()
