"""Calls of whole autoencoders by everybody: how they are measured, and the options, tables and targets of a study.

The record is written after each case. torch.compile takes minutes: with --resume, --only and --ways a session can
measure some ways, and keep the others of the record that is there.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from graphfuse.benchmarks import record, session, tables
from graphfuse.benchmarks.programs import kernel_times, turns
from graphfuse.benchmarks.programs.autoencoder_cases import DecodeCase
from graphfuse.benchmarks.programs.llama import milliseconds
from graphfuse.benchmarks.programs.model_counts import OutOfTime, limited, peak_bytes
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.wan_vae_cases import COMPILED, EAGER, OURS, WAYS, VideoCase, VideoWay
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

DISTRIBUTIONS = ("torch", "triton", "diffusers")
NAMES = tuple(way.name for way in WAYS.values())
WARM = 2
QUICK_ROUNDS = 5
LONG = 1000.0
"""Milliseconds of a call that is timed in half of the rounds."""
SHORT = 12
"""Digits of a commit that a page has."""
KEPT, SHOWN = 12, 60
"""Kernels of a call that a record names, and characters of a name that a page has."""

Case = VideoCase | DecodeCase


def measured(content: dict, call: str, *ways: str) -> list[tuple[str, list[dict]]]:
    """Names of the cases of a call that have all these ways, and their entries."""
    return [
        (case["name"], [case["ways"][way] for way in ways])
        for case in content["cases"]
        if case["name"].startswith(call) and all("ms" in case["ways"].get(way, {}) for way in ways)
    ]


def faster(over: str, call: str, limit: float) -> Target:
    def figures(content: dict):
        return ((a["ms"]["median"] / b["ms"]["median"], name) for name, (a, b) in measured(content, call, over, OURS))

    return Target(f"{call}: times as fast as {over}, at worst", limit, True, figures)


def no_more(what: str, key: str, limit: float) -> Target:
    def figures(content: dict):
        return ((b[key] / a[key], name) for name, (a, b) in measured(content, "", EAGER, OURS))

    return Target(f"{what} over eager's, at worst", limit, False, figures)


def sample(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    import torch

    return turns.between_events(call) if torch.cuda.is_available() else milliseconds(call, lambda: None)


def _as_graph(call: Callable[[], object], rounds: int) -> dict[str, float] | None:
    """Milliseconds of a call that is replayed as a CUDA graph, without the host's part; None if it is not captured."""
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return turns.quartiles([turns.between_events(graph.replay) for _ in range(rounds)])


