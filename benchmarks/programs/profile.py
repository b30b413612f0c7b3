"""What keeps our kernel busy: a few cases under Nsight Compute.

    python -m graphfuse.benchmarks.programs.profile [BENCH] [--record FOLDER] [--csv FILE]

The launches of one call of each case of a bench are profiled in a child of `ncu`, with tuned knobs of the first-party
tables, a cold L2 and the clocks as they are. ncu replays each kernel; cooperative launches of clusters, which it cannot
replay, are profiled as ranges in a second run, and what refers to time elapsed is null. The record keeps every metric
that was had and the figures made of them; what a version of ncu does not have is null, too. --csv keeps what ncu itself
wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphfuse.base import settings
from graphfuse.base.errors import GraphfuseError
from graphfuse.benchmarks import (
    add_rmsnorm_blocks,
    cross_entropy,
    layernorm,
    layernorm_backward,
    qk_norm_rope_cache,
    qk_norm_rope_training,
    record,
    rmsnorm_backward,
    rmsnorm_channels,
    rmsnorm_silu,
    sizes,
)
from graphfuse.benchmarks.programs import ncu
from graphfuse.benchmarks.row_case import BufferCase
from graphfuse.benchmarks.untuned import untuned
from graphfuse.contract.engine import Launch
from graphfuse.planning.plan import Part

_SILU = ((399360, 1024), (399360, 512), (24960, 1024))
_BACKWARD = ((4096, 1024), (4096, 2048), (4096, 16384), (32768, 4096), (32768, 8192), (32768, 32768))
CASES = {
    "rmsnorm-silu": (
        *(rmsnorm_silu.RmsNormSiluCase(r, c, o) for r, c in _SILU for o in ("nvfp4", "fp8_e4m3", "bf16")),
        *(rmsnorm_silu.RmsNormSiluCase(1560, 320, o) for o in ("nvfp4", "bf16")),
    ),
    "rmsnorm-backward": (
        *(rmsnorm_backward.RmsNormBackwardCase(r, c, "bf16") for r, c in _BACKWARD),
        rmsnorm_backward.RmsNormBackwardCase(32768, 32768, "fp32"),
    ),
    "add-rmsnorm-backward": tuple(rmsnorm_backward.AddRmsNormBackwardCase(32768, c, "bf16") for c in (8192, 32768)),
    "layernorm": (
        layernorm.LayerNormCase(4096, 1024),
        layernorm.LayerNormCase(4096, 8192),
        layernorm.LayerNormCase(32768, 1024),
    ),
    "layernorm-backward": tuple(
        layernorm_backward.LayerNormBackwardCase(*size)
        for size in ((4096, 1024), (4096, 2048), (4096, 4096), (32768, 2048))
    ),
    "qk-norm-rope-training": tuple(
        qk_norm_rope_training.QkNormRopeTrainingCase(tokens, *qk_norm_rope_training.HEADS, interleaved)
        for tokens in (1024, 32768)
        for interleaved in (False, True)
    ),
    "add-rmsnorm-fp8-blocks": tuple(
        add_rmsnorm_blocks.AddRmsNormBlocksCase(rows, 7168, output)
        for rows, output in itertools.product((16, 128, 4096), add_rmsnorm_blocks.OUTPUTS)
    ),
    "rmsnorm-channels": tuple(
        rmsnorm_channels.RmsNormChannelsCase(*video, layout)
        for video in rmsnorm_channels.VIDEOS
        for layout in rmsnorm_channels.LAYOUTS
    ),
    "cross-entropy": tuple(cross_entropy.CrossEntropyCase(*size) for size in cross_entropy.SIZES),
    "qk-norm-rope-cache": tuple(
        qk_norm_rope_cache.QkNormRopeCacheCase(tokens, *qk_norm_rope_training.HEADS, output=output)
        for tokens in (1024, 32768)
        for output in qk_norm_rope_cache.TYPES
    ),
}
"""Those of each bench of which it is asked."""
_SYSTEM = Path("/")
_NEWEST_LAST = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")


class ProfilerError(GraphfuseError):
    """Nsight Compute is absent, or profiled nothing."""


@dataclass(frozen=True)
class Run:
    """One run of ncu. ran: what the child says of each launch, with its case's place in CASES. text: what ncu wrote."""

    replay: ncu.Replay
    ran: list[dict]
    text: str


def find(root: Path = _SYSTEM) -> Path:
    """ncu, on PATH, in CUDA_HOME and CUDA_PATH or where installers put it below `root`."""
    named = [folder / "bin" / "ncu" for _, folder in settings.toolkit_roots()]
    usual = [root / "usr/local/cuda/bin/ncu", *(f for p in _NEWEST_LAST for f in sorted(root.glob(p), reverse=True))]
    on_path = shutil.which("ncu")
    for file in ([Path(on_path)] if on_path else []) + named + usual:
        if file.is_file():
            return file
    places = ", ".join(["PATH", *(str(file.parent) for file in named), *(f"/{p}" for p in _NEWEST_LAST)])
    raise ProfilerError(f"Nsight Compute's command line, ncu, is not there; looked in {places}")


def replay_of(launch: Launch) -> ncu.Replay:
    """How a launch can be profiled: replay of a kernel whose clusters are cooperative ends with LaunchFailed."""
    return ncu.RANGE if launch.cooperative and launch.cluster > 1 else ncu.KERNEL


def planned(bench: str, handle: object) -> dict[ncu.Replay, list[int]]:
    """The places of a bench's cases by how they are replayed, as they are planned for the handle's device."""
    places: dict[ncu.Replay, list[int]] = {}
    with untuned():
        for place, case in enumerate(CASES[bench]):
            (replay,) = {replay_of(part.outline) for part in _parts(case, handle)}
            places.setdefault(replay, []).append(place)
    return places


