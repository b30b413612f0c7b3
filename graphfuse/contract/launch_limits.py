"""Check of a launch against the limits of the device and against its nodes, before anything is compiled.

What the compiler decides, such as registers and static shared memory, is left to the driver's check.
"""

import struct
from collections.abc import Iterator
from typing import get_args

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.wording import counted
from graphfuse.contract.arguments import CTYPES
from graphfuse.contract.engine import Address, Argument, ByRows, Constant, HostScalar, Launch, RowCount, Scratch
from graphfuse.op_graph.ir import Subgraph, TensorId

MAX_THREADS = 1024
"""Threads per CTA."""
MAX_CTAS = 2**31 - 1
"""CTAs per grid."""

_WARP = 32
_LISTED = 32  # the emulator's list of CTAs, 4 bytes each, may have an eighth of the memory
_CLUSTER_SM = 90  # and newer
_LARGEST_CLUSTER = {90: 16, 100: 16, 103: 16}  # CTAs; elsewhere the portable 8
_RESERVED_SHARED = 1 << 10  # bytes of an SM's shared memory that the system reserves for each CTA


def fault(launch: Launch, device: Device, subgraph: Subgraph | None = None) -> str | None:
    """The first field that the device or the nodes do not allow, with what is accepted; None if there is none.

    subgraph: None for a launch that belongs to no graph, whose tensors are not checked."""
    return next(_faults(launch, device, subgraph), None)


def largest_cluster(device: Device) -> int:
    """Largest number of CTAs per cluster."""
    return _LARGEST_CLUSTER.get(device.sm, 8) if device.sm >= _CLUSTER_SM else 1


def _faults(launch: Launch, device: Device, subgraph: Subgraph | None) -> Iterator[str]:
    listed = device.memory_bytes // _LISTED if device.kind == EMULATOR.kind else 0
    most = min(listed or MAX_CTAS, MAX_CTAS)
    yield from _number("grid", launch.grid, 0, most)
    yield from _number("block", launch.block, 1, MAX_THREADS)
    yield from _number("cluster", launch.cluster, 1, largest_cluster(device))
    yield from _number("shared_bytes", launch.shared_bytes, 0, device.shared_memory_per_block or None)
    yield from _number("scratch_bytes", launch.scratch_bytes, 0, device.memory_bytes or None)
    if launch.grid % launch.cluster:
        yield f"grid is {launch.grid}; accepted: a multiple of the cluster's {launch.cluster}"
    if launch.by_rows is not None:
        yield from _rows(launch, launch.by_rows, most)
    yield from _together(launch, device)
    yield from _arguments(launch, subgraph)
    if subgraph is not None:
        yield from _cleared(launch, subgraph)


def _number(name: str, value: object, least: int, most: int | None) -> Iterator[str]:
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"an int of {least} or more" if most is None else f"an int, {least} to {most}"
        yield f"{name} is {value!r}; accepted: {accepted}"


def _rows(launch: Launch, rows: ByRows, most: int) -> Iterator[str]:
    for name, least, limit in (("rows", 0, None), ("together", 1, None), ("least", 0, rows.most), ("cluster", 1, None)):
        yield from _number(f"by_rows.{name}", getattr(rows, name), least, limit)
    if rows.most is not None:
        yield from _number("by_rows.most", rows.most, 1, None)
    if rows.cluster % launch.cluster:
        yield f"by_rows.cluster is {rows.cluster}; accepted: a multiple of the cluster's {launch.cluster}"
    if launch.grid != rows.grid(rows.rows):
        yield f"grid is {launch.grid}; accepted: {rows.grid(rows.rows)}, as by_rows has for {counted(rows.rows, 'row')}"
    yield from _number("by_rows: its largest grid", rows.clusters * rows.cluster, 0, most)


def _together(launch: Launch, device: Device) -> Iterator[str]:
    """Fault of a cooperative launch with too many CTAs. Only the driver knows how many clusters a chip holds."""
    if not launch.cooperative or not device.sm_count or (launch.cluster != 1 and device.kind != EMULATOR.kind):
        return
    threads = -(-launch.block // _WARP) * _WARP
    an_sm = device.threads_per_sm // threads
    if launch.shared_bytes:
        an_sm = min(an_sm, device.shared_memory_per_sm // (launch.shared_bytes + _RESERVED_SHARED))
    most = device.sm_count * an_sm
    if launch.grid > most:
        yield (
            f"grid is {launch.grid} of a cooperative launch of {launch.block} threads and {launch.shared_bytes} bytes "
            f"of shared memory a CTA; accepted: 0 to {most}, which {device} can hold at once"
        )


def _arguments(launch: Launch, subgraph: Subgraph | None) -> Iterator[str]:
    for number, argument in enumerate(launch.arguments):
        accepted = _accepted(argument, launch, subgraph)
        if accepted:
            yield f"arguments[{number}] is {argument!r}; accepted: {accepted}"


def _accepted(argument: object, launch: Launch, subgraph: Subgraph | None) -> str | None:
    """Text of what is accepted in place of an argument; None if the argument is valid."""
    if type(argument) not in get_args(Argument):
        return f"one of {', '.join(kind.__name__ for kind in get_args(Argument))}"
    match argument:
        case Scratch(offset) if type(offset) is not int or not 0 <= offset <= launch.scratch_bytes:
            return f"an offset of 0 to {launch.scratch_bytes}, the launch's scratch_bytes"
        case RowCount() if launch.by_rows is None:
            return "a RowCount in launches that have by_rows"
        case Constant(ctype, value):
            return _constant(ctype, value)
        case Address(tensor) | HostScalar(tensor) if subgraph is not None:
            return _tensor(tensor, isinstance(argument, HostScalar), subgraph)
    return None


def _constant(ctype: str, value: float) -> str | None:
    code = CTYPES.get(ctype)
    if code is None:
        return f"a ctype of {', '.join(CTYPES)}"
    try:
        struct.pack(code, value)
    except (struct.error, OverflowError):
        return f"a value that {ctype} has"
    return None


def _tensor(tensor: TensorId, by_value: bool, subgraph: Subgraph) -> str | None:
    tensors = (subgraph.graph.tensors[t] for t in (*subgraph.inputs, *subgraph.outputs))
    known = [t for t in tensors if t.by_value is by_value]
    if any(tensor == t.id for t in known):
        return None
    where = "passed by value" if by_value else "in memory"
    return f"the id of a tensor {where} that the nodes read or write: " + (
        ", ".join(f"{t.id} ({t.name!r})" for t in known) or "there is none"
    )


def _cleared(launch: Launch, subgraph: Subgraph) -> Iterator[str]:
    tensors = subgraph.graph.tensors
    accepted = [t for t in subgraph.outputs if tensors[t].nbytes == 4]
    for t in launch.cleared:
        if t not in accepted:
            known = ", ".join(f"{i} ({tensors[i].name!r})" for i in accepted) or "there is none"
            yield f"cleared has {t!r}; accepted: the id of a tensor of 4 bytes that the nodes write: {known}"
