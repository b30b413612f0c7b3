"""What a call of a model launches, what it spends its GPU time on, what it allocates, and how long it may take."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from graphfuse.engines.rows.engine import RowEngine

OURS, OTHER = "ours", "other"
KINDS = {
    OURS: (RowEngine.entry,),
    "inductor's": ("triton_poi", "triton_red", "triton_per", "triton_for", "triton_mix", "triton_unk"),
    "attention": ("fmha", "flash", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "xmma", "conv", "triton_tem"),
}
"""Kinds of kernels by what their names contain: the first of which the name has a part, OTHER if of none. Products are
of matrices, and convolutions."""


class OutOfTime(BaseException):
    """Something took longer than the plan of the run has it. No Exception: compilers go on after those."""


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """OutOfTime after so many seconds, in the main thread, as soon as Python runs there again. Does not nest."""

    def over(*_: object) -> None:
        raise OutOfTime(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def launched(call: Callable[[], object]) -> dict:
    """How many kernels a call launches, how many of them are ours, and milliseconds on the GPU by kind, as the profiler
    has it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return counted(json.loads(file.read_text())["traceEvents"])


def counted(events: list[dict]) -> dict:
    """events: of a trace. Copies and fills are not counted."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spent = dict.fromkeys((*KINDS, OTHER), 0.0)
    for kernel in kernels:
        spent[kind(kernel["name"])] += kernel["dur"] / 1e3
    return {
        "kernels": len(kernels),
        "our_kernels": sum(kind(kernel["name"]) == OURS for kernel in kernels),
        "gpu_ms": {name: round(ms, 4) for name, ms in spent.items()},
    }


def kind(kernel: str) -> str:
    """What a kernel is for, by its name in a trace."""
    name = kernel.split("(")[0].lower()
    return next((one for one, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def peak_mb(call: Callable[[], object]) -> float:
    """Megabytes that a call holds on the GPU at most."""
    return round(peak_bytes(call) / 1e6, 1)


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes that a call holds on the GPU at most, over what is held before it: parameters and an optimizer's state are
    not in it, gradients and what is kept for them are."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
