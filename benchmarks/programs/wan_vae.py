"""The VAE of WAN as diffusers has it, at the published widths with random weights: decode and encode, by everybody.

    python -m graphfuse.benchmarks.programs.wan_vae [--record FOLDER] [--resume] [--only CASE ...] [--ways WAY ...]
                                                    [--seconds N] [--rounds N] [--quick] [--top N]

Times are of whole calls, the host's part in them, from CUDA events, all ways in turns. The time by kind of kernel, and
that of the kernels that take longest, is the profiler's. Memory is torch's peak over what was allocated before the
call. First calls are measured in processes of their own: eager's, and ours with no kernels kept and with those of the
process before. `graphfuse bench wan-vae` is this program.

The record is written after each case. torch.compile takes minutes: with --resume, --only and --ways a session can
measure some ways, and keep the others of the record that is there. The slowest, alone:

    graphfuse bench wan-vae --record FOLDER --resume --ways compile_max_autotune --seconds 480
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from graphfuse.base import settings
from graphfuse.benchmarks import record, session, tables
from graphfuse.benchmarks.programs import kernel_times, turns
from graphfuse.benchmarks.programs.autoencoder_cases import DecodeCase
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_counts import OutOfTime, limited, peak_bytes
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.wan_vae_cases import (
    CASES,
    COMPILED,
    EAGER,
    OURS,
    QUICK,
    WAYS,
    VideoCase,
    VideoWay,
)
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

NAME = "wan-vae"
DISTRIBUTIONS = ("torch", "triton", "diffusers")
NAMES = tuple(way.name for way in WAYS.values())
WARM = 2
LONG = 1000.0
"""Milliseconds of a call that is timed in half of the rounds."""
STARTS = 3
"""Processes whose first calls are timed."""
KEPT, SHOWN = 12, 60
"""Kernels of a call that a record names, and characters of a name that a page has."""


def _measured(content: dict, call: str, *ways: str) -> list[tuple[str, list[dict]]]:
    """Names of the cases of a call that have all these ways, and their entries."""
    return [
        (case["name"], [case["ways"][way] for way in ways])
        for case in content["cases"]
        if case["name"].startswith(call) and all("ms" in case["ways"].get(way, {}) for way in ways)
    ]


def faster(over: str, call: str, limit: float) -> Target:
    def figures(content: dict):
        return ((a["ms"]["median"] / b["ms"]["median"], name) for name, (a, b) in _measured(content, call, over, OURS))

    return Target(f"{call}: times as fast as {over}, at worst", limit, True, figures)


def _milliseconds(content: dict) -> list[tuple[float, str]]:
    return [(ours["ms"]["median"], name) for name, (ours,) in _measured(content, str(CASES[0]), OURS)]


def no_more(what: str, key: str, limit: float) -> Target:
    def figures(content: dict):
        return ((b[key] / a[key], name) for name, (a, b) in _measured(content, "", EAGER, OURS))

    return Target(f"{what} over eager's, at worst", limit, False, figures)


def _started(what: str, key: str, limit: float) -> Target:
    def figures(content: dict):
        return [(content["start"][key], "")] if "start" in content else []

    return Target(f"first decode, {what}, seconds", limit, False, figures)


TARGETS = (
    Target(f"{CASES[0]}, milliseconds", 97.0, False, _milliseconds),
    faster(EAGER, "decode", 2.1),
    faster(COMPILED, "decode", 2.1),
    faster(EAGER, "encode", 1.8),
    no_more("error against float32", "error", 1.05),
    no_more("peak memory", "peak_bytes", 1.0),
    _started("no kernels kept", "cold_s", 10.0),
    _started("kernels kept", "kept_s", 2.0),
)


def sample(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    import torch

    return turns.between_events(call) if torch.cuda.is_available() else milliseconds(call, lambda: None)


def measure(
    case: VideoCase | DecodeCase,
    ways: Mapping[str, VideoWay],
    rounds: int,
    top: int = 0,
    device: str = "cuda",
    sizes: Mapping[str, object] = MappingProxyType({}),
) -> dict:
    """Entries of one case, by way. sizes: of the model, for tests; on a CPU memory and kernels are not counted."""
    import torch

    entries: dict[str, dict] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    x, on_gpu = case.given(device), device.startswith("cuda")
    with torch.no_grad():
        with torch.backends.cudnn.flags(allow_tf32=False):
            exact = case.called(case.model(torch.float32, device, **sizes))(x).cpu()
        x, base = x.bfloat16(), case.model(torch.bfloat16, device, **sizes)
        for title, way in ways.items():
            try:
                with limited(way.seconds, title):
                    begin = time.perf_counter()
                    of = case.called(way.make(copy.deepcopy(base)))
                    made = of(x).float().cpu()
                    first = time.perf_counter() - begin
                    call = calls[title] = lambda of=of: of(x)
                    for _ in range(WARM):
                        call()
                far = float((made - exact).norm() / exact.norm())
                entries[title] = {"first_s": first, "error": far, "peak_bytes": peak_bytes(call) if on_gpu else 0}
            except (Exception, OutOfTime) as error:  # of a peer, whose reason is recorded
                calls.pop(title, None)
                told = str(error) if isinstance(error, OutOfTime) else session.first_line(error)
                entries[title] = {"failed": told[:200]}
            gc.collect()
        longest = max((sample(call) for call in calls.values()), default=0.0)
        samplers = {title: functools.partial(sample, call) for title, call in calls.items()}
        for title, times in turns.take(samplers, max(3, rounds // 2) if longest > LONG else rounds).items():
            kernels = kernel_times.taken(calls[title]) if on_gpu else {}
            entries[title] |= {
                "ms": turns.quartiles(times),
                "kinds": kernel_times.by_kind(kernels),
                "kernels": sum(count for count, _ in kernels.values()),
                "longest": kernel_times.longest(kernels, KEPT),
            }
            if top:
                print(f"\n{case}, {title}: kernels by time\n{kernel_times.told(kernels, top)}")
    return entries


def started() -> dict[str, float]:
    """Seconds of a first decode in a process: fusing with it, with no kernels kept and with those that this kept, and
    as diffusers has it. Medians of processes, but for that without kernels, of which there is one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _first(OURS, folder)
        kept, eager = ([_first(way, folder) for _ in range(STARTS)] for way in (OURS, EAGER))
    return {"cold_s": cold, "kept_s": statistics.median(kept), "eager_s": statistics.median(eager)}


