"""What a call of a model launches and allocates, and how long it may take."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

OPERATORS = "graphfuse::"
"""How names of our operators begin."""


class OutOfTime(BaseException):
    """Something took longer than the plan of the run has it. No Exception: compilers go on after those."""


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """OutOfTime after so many seconds, in the main thread. Does not nest."""

    def over(*_: object) -> None:
        raise OutOfTime(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def launched(call: Callable[[], object], cuda: bool) -> dict[str, int]:
    """How many kernels and how many operators of ours a call runs, as the profiler has it; kernels on a GPU only."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as seen:
        call()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return counted(json.loads(file.read_text())["traceEvents"], cuda)


def counted(events: list[dict], cuda: bool) -> dict[str, int]:
    """events: of a trace. Operators that one of ours calls in turn are not counted, nor are copies and fills."""
    ours = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(OPERATORS)]
    operators = sum(not any(_within(e, other) for other in ours if other is not e) for e in ours)
    kernels = sum(e.get("cat") == "kernel" for e in events)
    return {"operators": operators} | ({"kernels": kernels} if cuda else {})


def _within(event: dict, other: dict) -> bool:
    if event["tid"] != other["tid"]:
        return False
    return other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"]


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
