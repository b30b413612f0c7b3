"""Calls of a cuDNN plan with raw addresses."""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import addressof
from types import ModuleType

from graphfuse.base.errors import DeviceError, GraphNotSupportedError
from graphfuse.contract.engine import Address, Argument, Constant, FrozenCall, HostScalar, Scratch
from graphfuse.engines.cudnn import devices
from graphfuse.engines.cudnn.handles import Handles
from graphfuse.engines.cudnn.plans import BuiltPlan, errors, words
from graphfuse.engines.cudnn.support import BY_VALUE
from graphfuse.op_graph.ir import FrozenGraph

_SCALAR_BYTES = 16  # bytes of memory for each number


def frozen(cudnn: ModuleType, graph: FrozenGraph, built: BuiltPlan, handles: Handles) -> FrozenCall:
    """Call of the plan with any addresses. Raises GraphNotSupportedError if cuDNN expects other tensors."""
    made = built.translation
    tensor = {graph.tensors[t].uid: t for t in (*made.bound, *made.by_value)}
    tensor |= {uid: next(t.id for t in graph.tensors if t.uid == uid) for uid in made.constants}
    uids, execute = _execution(built, sorted(tensor), handles)
    if set(uids) != set(tensor):
        raise GraphNotSupportedError(f"cuDNN requires tensors {list(uids)}; it was given {sorted(tensor)}")
    scalars = [tensor[uid] for uid in uids if graph.tensors[tensor[uid]].by_value]
    numbers = (ctypes.c_byte * (_SCALAR_BYTES * max(len(scalars), 1)))()
    places = {t: addressof(numbers) + _SCALAR_BYTES * n for n, t in enumerate(scalars)}
    addresses: list[Argument] = [
        Constant("pointer", places[tensor[uid]]) if tensor[uid] in places else Address(tensor[uid]) for uid in uids
    ]
    own = Scratch() if built.workspace_bytes else Constant("pointer", 0)
    packs = [
        (struct.Struct(BY_VALUE[graph.tensors[t].dtype]).pack_into, _SCALAR_BYTES * n) for n, t in enumerate(scalars)
    ]
    run = _run(cudnn, execute, built.cpp_index, len(uids), packs, numbers, handles)
    return FrozenCall((own, *addresses, *map(HostScalar, scalars)), run)


Execute = Callable[[int, int, int, int, int], None]
"""execute(address of the array of addresses, their number, workspace address, handle, the plan's place in cuDNN's
list)"""


def _execution(built: BuiltPlan, known: Sequence[int], handles: Handles) -> tuple[Sequence[int], Execute]:
    """The uids in the order of the addresses, and the function that runs the plan.

    The package's function that takes raw addresses has a private name. If the package lacks it, addresses are passed by
    uid, which takes several times as long.
    """
    graph, index = built.translation.graph, built.index
    lowered = getattr(graph, "_lowered_graph", None)
    execute = getattr(lowered, "_execute_with_raw_ptrs", None)
    if execute is not None and hasattr(lowered, "_get_variant_pack_uids_sorted"):
        lowered._prepare_variant_pack_template()
        return tuple(lowered._get_variant_pack_uids_sorted()), execute

    def by_uid(at: int, count: int, workspace: int, handle: int, place: int) -> None:
        addresses = (ctypes.c_uint64 * count).from_address(at)
        graph.execute_plan_at_index(dict(zip(known, addresses, strict=True)), workspace, index, handles.mine())

    return known, by_uid


def _run(
    cudnn: ModuleType,
    execute: Execute,
    index: int,
    count: int,
    packs: Sequence[tuple[Callable[..., None], int]],
    numbers: ctypes.Array,
    handles: Handles,
) -> Callable[..., None]:
    """Function that runs the plan, given stream, workspace, addresses and numbers. packs: for each number, the function
    that writes it to `numbers`, and its offset."""
    addresses = (ctypes.c_uint64 * count)()
    fill, at = struct.Struct(f"{count}Q").pack_into, addressof(addresses)
    ordinal, another = handles.ordinal, devices.another(handles.ordinal)
    threads, mine, direct = handles.threads, handles.mine, handles.direct
    refused = errors(cudnn)
    # All calls of the plan share the memory of addresses and numbers; cuDNN has read it when a call returns.
    lock = threading.Lock()
    last: tuple[float, ...] | None = None  # the addresses in this memory

    def run(stream: int, workspace: int, *values: float) -> None:
        nonlocal last
        if another is not None and another():
            with devices.current(ordinal):
                return run(stream, workspace, *values)
        try:
            try:
                handle = threads.lease.handle
            except AttributeError:
                handle = mine()
            if handle.stream != stream:
                direct(handle, stream)
            with lock:
                if packs:
                    for (pack, place), value in zip(packs, values[count:], strict=True):
                        pack(numbers, place, value)
                    values = values[:count]
                if values != last:
                    last = None
                    fill(addresses, 0, *values)
                    last = values
                execute(at, count, workspace, handle.backend_handle, index)
        except refused as error:
            raise DeviceError(f"cuDNN: {words(error)}") from error
        return None

    return run
