"""Memory that the ranks of a group can read: how kernels find it, and each other.

Torch has the memory and its mapping. Here are the addresses, and the signals by which kernels meet.
"""

import threading
import weakref
from dataclasses import dataclass

import torch

from graphfuse.base.errors import VariantPackError
from graphfuse.ops.collectives import MOST_RANKS, peers_length
from graphfuse.runtime import torch_private


@dataclass(frozen=True, eq=False)
class Peers:
    """numbers: signals and addresses, as ``all_reduce`` has them. rank: of this process."""

    numbers: torch.Tensor
    rank: int


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