def measure(
    case: Case,
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
            if on_gpu:
                entries[title]["graph_ms"] = _as_graph(calls[title], rounds)
            if top:
                print(f"\n{case}, {title}: kernels by time\n{kernel_times.told(kernels, top)}")
    return entries


def times(content: dict) -> tables.Table:
    def cells(w: dict) -> tuple[str, ...]:
        if "ms" not in w:
            return (w["failed"], *"----")
        graph = tables.spread(w["graph_ms"], 1) if w.get("graph_ms") else "-"
        memory, first = f"{w['peak_bytes'] / 2**30:.2f}", f"{w['first_s']:.1f}"
        return (tables.spread(w["ms"], 1), graph, f"{w['error']:.4f}", memory, first)

    return tables.Table(
        "a call, in milliseconds: median (quartiles)",
        ("case", "way", "ms", "as a CUDA graph", "error against float32", "peak GiB", "first call, s"),
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


def compared(contents: Sequence[dict]) -> tables.Table:
    """One row for each decode that all of eager mode, torch.compile and ``fuse`` were measured in."""

    def row(name: str, found: Sequence[dict]) -> tuple[str, ...]:
        eager, compiled, ours = (entry["ms"]["median"] for entry in found)
        graphs = [entry.get("graph_ms") for entry in found[1:]]
        as_graphs = f"{graphs[0]['median'] / graphs[1]['median']:.2f}×" if all(graphs) else "-"
        name = name.replace("decode-", "AutoencoderKLWan ").removeprefix("decode ")
        return (name, *(f"{ms:.1f}" for ms in (eager, compiled, ours)), f"{compiled / ours:.2f}×", as_graphs)

    return tables.Table(
        "milliseconds of a decode",
        ("latents", EAGER, COMPILED, f"`{OURS}`", f"times as fast as {COMPILED}", "both as CUDA graphs"),
        [row(*one) for content in contents for one in measured(content, "decode", EAGER, COMPILED, OURS)],
    )


def commits(content: dict) -> tables.Table:
    """Commits of what a record has kept of earlier ones."""
    own = content["environment"]["commit"] if "environment" in content else None
    found = {
        (case["name"], entry["commit"]): None
        for case in content["cases"]
        for entry in case["ways"].values()
        if own and entry.get("commit", own) != own
    }
    rows = [(name, commit[:SHORT]) for name, commit in found]
    return tables.Table("cases with ways that were measured at another commit", ("case", "commit"), rows, left=2)


def shown(content: dict) -> tuple[tables.Table, ...]:
    more = (longest(content), commits(content))
    return times(content), kinds(content), *(table for table in more if table.rows)


def asked(
    study: Study,
    cases: Sequence[Case],
    arguments: Sequence[str] | None,
    called_as: str | None = None,
    no_gpu: int = 2,
    quick: Sequence[Case] = (),
) -> argparse.Namespace:
    """The options of a study, with the cases that run as `cases`. Ends the process where they are wrong, and with the
    exit code `no_gpu` where there is no GPU or no diffusers. quick: the cases of --quick."""
    parser, names = study.parser(called_as), "; ".join(map(str, cases))
    parser.add_argument("--resume", action="store_true", help="keep what the record there has")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help=f"cases with it in their name: {names}")
    parser.add_argument("--ways", nargs="+", default=[], metavar="WAY", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=float, metavar="N", help="that a way takes at most before it is timed")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    given = parser.parse_args(arguments)
    study.refuse(parser, given)
    if study.quick and given.quick:
        cases, given.rounds = quick, QUICK_ROUNDS
    for one in given.only:
        if not any(one in str(case) for case in cases):
            parser.error(f"--only {one}: there are {'; '.join(map(str, cases))}")
    given.order = list(map(str, cases))
    given.cases = [case for case in cases if not given.only or any(one in str(case) for one in given.only)]
    for one in given.ways:
        if one not in NAMES:
            parser.error(f"--ways {one}: there are {', '.join(NAMES)}")
    if given.seconds is not None and not given.seconds > 0:
        parser.error(f"--seconds {given.seconds:g}: accepted: a number above 0")
    study.need_gpu(parser, no_gpu)
    if importlib.util.find_spec("diffusers") is None:
        told = f"{study.name.replace('-', '_')} needs diffusers, which is not installed: pip install diffusers\n"
        parser.exit(no_gpu, told)
    return given


def chosen(names: Sequence[str], seconds: float | None) -> dict[str, VideoWay]:
    """Ways by title, those with these names, all for none. seconds: in place of each way's own, unless None."""
    found = {title: way for title, way in WAYS.items() if not names or way.name in names}
    return found if seconds is None else {t: dataclasses.replace(way, seconds=seconds) for t, way in found.items()}


def merged(cases: Sequence[dict], name: str, entries: dict[str, dict], order: Sequence[str]) -> list[dict]:
    """Cases with entries of one more, or of more ways of one that is there. order: names of the cases of the study,
    which are kept."""
    found = {case["name"]: dict(case["ways"]) for case in cases}
    found[name] = found.get(name, {}) | entries
    return [{"name": n, "ways": {way: found[n][way] for way in WAYS if way in found[n]}} for n in order if n in found]


def run(
    study: Study, asked: argparse.Namespace, others: Mapping[str, Callable[[], object]] = MappingProxyType({})
) -> None:
    """Measures the cases that are asked for. others: what the record has beside them, made where it is not there."""
    about = record.environment(record.CHECKOUT)
    content: dict = {"versions": study.versions(), "cases": []}
    if asked.resume and (file := record.path(asked.record, study.name, about)).exists():
        before = json.loads(file.read_text())
        for entry in (entry for case in before["cases"] for entry in case["ways"].values()):
            entry.setdefault("commit", before["environment"]["commit"])
        content |= {key: before[key] for key in (*others, "cases") if key in before}
    ways = chosen(asked.ways, asked.seconds)
    if OURS in ways:
        content |= {key: made() for key, made in others.items() if key not in content}
    with untuned():
        for case in asked.cases:
            if not (of_case := {title: ways[title] for title in case.ways if title in ways}):
                continue
            entries = measure(case, of_case, asked.rounds, asked.top)
            for entry in entries.values():
                entry["commit"] = about["commit"]
            content["cases"] = merged(content["cases"], str(case), entries, asked.order)
            if asked.record:
                record.write(asked.record, study.name, about, content)
    study.report(content)