_CHILD = """
import sys, time, torch
from graphfuse.benchmarks.programs import wan_vae_cases as cases
case = cases.CASES[0]
vae, x = case.model(torch.bfloat16, "cuda"), case.given("cuda").bfloat16()
import graphfuse.torch
torch.nn.functional.conv2d(x[:, :, 0], torch.ones(1, 16, 3, 3, device="cuda", dtype=x.dtype))  # loads cuDNN
torch.cuda.synchronize()
begin = time.perf_counter()
with torch.no_grad():
    case.called(cases.WAYS[sys.argv[1]].make(vae))(x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def _first(way: str, folder: str) -> float:
    # Bytecode is kept, as Python does by default.
    env = settings.environment(GRAPHFUSE_CACHE_DIR=folder, PYTHONDONTWRITEBYTECODE="")
    done = subprocess.run([sys.executable, "-c", _CHILD, way], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def times(content: dict) -> tables.Table:
    def cells(w: dict) -> tuple[str, ...]:
        if "ms" not in w:
            return (w["failed"], "-", "-", "-")
        return (tables.spread(w["ms"], 1), f"{w['error']:.4f}", f"{w['peak_bytes'] / 2**30:.2f}", f"{w['first_s']:.1f}")

    return tables.Table(
        "a call, in milliseconds: median (quartiles)",
        ("case", "way", "ms", "error against float32", "peak GiB", "first call, s"),
        [(case["name"], way, *cells(w)) for case in content["cases"] for way, w in case["ways"].items()],
        left=2,
    )


def kinds(content: dict) -> tables.Table:
    return tables.Table(
        "milliseconds of the GPU, by kind of kernel",
        ("case", "way", *kernel_times.ALL, "launches"),
        [
            (case["name"], way, *(f"{w['kinds'][name]:.1f}" for name in kernel_times.ALL), str(w["kernels"]))
            for case in content["cases"]
            for way, w in case["ways"].items()
            if "kinds" in w
        ],
        left=2,
    )


def longest(content: dict) -> tables.Table:
    """The kernels that take longest in our way."""
    return tables.Table(
        f"milliseconds of the GPU, the {KEPT} kernels that take longest, {OURS}",
        ("case", "kernel", "kind", "launches", "ms"),
        [
            (case["name"], f"`{one['name'][:SHOWN]}`", one["kind"], str(one["launches"]), f"{one['ms']:.2f}")
            for case in content["cases"]
            for one in case["ways"].get(OURS, {}).get("longest", ())
        ],
        left=3,
    )


def starts(content: dict) -> tables.Table:
    """First calls of processes, where a record has that of eager, too."""
    found = content.get("start", {})
    called = {"eager_s": EAGER, "kept_s": f"{OURS}, kernels kept", "cold_s": f"{OURS}, no kernels kept"}
    rows = [(title, f"{found[key]:.1f}") for key, title in called.items() if "eager_s" in found]
    return tables.Table(f"the first {CASES[0]} of a process, seconds", ("way", "s"), rows)


def shown(content: dict) -> tuple[tables.Table, ...]:
    more = (longest(content), starts(content))
    return times(content), kinds(content), *(table for table in more if table.rows)


STUDY = Study(NAME, __doc__, shown, TARGETS, DISTRIBUTIONS, rounds=12, quick="short cases, nothing compiled, 5 rounds")


def chosen(names: Sequence[str], seconds: float | None) -> dict[str, VideoWay]:
    """Ways by title, those with these names, all for none. seconds: in place of each way's own, unless None."""
    found = {title: way for title, way in WAYS.items() if not names or way.name in names}
    return found if seconds is None else {t: dataclasses.replace(way, seconds=seconds) for t, way in found.items()}


