"""The wait for a kernel that other ranks keep: who is late, and that it ends. A thread stands for the kernel."""

import threading
import time

import pytest
import torch

from graphfuse import RankTimeoutError, SettingError
from graphfuse.functional import bounded_wait, symmetric
from graphfuse.ops.collectives import peers_length

RANKS, RANK = 4, 1
BEGUN, DONE = 64, 96  # words before those that peers write


class _Kernel:
    """Waits as ``gf::Ranks`` does, for words that peers have written, or nobody. calls: by peer, that have ended."""

    def __init__(self, calls: int, begun: set[int], done: set[int], heeds: bool = True):
        self.numbers = torch.zeros(peers_length(RANKS), dtype=torch.int64)
        self.words = self.numbers.view(torch.int32)
        self.words[:RANKS] = calls
        for line, peers in ((BEGUN, begun), (DONE, done)):
            for peer in range(RANKS):
                self.words[line + peer] = calls + (peer in peers)
        self.call, self.heeds, self.over, self.stop = calls + 1, heeds, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for line in (BEGUN, DONE):
            while any(self.words[line + p].item() != self.call for p in range(RANKS) if p != RANK) or not self.heeds:
                if self.stop.wait(1e-3):
                    return
        self.over.set()

    def waiting(self) -> bounded_wait.WaitingKernel:
        def write(found) -> None:
            for place, value in found.items():
                self.words[place] = value

        return bounded_wait.WaitingKernel(self.over.is_set, lambda: self.words[: bounded_wait.WORDS].tolist(), write)


def _wait(kernel: _Kernel, seconds: float = 0.05) -> None:
    try:
        bounded_wait.wait("all_reduce_add_rmsnorm", RANK, RANKS, seconds, kernel.waiting())
    finally:
        kernel.stop.set()
        kernel.thread.join()


def test_all_ranks_come():
    begin = time.monotonic()
    _wait(_Kernel(7, {0, 2, 3}, {0, 2, 3}), seconds=60)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("begun", "done", "said"),
    [
        ({0, 3}, {0}, "ranks that have not begun it: 2; its kernel was ended without them"),
        ({0, 2, 3}, {3}, "ranks that have not ended it: 0, 2; its kernel was ended without them"),
        (set(), set(), "ranks that have not begun it: 0, 2, 3; "),
    ],
)
def test_ranks_that_are_late(begun, done, said):
    kernel = _Kernel(2**31 - 9, begun, done)
    with pytest.raises(RankTimeoutError, match=f"on rank 1 of 4 did not end within 0.05 s: {said}"):
        _wait(kernel)
    assert kernel.over.is_set()


def test_a_kernel_that_hangs():
    with pytest.raises(RankTimeoutError, match="its kernel still runs"):
        _wait(_Kernel(0, {0}, set(), heeds=False))


def test_memory_of_a_call_that_was_given_up(monkeypatch):
    kernel, calls = _Kernel(0, {0, 2}, {0, 2}), []
    peers = symmetric.Peers(kernel.numbers, RANK)
    monkeypatch.setattr(bounded_wait, "last_kernel", lambda numbers: kernel.waiting())
    monkeypatch.setenv("GRAPHFUSE_RANKS_TIMEOUT", "0.05")
    with pytest.raises(RankTimeoutError, match="region on rank 1 of 4 did not end within 0.05 s: .* begun it: 3;"):
        peers.call("region", calls.append, 1)
    for value in ("0.05", ""):
        monkeypatch.setenv("GRAPHFUSE_RANKS_TIMEOUT", value)
        with pytest.raises(RankTimeoutError, match="an earlier call with this memory did not wait"):
            peers.call("region", calls.append, 2)
    assert calls == [1]
    monkeypatch.setenv("GRAPHFUSE_RANKS_TIMEOUT", "never")
    with pytest.raises(SettingError, match="GRAPHFUSE_RANKS_TIMEOUT='never' is not known; accepted: seconds"):
        symmetric.Peers(kernel.numbers, RANK).call("region", calls.append, 3)
    kernel.thread.join()
