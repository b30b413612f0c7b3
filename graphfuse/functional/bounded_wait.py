"""Bounded waiting for kernels that wait for other ranks. It finds the late ranks and lets the kernel end without them.

A kernel waits until words of its rank's signals contain the number of the call. Peers write them (``ranks.cuh``). The
host writes those of late peers.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphfuse.base.errors import RankTimeoutError
from graphfuse.ops.collectives import MOST_RANKS

_LINE = 32
_CALLS, _BEGUN, _DONE = 0, 2, 3
"""Lines of signals, as in ``gf::Signal``."""
WORDS = 4 * _LINE
_PAUSE = 1e-3  # seconds between two polls


@dataclass(frozen=True)
class WaitingKernel:
    """A kernel that may wait. ended: whether it has ended. read: returns the words of its rank's signals. write: sets
    some of them, by index, while it runs."""

    ended: Callable[[], bool]
    read: Callable[[], list[int]]
    write: Callable[[Mapping[int, int]], None]


def wait(name: str, rank: int, ranks: int, seconds: float, kernel: WaitingKernel) -> None:
    """Waits until a kernel has ended. Raises RankTimeoutError, after ending it, if other ranks delay it for longer than
    that. name: of the function that launched it."""
    if _ended(kernel, seconds):
        return
    words = kernel.read()
    peers = [peer for peer in range(ranks) if peer != rank]
    late = {line: [p for p in peers if words[line * _LINE + p] != _call(words, p)] for line in (_BEGUN, _DONE)}
    kernel.write({line * _LINE + p: _call(words, p) for line, missing in late.items() for p in missing})
    over = _ended(kernel, seconds)
    fault = "have not begun it" if late[_BEGUN] else "have not ended it"
    who = ", ".join(map(str, late[_BEGUN] or late[_DONE])) or "none"
    raise RankTimeoutError(
        f"{name} on rank {rank} of {ranks} did not end within {seconds:g} s: ranks that {fault}: {who}; "
        f"{'its kernel was ended without them, and its results are wrong' if over else 'its kernel still runs'}; "
        "accepted: all ranks call it, in one order"
    )


def _call(words: list[int], peer: int) -> int:
    """The number of the current call between a rank and one of its peers."""
    return words[_CALLS * _LINE + peer] + 1


def _ended(kernel: WaitingKernel, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not kernel.ended():
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE)
    return True


def last_kernel(numbers: torch.Tensor) -> WaitingKernel | None:
    """The kernel that was last launched on the current CUDA stream; None while a CUDA graph is captured. numbers:
    signals, as in ``all_reduce``."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event, beside = torch.cuda.Event(), torch.cuda.Stream(numbers.device)
    event.record()
    words = numbers[: WORDS // 2].view(torch.int32)

    def read() -> list[int]:
        with torch.cuda.stream(beside):
            return words.cpu().tolist()

    def write(found: Mapping[int, int]) -> None:
        with torch.cuda.stream(beside):  # word by word: peers may write the others
            for place, value in found.items():
                words[place : place + 1].copy_(torch.tensor([value], dtype=torch.int32))
            beside.synchronize()

    return WaitingKernel(event.query, read, write)


assert MOST_RANKS <= _LINE
