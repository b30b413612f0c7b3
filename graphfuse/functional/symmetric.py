"""Memory that the ranks of a group can read: how kernels find it, and each other.

Torch has the memory and its mapping. Here are the addresses, and the signals by which kernels meet.
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
from graphfuse.functional import bounded
from graphfuse.ops.collectives import MOST_RANKS, peers_length, ranks_of
from graphfuse.runtime import torch_private


@dataclass(frozen=True, eq=False)
class Peers:
    """numbers: signals and addresses, as ``all_reduce`` has them. rank: of this process."""

    numbers: torch.Tensor
    rank: int

    def call(self, name: str, kernel: Callable[..., Any], *values: object) -> Any:
        """Result of a function of a kernel that meets these peers.

        RankTimeoutError where GRAPHFUSE_RANKS_TIMEOUT bounds the wait and others do not come, or did not before. Nobody
        waits for what a CUDA graph records.
        """
        seconds = settings.ranks_timeout()
        if self in _left:
            raise RankTimeoutError(
                f"{name} on rank {self.rank}: other ranks were not waited for in a call before with this memory, so "
                "that nobody knows what they have done; accepted: other memory"
            )
        made = kernel(*values)
        waiting = bounded.of_stream(self.numbers) if seconds is not None else None
        if waiting is not None:
            try:
                bounded.wait(name, self.rank, ranks_of(self.numbers.numel()), seconds, waiting)
            except RankTimeoutError:
                _left.add(self)
                raise
        return made


_left: "weakref.WeakSet[Peers]" = weakref.WeakSet()
"""Those that were not waited for."""

_found: "weakref.WeakKeyDictionary[object, dict[int, tuple[object, Peers]]]" = weakref.WeakKeyDictionary()
"""By group and storage, each with what says whether that is still there."""
_turn = threading.Lock()


def peers(t: torch.Tensor, group: object) -> Peers | None:
    """The peers of a tensor in symmetric memory; None for other tensors.

    group: torch's, initialized. The first call for some memory is collective, and allocates. VariantPackError: the
    group has more ranks than kernels do, or a CUDA graph records the first call.
    """
    known = _found.get(group, {}).get(t.untyped_storage()._cdata)
    if known is not None:
        return known[1]
    with _turn:
        return _made(t, group) if t.is_cuda else None


_MOST_BYTES = {2: 64 << 20}
_MORE_RANKS = 1 << 20
"""Bytes of a sum beyond which reading the memory of all ranks takes longer than an all-reduce."""
_LEAST_BYTES = 1 << 20
_scratch: "weakref.WeakKeyDictionary[object, dict[tuple[str, torch.device], list[torch.Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


def scratch(
    group: distributed.ProcessGroup, slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Symmetric memory of this shape for what is read once; None where there is none.

    The next call with this slot returns it again. Calls are collective, and a larger one than before allocates: not
    while a CUDA graph is recorded, then it is None.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    ranks = group.size()
    if device.type != "cuda" or not 0 < nbytes <= _MOST_BYTES.get(ranks, _MORE_RANKS) or ranks > MOST_RANKS:
        return None
    kept = _scratch.setdefault(group, {}).setdefault((slot, device), [])  # captured graphs have those before the last
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
    own.barrier()  # nobody signals before all signals are zero
    torch.cuda.synchronize(t.device)  # streams of later calls know nothing of this one
    of_group[t.untyped_storage()._cdata] = (torch_private.weak_storage(t), made := Peers(numbers, memory.rank))
    return made
