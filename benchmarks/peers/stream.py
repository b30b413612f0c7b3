"""The stream limit: an elementwise kernel that reads half of the bytes that a case moves and writes half.

Not `copy_`: in a CUDA graph it becomes a memcpy node, which is slower.
"""

import functools

from graphfuse.benchmarks.peer import Peer, Work


def _make(case, sets) -> Work:
    import torch

    words = case.moved // 8  # int32, half of the bytes each way
    device = sets[0].x.device
    sources = [torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device) for _ in sets]
    results = [torch.zeros_like(source) for source in sources]
    calls = [functools.partial(torch.neg, a, out=b) for a, b in zip(sources, results, strict=True)]
    return Work(calls, check=lambda: None if torch.equal(results[0], -sources[0]) else "wrong result")


PEER = Peer("stream", "stream limit", _make, ("torch",))
