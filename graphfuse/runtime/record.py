"""The environment of a run on a GPU: device, driver, versions, commit and date."""

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from graphfuse.base import settings

_DESCRIBE = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
_ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").exists() else None
"""Folder of the sources if they are a checkout; None if they are an installed package."""
DISTRIBUTIONS = ("torch", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "numpy")


def no_gpu() -> str | None:
    """Why nothing can run on a GPU here; None if it can."""
    from graphfuse.runtime import device

    if not device.count():
        return "no CUDA device: the driver reports none"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device (a CPU build?)"


def gpu_needed(command: str) -> str | None:
    """Text for users if `command` cannot run here; None if there is a GPU."""
    reason = no_gpu()
    return None if reason is None else f"{command} needs a GPU: {reason}"


def environment(root: Path | None) -> dict[str, object]:
    """Device, driver, versions, commit (with "-dirty" if files were changed) and date.

    root: folder of the sources; None if they are an installed package."""
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
