"""Records of runs on a GPU, of tests and of benchmarks: the environment of a run, and the files."""

import json
import os
from pathlib import Path

from graphfuse.runtime.record import CHECKOUT, DISTRIBUTIONS, environment, gpu_needed, no_gpu, version

__all__ = ["CHECKOUT", "DISTRIBUTIONS", "environment", "gpu_needed", "no_gpu", "of_tests", "path", "version", "write"]


def path(folder: Path, kind: str, about: dict[str, object]) -> Path:
    """Where the record of this kind and of the device of `about` (an `environment`) is."""
    return folder / f"{kind}-{str(about['device']).lower().replace(' ', '-')}.json"


def of_tests(about: dict[str, object]) -> str:
    """Kind of a record of the GPU lane. Where there are several GPUs it has tests more."""
    return "gpu-tests" if about["devices"] < 2 else f"gpu-tests-of-{about['devices']}"


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
