"""Records of runs on a GPU, of tests and of benchmarks: the environment of a run, and the files."""

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from graphfuse import settings

_DESCRIBE = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
_ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").exists() else None
"""The sources that run, where they are a checkout and no installed package."""
DISTRIBUTIONS = ("torch", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "numpy")


def no_gpu() -> str | None:
    """Why nothing can run on a GPU here; None if it can."""
    from graphfuse.runtime import device

    if not device.count():
        return "no CUDA device: the driver reports none"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device (a CPU build?)"


def gpu_needed(command: str) -> str | None:
    """What users are told where `command` cannot run; None where there is a GPU."""
    reason = no_gpu()
    return None if reason is None else f"{command} needs a GPU: {reason}"


def environment(root: Path | None) -> dict[str, object]:
    """Device, driver, versions, commit (with "-dirty" where files were changed) and date. root: the sources,
    None where they are an installed package."""
    import torch

    from graphfuse.runtime import toolkit

    found = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if found else "no-gpu",
        "devices": torch.cuda.device_count(),
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nvrtc": toolkit.find().version,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in DISTRIBUTIONS},
        "commit": settings.commit() or (_run("git", "-C", str(root), *_DESCRIBE) if root else None),
        "date": datetime.date.today().isoformat(),
    }


def path(folder: Path, kind: str, about: dict[str, object]) -> Path:
    """Where the record of this kind and of the device of `about` (an `environment`) is."""
    return folder / f"{kind}-{str(about['device']).lower().replace(' ', '-')}.json"


def write(folder: Path, kind: str, about: dict[str, object], content: dict[str, object]) -> Path:
    """Write a record: where it was made, then `content`. Readers see all of it or the one before."""
    file = path(folder, kind, about)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(_text({"environment": about, **content}) + "\n")
    partial.replace(file)
    return file


def _text(value: object, depth: int = 0) -> str:
    """JSON in which what fits on a line is on one, so that a difference of records is short."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or depth + len(flat) <= 160:
        return flat
    pad = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        items, ends = [f"{json.dumps(k)}: {_text(v, depth + 1)}" for k, v in value.items()], "{}"
    else:
        items, ends = [_text(v, depth + 1) for v in value], "[]"
    return ends[0] + pad + f",{pad}".join(items) + "\n" + " " * depth + ends[1]


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None
