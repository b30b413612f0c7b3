"""A plan of cuDNN's as a call by raw addresses."""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import addressof
from types import ModuleType

from graphfuse.engine import Address, Argument, Constant, FrozenCall, HostScalar, Scratch
from graphfuse.engines.cudnn import devices
from graphfuse.engines.cudnn.handles import Handles
from graphfuse.engines.cudnn.plans import Built, errors, words
from graphfuse.engines.cudnn.support import BY_VALUE
from graphfuse.errors import DeviceError, GraphNotSupportedError
from graphfuse.ir import Graph

_SCALAR_BYTES = 16  # that each number's memory takes


def frozen(cudnn: ModuleType, graph: Graph, built: Built, handles: Handles) -> FrozenCall:
    """The plan on any addresses. GraphNotSupportedError where cuDNN asks for other tensors than it was told of."""
    made = built.translation
    tensor = {graph.tensors[t].uid: t for t in (*made.bound, *made.by_value)}
    tensor |= {uid: next(t.id for t in graph.tensors if t.uid == uid) for uid in made.constants}
    uids, start = _starter(cudnn, built, sorted(tensor))
    if set(uids) != set(tensor):
        raise GraphNotSupportedError(f"cuDNN asks for tensors {list(uids)}; it was told of {sorted(tensor)}")
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
    run = _run(cudnn, start, len(uids), packs, numbers, handles)
    return FrozenCall((own, *addresses, *map(HostScalar, scalars)), run)


Start = Callable[[ctypes.Array, int, object], None]
"""start(addresses in the order of the uids, the workspace's address, handle)"""


def _starter(cudnn: ModuleType, built: Built, known: Sequence[int]) -> tuple[Sequence[int], Start]:
    """The uids in the order in which addresses are given, and what starts the plan.

    The package's own way to pass addresses alone has a private name. Where it is gone, they are passed by uid, which
    takes several times as long.
    """
    graph, index = built.translation.graph, built.index
    lowered = getattr(graph, "_lowered_graph", None)
    execute = getattr(lowered, "_execute_with_raw_ptrs", None)
    if execute is None or not hasattr(lowered, "_get_variant_pack_uids_sorted"):
        return known, lambda addresses, workspace, handle: graph.execute_plan_at_index(
            dict(zip(known, addresses, strict=True)), workspace, index, handle
        )
    lowered._prepare_variant_pack_template()
    uids, cpp_index = tuple(lowered._get_variant_pack_uids_sorted()), built.cpp_index
    count = len(uids)

    def start(addresses: ctypes.Array, workspace: int, handle) -> None:
        execute(addressof(addresses), count, workspace, handle.backend_handle, cpp_index)

    return uids, start


def _run(
    cudnn: ModuleType,
    start: Start,
    count: int,
    packs: Sequence[tuple[Callable[..., None], int]],
    numbers: ctypes.Array,
    handles: Handles,
) -> Callable[..., None]:
    """packs: what writes each number into its place in `numbers`."""
    addresses = (ctypes.c_uint64 * count)()
    fill = struct.Struct(f"{count}Q").pack_into
    on, ordinal, current = handles.on, handles.ordinal, devices.current_ordinal()
    refused = errors(cudnn)
    # The memory that cuDNN reads addresses and numbers from is the plan's; it has read them when a call returns.
    lock = threading.Lock()

    def run(stream: int, workspace: int, *values: float) -> None:
        if current() != ordinal:
            with devices.current(ordinal):
                return run(stream, workspace, *values)
        try:
            handle = on(stream)
            with lock:
                if packs:
                    for (pack, place), value in zip(packs, values[count:], strict=True):
                        pack(numbers, place, value)
                    values = values[:count]
                fill(addresses, 0, *values)
                start(addresses, workspace, handle)
        except refused as error:
            raise DeviceError(f"cuDNN: {words(error)}") from error
        return None

    return run