def merged(cases: Sequence[dict], name: str, entries: dict[str, dict]) -> list[dict]:
    """Cases with entries of one more, or of more ways of one that is there; cases and ways in the order of the
    bench."""
    found = {case["name"]: dict(case["ways"]) for case in cases}
    found[name] = found.get(name, {}) | entries
    order = [str(case) for case in CASES]
    return [
        {"name": n, "ways": {way: found[n][way] for way in WAYS if way in found[n]}}
        for n in sorted(found, key=order.index)
    ]


def main(arguments: Sequence[str] | None = None, called_as: str | None = None, no_gpu: int = 2) -> None:
    """arguments, called_as: the command line and how it is called. no_gpu: the exit code where there is no GPU."""
    parser = STUDY.parser(called_as)
    parser.add_argument("--resume", action="store_true", help="keep what the record there has")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=", ".join(map(str, CASES)))
    parser.add_argument("--ways", nargs="+", default=[], metavar="WAY", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=float, metavar="N", help="that a way takes at most before it is timed")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    asked = parser.parse_args(arguments)
    STUDY.refuse(parser, asked)
    for one in asked.only:
        if one not in map(str, CASES):
            parser.error(f"{one}: there are {', '.join(map(str, CASES))}")
    for one in asked.ways:
        if one not in NAMES:
            parser.error(f"{one}: there are {', '.join(NAMES)}")
    if asked.seconds is not None and not asked.seconds > 0:
        parser.error(f"--seconds {asked.seconds:g}: accepted: a number above 0")
    STUDY.need_gpu(parser, no_gpu)
    need_diffusers(STUDY, no_gpu)
    _run(asked)


def need_diffusers(study: Study, code: int = 2) -> None:
    """Ends the process with this exit code where diffusers is not installed."""
    if importlib.util.find_spec("diffusers") is None:
        told = f"{study.name.replace('-', '_')} needs diffusers, which is not installed: pip install diffusers\n"
        study.parser().exit(code, told)


def _run(asked: argparse.Namespace) -> None:
    about = record.environment(record.CHECKOUT)
    content: dict = {"versions": STUDY.versions(), "cases": []}
    if asked.resume and (file := record.path(asked.record, NAME, about)).exists():
        before = json.loads(file.read_text())
        content |= {key: before[key] for key in ("start", "cases") if key in before}
    ways = chosen(asked.ways, asked.seconds)
    if not asked.quick and "start" not in content and OURS in ways:
        content["start"] = started()
    with untuned():
        for case in QUICK if asked.quick else CASES:
            of_case = {title: ways[title] for title in case.ways if title in ways}
            if not of_case or asked.only and str(case) not in asked.only:
                continue
            entries = measure(case, of_case, 5 if asked.quick else asked.rounds, asked.top)
            content["cases"] = merged(content["cases"], str(case), entries)
            if asked.record:
                record.write(asked.record, NAME, about, content)
    STUDY.report(content)


if __name__ == "__main__":
    main()
