"""What a call of a model launches and allocates, and how long it may take."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from graphfuse.engines.rows.engine import RowEngine


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


def launched(call: Callable[[], object]) -> dict[str, int]:
    """How many kernels a call launches, and how many of them are ours, as the profiler has it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return counted(json.loads(file.read_text())["traceEvents"])


def counted(events: list[dict]) -> dict[str, int]:
    """events: of a trace. Copies and fills are not counted."""
    names = [event["name"].split("(")[0] for event in events if event.get("cat") == "kernel"]
    return {"kernels": len(names), "our_kernels": names.count(RowEngine.entry)}


def peak_mb(call: Callable[[], object]) -> float:
    """Megabytes that a call holds on the GPU at most, over what is held before it: parameters and an optimizer's state
    are not in it, gradients and what is kept for them are."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
