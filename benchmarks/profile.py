"""What keeps our kernel busy: a few cases under Nsight Compute.

    python -m graphfuse.benchmarks.profile [BENCH] [--record FOLDER] [--csv FILE]

The cases of a bench run once each in a child of `ncu`, with tuned knobs of the first-party tables, a cold L2
and the clocks as they are. The record keeps every metric that was had and the figures made of
them; what a version of ncu does not have is null. --csv keeps what ncu itself wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphfuse import record, settings
from graphfuse.benchmarks import ncu, rmsnorm_backward, rmsnorm_silu
from graphfuse.errors import GraphfuseError

KERNEL = "regex:rmsnorm"
_SILU = ((399360, 1024), (399360, 512), (24960, 1024))
_BACKWARD = ((4096, 1024), (4096, 2048), (4096, 16384), (32768, 4096), (32768, 8192), (32768, 32768))
CASES = {
    "rmsnorm-silu": (
        *(rmsnorm_silu.Case(r, c, o) for r, c in _SILU for o in ("nvfp4", "fp8_e4m3", "bf16")),
        *(rmsnorm_silu.Case(1560, 320, o) for o in ("nvfp4", "bf16")),
    ),
    "rmsnorm-backward": (
        *(rmsnorm_backward.Case(r, c, "bf16") for r, c in _BACKWARD),
        *(rmsnorm_backward.ResidualCase(32768, c, "bf16") for c in (8192, 32768)),
        rmsnorm_backward.Case(32768, 32768, "fp32"),
    ),
}
"""Those of each bench of which it is asked."""
_SYSTEM = Path("/")
_NEWEST_LAST = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")


class ProfilerError(GraphfuseError):
    """Nsight Compute is absent, or profiled nothing."""


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


def child(bench: str) -> None:
    """Launch the kernel of each case of a bench once, the first twice; print what ran as JSON."""
    import torch

    from graphfuse.benchmarks import session
    from graphfuse.benchmarks.peers.graphfuse import PEER

    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):  # for the clocks
        busy = torch.tanh(busy @ busy)
    ran = []
    for case in CASES[bench]:
        work = PEER.make(case, case.sets(1, "cuda"))
        for _ in range(1 if ran else 2):
            work.calls[0]()
        torch.cuda.synchronize()
        shape = {field: getattr(case, field) for field in ("rows", "columns", "output")}
        if getattr(case, "residual", False):
            shape["output"] += ", residual"
        ran.append({**shape, "bytes": case.moved, "note": work.note, "knobs_from": work.knobs_from})
        del work
        session.release("cuda")
    print(json.dumps(ran))


def command(program: Path, metrics: Sequence[str], log: Path, launches: int) -> list[str]:
    """ncu's arguments, but for what it starts."""
    options = {
        "--page": "raw",
        "--print-units": "base",
        "--log-file": str(log),
        "--target-processes": "all",
        "--clock-control": "none",
        "--kernel-name": KERNEL,
        "--launch-skip": "1",
        "--launch-count": str(launches),
        "--metrics": ",".join(metrics),
    }
    return [str(program), "--csv", *(word for option in options.items() for word in option)]


def collect(program: Path, folder: Path, bench: str) -> tuple[list[dict], str]:
    """What the child says ran, and what ncu wrote, without the metrics that this ncu does not know."""
    metrics, log = list(ncu.METRICS), folder / "ncu.csv"
    start = [sys.executable, "-c", f"from graphfuse.benchmarks.profile import child; child({bench!r})"]
    while True:
        log.unlink(missing_ok=True)
        with settings.nothing_tuned():
            words = [*command(program, metrics, log, len(CASES[bench])), *start]
            done = subprocess.run(words, capture_output=True, text=True)
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
    return ran, said


def entries(ran: Sequence[dict], text: str) -> list[dict]:
    """The record's entry of each case: what ran, the figures, the metrics that they are made of."""
    launches = ncu.parse(text)
    if len(launches) != len(ran):
        raise ProfilerError(f"ncu profiled {len(launches)} launches of {len(ran)} cases: which is which is not known")
    return [
        {**case, **ncu.figures(metrics, case["rows"], case["columns"]), "metrics": metrics}
        for case, metrics in zip(ran, launches, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", choices=CASES, default="rmsnorm-silu", metavar="BENCH")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write BENCH-profile-DEVICE.json into FOLDER")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="keep what ncu wrote in FILE")
    arguments = parser.parse_args()
    if reason := record.no_gpu():
        parser.exit(2, f"profile needs a GPU: {reason}\n")
    try:
        program = find()
        with tempfile.TemporaryDirectory() as folder:
            ran, text = collect(program, Path(folder), arguments.bench)
        if arguments.csv:
            arguments.csv.write_text(text)
        found = entries(ran, text)
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
