"""What every benchmark record says about where it was made."""

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def environment() -> dict[str, object]:
    """Device, driver, versions, commit and date."""
    import torch

    here = Path(__file__).resolve().parent
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "driver": _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("graphfuse", "torch", "cuda-core", "cuda-bindings")},
        "commit": _run(["git", "-C", str(here), "rev-parse", "HEAD"]),
        "date": datetime.date.today().isoformat(),
    }


def write(path: str, results: object) -> None:
    """Environment and results as JSON at `path`."""
    Path(path).write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


def _run(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
