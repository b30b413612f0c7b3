"""Symmetric memory, which the ranks of a group can read: how kernels find it, and synchronize.

Torch allocates and maps the memory. This module keeps addresses, and the signals with which kernels synchronize.
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from graphfuse.base import settings
from graphfuse.base.errors import RankTimeoutError, VariantPackError
from graphfuse.functional import bounded_wait
from graphfuse.ops.collectives import MOST_RANKS, peers_length, ranks_of
from graphfuse.runtime import torch_private


@dataclass(frozen=True, eq=False)
class Peers:
    """The peers of a tensor. numbers: signals and addresses, as in ``all_reduce``. rank: of this process."""

    numbers: torch.Tensor
    rank: int

    def call(self, name: str, function: Callable[..., Any], *values: object) -> Any:
        """Result of a function whose kernel synchronizes with these peers. Raises RankTimeoutError if
        GRAPHFUSE_RANKS_TIMEOUT bounds the wait and other ranks are late, or were in an earlier call. There is no bound
        while a CUDA graph is captured."""
        seconds = settings.ranks_timeout()
        if self in _left:
            raise RankTimeoutError(
                f"{name} on rank {self.rank}: an earlier call with this memory did not wait for other ranks, so that "
                "their state is not known; accepted: other memory"
            )
        made = function(*values)
        kernel = bounded_wait.last_kernel(self.numbers) if seconds is not None else None
        if kernel is not None:
            try:
                bounded_wait.wait(name, self.rank, ranks_of(self.numbers.numel()), seconds, kernel)
            except RankTimeoutError:
                _left.add(self)
                raise
        return made


_left: "weakref.WeakSet[Peers]" = weakref.WeakSet()
"""Peers whose kernels ended without other ranks."""

_found: "weakref.WeakKeyDictionary[object, dict[int, tuple[object, Peers]]]" = weakref.WeakKeyDictionary()
"""Peers by group and storage, with a weak reference that shows whether the storage still exists."""
_turn = threading.Lock()


def peers(t: torch.Tensor, group: object) -> Peers | None:
    """The peers of a tensor in symmetric memory; None for other tensors. group: torch's, initialized. The first call
    for some memory is collective, and allocates. Raises VariantPackError if the group has more ranks than kernels
    support, or if a CUDA graph captures the first call."""
    known = _found.get(group, {}).get(t.untyped_storage()._cdata)
    if known is not None:
        return known[1]
    with _turn:
        return _made(t, group) if t.is_cuda else None


_MOST_BYTES = {2: 64 << 20}
_MORE_RANKS = 1 << 20
"""Size in bytes beyond which reading the memory of all ranks takes longer than an all-reduce."""
_LEAST_BYTES = 1 << 20
_scratch: "weakref.WeakKeyDictionary[object, dict[tuple[str, torch.device], list[torch.Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


def scratch(
    group: distributed.ProcessGroup, slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Symmetric memory of this shape for data that is read once; None if there is none. The next call with this slot
    returns the same memory. Calls are collective, and one with a larger size than before allocates. While a CUDA graph
    is captured, None is returned instead of allocating."""
    nbytes = math.prod(shape) * dtype.itemsize
    ranks = group.size()
    if device.type != "cuda" or not 0 < nbytes <= _MOST_BYTES.get(ranks, _MORE_RANKS) or ranks > MOST_RANKS:
        return None
    kept = _scratch.setdefault(group, {}).setdefault((slot, device), [])  # captured graphs use the earlier ones
    if not kept or kept[-1].numel() < nbytes:
        if torch.cuda.is_current_stream_capturing() or not torch_private.has_symmetric():
            return None
        length = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        kept.append(torch_private.symmetric_zeros(length, torch.uint8, device))
    return kept[-1][:nbytes].view(dtype).view(*shape)


def _made(t: torch.Tensor, group: object) -> Peers | None:
    memory = torch_private.symmetric(t, group)
    if memory is None:
        return None
    if memory.world_size > MOST_RANKS:
        raise VariantPackError(f"group has {memory.world_size} ranks; accepted: up to {MOST_RANKS}, of one host")
    if torch.cuda.is_current_stream_capturing():
        raise VariantPackError("a CUDA graph records the first call with this symmetric memory; accepted: a later one")
    of_group = _found.setdefault(group, {})
    for kept in [kept for kept, (storage, _) in of_group.items() if storage.expired()]:
        del of_group[kept]
    numbers = torch_private.symmetric_zeros(peers_length(memory.world_size), torch.int64, t.device)
    own = torch_private.symmetric(numbers, group)
    addresses = [*memory.buffer_ptrs, *own.buffer_ptrs]
    numbers[-len(addresses) :] = torch.tensor(addresses, dtype=torch.int64, device=t.device)
    torch.cuda.synchronize(t.device)
    own.barrier()  # no rank signals before all signals are zero
    torch.cuda.synchronize(t.device)  # streams of later calls do not wait for this one
    of_group[t.untyped_storage()._cdata] = (torch_private.weak_storage(t), made := Peers(numbers, memory.rank))
    return made
