"""Memory that the ranks of a group can read: torch's symmetric memory, as tables of addresses for kernels.

Torch has the memory and its mapping. Here are the tables of its addresses, and the signals by which kernels meet.
"""

import threading
import weakref
from dataclasses import dataclass, field

import torch

from graphfuse.base.errors import DeviceError, VariantPackError
from graphfuse.ops.collectives import MOST_RANKS, SIGNAL_BYTES
from graphfuse.runtime import torch_private


@dataclass(frozen=True, eq=False)
class Peers:
    """table: addresses, int64, (2, ranks) in device memory (``all_reduce``). rank: of this process."""

    table: torch.Tensor
    rank: int


@dataclass(frozen=True, eq=False)
class Members:
    """A group's signals, and tables by storage, each with what says whether that is still there."""

    signals: torch.Tensor
    addresses: tuple[int, ...]  # of the signals of each rank
    tables: dict[int, tuple[object, Peers]] = field(default_factory=dict)


_groups: "weakref.WeakKeyDictionary[object, Members]" = weakref.WeakKeyDictionary()
_turn = threading.Lock()


def peers(t: torch.Tensor, group: object) -> Peers | None:
    """The table for a tensor in symmetric memory, which no other memory gets: None.

    group: torch's, initialized. The first call for some memory, and the first of a group, is collective, and allocates.
    VariantPackError: the group has more ranks than kernels do, or a CUDA graph records the first call.
    """
    members = _groups.get(group)
    if members is not None:
        found = members.tables.get(t.untyped_storage()._cdata)
        if found is not None:
            return found[1]
    with _turn:
        return _made(t, group) if t.is_cuda else None


def _made(t: torch.Tensor, group: object) -> Peers | None:
    memory = torch_private.symmetric(t, group)
    if memory is None:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise VariantPackError("a CUDA graph records the first call with this symmetric memory; accepted: a later one")
    if memory.world_size > MOST_RANKS:
        raise VariantPackError(f"group has {memory.world_size} ranks; accepted: up to {MOST_RANKS}, of one host")
    if group not in _groups:
        _groups[group] = _members(t.device, group)
    members = _groups[group]
    for kept in [kept for kept, (storage, _) in members.tables.items() if storage.expired()]:
        del members.tables[kept]
    table = torch.tensor([list(memory.buffer_ptrs), members.addresses], dtype=torch.int64, device=t.device)
    torch.cuda.synchronize(t.device)  # streams of later calls know nothing of this one
    found = Peers(table, memory.rank)
    members.tables[t.untyped_storage()._cdata] = (torch_private.weak_storage(t), found)
    return found


def _members(device: torch.device, group: object) -> Members:
    signals = torch_private.symmetric_zeros(SIGNAL_BYTES, device)
    memory = None if signals is None else torch_private.symmetric(signals, group)
    if memory is None:
        raise DeviceError(f"torch has no symmetric memory on {device}")
    torch.cuda.synchronize(device)
    memory.barrier()  # nobody signals before all signals are zero
    torch.cuda.synchronize(device)
    return Members(signals, tuple(memory.buffer_ptrs))