def _parts(case: BufferCase, handle: object) -> Sequence[Part]:
    """What is launched one after the other."""
    return sizes.planner(case.graph(handle), handle).plans[0].parts


def start(bench: str, places: Sequence[int]) -> list[str]:
    """The command of a child."""
    code = f"from graphfuse.benchmarks.programs.profile import child; child({bench!r}, {places!r})"
    return [sys.executable, "-c", code]


def child(bench: str, places: Sequence[int]) -> None:
    """Launch the kernels of each case in these places of a bench, the second time to be profiled; print what ran as
    JSON."""
    import torch

    import graphfuse as gf
    from graphfuse.benchmarks import session
    from graphfuse.benchmarks.peers.graphfuse import PEER

    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):  # for the clocks
        busy = torch.tanh(busy @ busy)
    ran = []
    for place in places:
        case = CASES[bench][place]
        work = PEER.make(case, case.sets(1, "cuda"))
        work.calls[0]()
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            work.calls[0]()
            torch.cuda.synchronize()
        said = {"note": work.note, "knobs_from": work.knobs_from}
        ran += [{"place": place, **one, **said} for one in launches(case, gf.create_handle("cuda"))]
        del work
        session.release("cuda")
    print(json.dumps(ran))


def launches(case: BufferCase, handle: object) -> list[dict]:
    """The fields of each launch of a case, which launch it is where there are several, the case's bytes, and the
    launch's elements."""
    parts = _parts(case, handle)
    problems = [part.engine.problem(part.facts) for part in parts]
    named = [{"launch": f"{i} of {len(parts)}"} for i in range(1, len(parts) + 1)] if len(parts) > 1 else [{}]
    return [
        {**vars(case), **name, "bytes": case.moved, "elements": problem.rows * problem.key["columns"]}
        for name, problem in zip(named, problems, strict=True)
    ]


def command(program: Path, replay: ncu.Replay, metrics: Sequence[str], log: Path) -> list[str]:
    """ncu's arguments, but for what it starts."""
    options = {
        "--page": "raw",
        "--print-units": "base",
        "--log-file": str(log),
        "--target-processes": "all",
        "--clock-control": "none",
        "--metrics": ",".join(metrics),
    }
    return [str(program), "--csv", *replay.options, *(word for option in options.items() for word in option)]


def collect(program: Path, folder: Path, bench: str, replay: ncu.Replay, places: Sequence[int]) -> Run:
    """A run of ncu over the cases in these places, without the metrics that this ncu does not know."""
    metrics, log = list(replay.metrics), folder / "ncu.csv"
    while True:
        log.unlink(missing_ok=True)
        words = [*command(program, replay, metrics, log), *start(bench, places)]
        with untuned() as empty:
            named = settings.environment(GRAPHFUSE_TUNING_DIR=str(empty))
            done = subprocess.run(words, capture_output=True, text=True, env=named)
        text = log.read_text() if log.exists() else ""
        said = "\n".join((text, done.stdout, done.stderr))
        unknown = ncu.unknown(said, metrics)
        if not unknown:
            break
        print(f"this ncu does not have {', '.join(unknown)}")
        metrics = [m for m in metrics if m not in unknown]
    ran = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")), None)
    if ran is None or not ncu.parse(said):
        errors = [line for line in said.splitlines() if "==ERROR==" in line or "Error" in line]
        raise ProfilerError(
            f"ncu profiled nothing (exit code {done.returncode}): {(errors or ['no reason given'])[-1]}"
        )
    return Run(replay, ran, said)


def entries(runs: Iterable[Run]) -> list[dict]:
    """The record's entry of each launch, in the order of CASES: what ran, how it was replayed, the figures, the metrics
    that they are made of."""
    found = []
    for run in runs:
        counted = ncu.parse(run.text, run.replay.metrics)
        if len(counted) != len(run.ran):
            raise ProfilerError(f"ncu profiled {len(counted)} launches of {len(run.ran)}: which is which is not known")
        for said, metrics in zip(run.ran, counted, strict=True):
            figures = ncu.figures(metrics, said["elements"])
            found.append({**said, "replay": run.replay.name, **figures, "metrics": metrics})
    found.sort(key=lambda entry: entry["place"])
    return [{k: v for k, v in entry.items() if k != "place"} for entry in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", choices=CASES, default="rmsnorm-silu", metavar="BENCH")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write BENCH-profile-DEVICE.json into FOLDER")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="keep what ncu wrote in FILE")
    arguments = parser.parse_args()
    if reason := record.gpu_needed("profile"):
        parser.exit(2, f"{reason}\n")
    import graphfuse as gf

    try:
        program, places = find(), planned(arguments.bench, gf.create_handle("cuda"))
        with tempfile.TemporaryDirectory() as folder:
            runs = [collect(program, Path(folder), arguments.bench, *kind) for kind in places.items()]
        if arguments.csv:
            arguments.csv.write_text("\n".join(run.text for run in runs))
        found = entries(runs)
    except ProfilerError as error:
        parser.exit(3, f"profile: {error}\n")
    for entry in found:
        shown = {k: v for k, v in entry.items() if k not in ("metrics", "stalls", "note", "knobs_from", "bytes")}
        print(json.dumps(shown), "stalls:", *(f"{name} {share:.0%}" for name, share in entry["stalls"].items()))
    if arguments.record:
        content, kind = {"ncu": ncu.version(program), "cases": found}, f"{arguments.bench}-profile"
        print(record.write(arguments.record, kind, record.environment(record.CHECKOUT), content))


if __name__ == "__main__":
    main()
