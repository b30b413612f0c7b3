"""GPU time of a call by kernel and by kind of kernel, from torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

KINDS = {
    "graphfuse": r"^row_program",
    "layout": r"nchwToNhwc|nhwcToNchw|AddPadding",
    "attention": r"fmha|flash|attention",
    "convolution": r"fprop|conv|xmma",
    "matrix product": r"gemm|nvjet|cublas|cutlass",
    "copies, padding": r"copy|Cat|[Mm]emcpy|[Mm]emset|pad|[Ff]ill|upsample",
}
"""Kinds by what names of kernels have, the first that fits."""
OTHER = "elementwise"
ALL = (*KINDS, OTHER)

KernelTimes = Mapping[str, tuple[int, float]]
"""Launches and milliseconds, by the name of a kernel."""


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def taken(call: Callable[[], object]) -> KernelTimes:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, ms = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, ms + event.time_range.elapsed_us() / 1000)
    return found


def by_kind(kernels: KernelTimes) -> dict[str, float]:
    """Milliseconds of each kind."""
    found = dict.fromkeys(ALL, 0.0)
    for name, (_, ms) in kernels.items():
        found[kind(name)] += ms
    return found


def longest(kernels: KernelTimes, count: int) -> list[dict]:
    """The kernels that take longest: milliseconds, launches, kind, name."""
    found = sorted(kernels.items(), key=lambda item: -item[1][1])[:count]
    return [{"ms": ms, "launches": n, "kind": kind(name), "name": name[:150]} for name, (n, ms) in found]


def told(kernels: KernelTimes, count: int) -> str:
    """The same, one a line."""
    return "\n".join("{ms:9.3f} ms {launches:5d} x  {kind:16} {name}".format(**one) for one in longest(kernels, count))
