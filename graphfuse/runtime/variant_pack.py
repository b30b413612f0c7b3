"""``Binder``: finds each tensor's value in a variant pack and checks it, which results in addresses (``Bindings``)."""

import ctypes
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import VariantPackError, VariantPackTypeError, WorkspaceError
from graphfuse.base.ragged import ROWS
from graphfuse.base.wording import counted, with_article
from graphfuse.op_graph.ir import FrozenGraph, FrozenTensor, TensorId
from graphfuse.runtime import buffers
from graphfuse.runtime.buffers import Buffer
from graphfuse.runtime.overlaps import Conflict
from graphfuse.runtime.storage import Storage, storage

WORKSPACE_ALIGNMENT = {"cuda": 256, "cpu": 16, "emulator": 16}
"""Alignment in bytes of a workspace address, by kind of device. Host allocators guarantee no more than 16."""

# Data types that libraries without them store as uint8.
_AS_BYTES = frozenset({data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP8_E8M0, data_type.FP4_E2M1})


@dataclass(frozen=True, eq=False)
class Bindings:
    """Addresses and scalars of a graph's tensors in one call of execute (``engine.Buffers``).

    scalars: as given, not rounded to the tensor's data type. workspace: its address; 0 if there is none.
    """

    addresses: Mapping[TensorId, int]
    scalars: Mapping[TensorId, float]
    workspace: int

    def address(self, tensor: TensorId) -> int:
        return self.addresses[tensor]

    def scalar(self, tensor: TensorId) -> float:
        return self.scalars[tensor]


class Binder:
    """Finds and checks the buffers of one plan. Data about the graph is computed once.

    in_place: (input, output) pairs that may be the same memory. placed: byte offsets of tensors in the workspace, in
    addition to those of FrozenTensor.workspace. roomy: tensors whose buffers may be larger (``_holds``).
    """

    def __init__(
        self,
        graph: FrozenGraph,
        device: Device,
        workspace_bytes: int = 0,
        in_place: frozenset[tuple[TensorId, TensorId]] = frozenset(),
        placed: Mapping[TensorId, int] | None = None,
        roomy: frozenset[TensorId] = frozenset(),
    ):
        self.roomy = roomy
        self.device = device
        self.workspace_bytes = workspace_bytes
        self.bound = graph.bound
        ids = {t.id for t in self.bound}
        self.by_uid = {t.uid: t for t in self.bound}
        self.by_name: dict[str, list[FrozenTensor]] = {}
        for t in self.bound:
            self.by_name.setdefault(t.name, []).append(t)
        self.others = {key: t for t in graph.tensors if t.id not in ids for key in (t.uid, t.name)}
        arrays = [t for t in self.bound if not t.by_value]
        self.outputs = frozenset(t.id for t in arrays if t.id in graph.producer)
        # Ragged offsets decide which memory is accessed. They can be read and checked before only on the CPU.
        ends = {t.id: t for t in self.bound} if device.memory == "cpu" else {}
        self.reaching = tuple((t, ends[t.ragged]) for t in arrays if t.ragged in ends)
        self.storages = {t.id: storage(t) for t in arrays}
        self.constants = {t.id: _constant(t) for t in graph.tensors if t.value is not None}
        in_workspace = {t.id: t.workspace for t in graph.tensors if t.workspace is not None}
        self.in_workspace = (in_workspace | dict(placed or {})).items()
        # Pairs that must not overlap: each output with each input and with each other output.
        made = [t for t in arrays if t.id in self.outputs and t.elements]
        read = [t for t in arrays if t.id not in self.outputs and t.elements]
        self.occupied = (*read, *made)
        self.conflicts = tuple(
            (o, i, Conflict(self.storages[o.id], self.storages[i.id], (i.id, o.id) in in_place, o.dtype is i.dtype))
            for n, o in enumerate(made)
            for i in (*read, *made[:n])
        )

    def bind(self, pack: Mapping[object, object], workspace: object) -> Bindings:
        """Check a variant pack and return its addresses and scalars.

        pack: one entry for each tensor of graph.bound. Keys: uid, name, or an object with get_uid(); entries under
        None, and of tensors that no node uses, are skipped. Values: as in ``buffers.describe``, and as in
        ``buffers.number`` for tensors passed by value. workspace: a buffer of at least workspace_bytes; None if those
        are 0.

        An array must have the tensor's data type, shape (except axes of extent 1), strides (of axes with more than one
        position), device and alignment. An array for reordered scales may have any shape if it is dense and large
        enough. For FP4 or FP8, it may be one row of the tensor's bytes. Only the alignment of an address can be
        checked. A tensor without elements accepts any address. Outputs must not overlap inputs or each other, and no
        tensor may overlap the workspace.

        Raises VariantPackTypeError for a wrong data type or a value that is no buffer, WorkspaceError for the
        workspace, VariantPackError for everything else.
        """
        given = self.match(pack)
        sizes: dict[TensorId, int | None] = {}
        tensor = None
        try:
            for tensor in self.bound:
                if not tensor.by_value:
                    buffer = buffers.describe(given[tensor.id])
                    stored, roomy = self.storages[tensor.id], tensor.id in self.roomy
                    _check(tensor, stored, buffer, self.device, tensor.id in self.outputs, roomy)
                    given[tensor.id] = buffer.address
                    if tensor.ragged is not None:
                        sizes[tensor.id] = buffer.nbytes
            for tensor, offsets in self.reaching:
                _check_reach(tensor, sizes[tensor.id], offsets, given[offsets.id])
        except VariantPackError as error:
            raise type(error)(f"{tensor}: {error}") from None
        return self.place(given, _workspace(workspace, self.workspace_bytes, self.device))

    def place(self, given: Mapping[TensorId, object], workspace: int) -> Bindings:
        """The part of ``bind`` that checks addresses and numbers, with its errors.

        given: for each bound tensor, its address, or the value given as its number.
        """
        addresses: dict[TensorId, int] = {}
        scalars = dict(self.constants)
        tensor = None
        try:
            for tensor in self.bound:
                value = given[tensor.id]
                if tensor.by_value:
                    scalars[tensor.id] = buffers.number(value, tensor.dtype)
                else:
                    _check_address(tensor, value)
                    addresses[tensor.id] = value
        except VariantPackError as error:
            raise type(error)(f"{tensor}: {error}") from None
        if self.workspace_bytes:
            _check_workspace_address(workspace, self.workspace_bytes, self.device)
        self._check_overlaps(addresses, workspace)
        for tensor_id, offset in self.in_workspace:
            addresses[tensor_id] = workspace + offset
        return Bindings(addresses, scalars, workspace)

    def _check_overlaps(self, addresses: Mapping[TensorId, int], workspace: int) -> None:
        if self.workspace_bytes:
            for t in self.occupied:
                start = addresses[t.id]
                if start < workspace + self.workspace_bytes and workspace < start + self.storages[t.id].nbytes:
                    raise WorkspaceError(f"the workspace overlaps {t}; accepted: memory of its own")
        for made, other, conflict in self.conflicts:
            if conflict.clash(addresses[made.id] - addresses[other.id]):
                raise conflict.refused(made, other)

    def match(self, pack: Mapping[object, object]) -> dict[TensorId, object]:
        """Values by tensor id. Raises VariantPackError for missing, unknown and duplicate entries."""
        if not isinstance(pack, Mapping):
            raise VariantPackTypeError(f"the variant pack is {with_article(type(pack).__name__)}; accepted: a mapping")
        values: dict[TensorId, object] = {}
        unknown: list[str] = []
        for key, value in pack.items():
            if key is None:  # an optional tensor that the graph does not have, as in scripts for cuDNN
                continue
            tensor = self.find(key, unknown)
            if tensor is None:
                continue
            if tensor.id in values:
                raise VariantPackError(f"{tensor}, uid {tensor.uid}: two entries in the variant pack; accepted: one")
            values[tensor.id] = value
        missing = [t for t in self.bound if t.id not in values]
        if missing or unknown:
            parts = []
            if missing:
                parts.append(f"missing: {_names(missing)}")
            if unknown:
                parts.append(f"not accepted: {', '.join(unknown)}")
            raise VariantPackError(f"variant pack: {'; '.join(parts)}; accepted, by uid or name: {_names(self.bound)}")
        return values

    def find(self, key: object, unknown: list[str]) -> FrozenTensor | None:
        """The bound tensor of a key; None if there is none.

        A key without a tensor is appended to `unknown`, except that of a tensor of the graph that no node uses."""
        get_uid = getattr(key, "get_uid", None)
        plain = key if get_uid is None else get_uid()
        if isinstance(plain, str):
            named = self.by_name.get(plain, [])
            if len(named) > 1:
                uids = ", ".join(str(t.uid) for t in named)
                raise VariantPackError(f"{plain!r} names {len(named)} tensors; accepted: their uids {uids}")
            found = named[0] if named else None
        elif isinstance(plain, int) and not isinstance(plain, bool):
            found = self.by_uid.get(plain)
        else:
            raise VariantPackTypeError(
                f"{key!r} is not a key of the variant pack; accepted: a uid, a name, a tensor of the graph"
            )
        if found is None:
            other = self.others.get(plain)
            why = None if other is None else _why_unbound(other)
            if other is None or why is not None:
                unknown.append(repr(plain) if why is None else f"{plain!r} ({why})")
        return found


def _constant(tensor: FrozenTensor) -> float:
    try:
        return buffers.number(tensor.value, tensor.dtype)
    except VariantPackError as error:
        raise type(error)(f"{tensor}: {error}") from None


def _names(tensors: Iterable[FrozenTensor]) -> str:
    return ", ".join(f"{t.name!r} (uid {t.uid})" for t in tensors)


def _why_unbound(tensor: FrozenTensor) -> str | None:
    """Why an entry for a tensor that is not bound is a mistake; None if no node uses the tensor."""
    if tensor.virtual:
        return "a virtual tensor has no memory of the caller's"
    if tensor.value is not None:
        return "its value is part of the graph"
    if tensor.workspace is not None:
        return "it is in the workspace"
    return None


def _check(
    tensor: FrozenTensor, stored: Storage, buffer: Buffer, device: Device, written: bool, roomy: bool = False
) -> None:
    """Check everything except the address of a buffer. Callers add the tensor's name to messages."""
    if written and buffer.read_only:
        raise VariantPackError("the memory given is read-only; accepted for an output: writable memory")
    if buffer.dtype is not None and buffer.dtype is not tensor.dtype:
        bytes_too = tensor.dtype in _AS_BYTES
        if not (bytes_too and buffer.dtype is data_type.UINT8):
            accepted = tensor.dtype.name + (" or UINT8" if bytes_too else "")
            raise VariantPackTypeError(f"the data type given is {buffer.dtype.name}; accepted: {accepted}")
    if tensor.reordering is not tensor_reordering.NONE:
        _check_reordered(stored, buffer)
    elif tensor.ragged is not None:
        _check_ragged(tensor, buffer)
    elif tensor.dtype in _AS_BYTES and _is_flat(stored, buffer):
        pass
    elif roomy and buffer.dim is not None and _holds(buffer, stored):
        pass
    elif buffer.dim is not None and (buffer.dim != stored.dim or buffer.stride != stored.stride):
        given = Storage(buffer.dim, buffer.stride, stored.itemsize)
        if given.shape != stored.shape:
            raise VariantPackError(
                f"the shape given is {list(buffer.dim)}; accepted: {list(stored.dim)}{_packing(tensor)}, "
                f"axes of extent 1 aside{_flat(tensor, stored)}"
            )
        if tensor.elements and given.layout != stored.layout:
            raise VariantPackError(
                f"the stride given is {list(buffer.stride)} for shape {list(buffer.dim)}; "
                f"accepted: {list(stored.stride)} for {list(stored.dim)}{_packing(tensor)}, axes of extent 1 aside"
            )
    if tensor.elements and buffer.device is not None and buffer.device != device.memory:
        raise VariantPackError(
            f"the memory given is on {buffer.device}; accepted: {device.memory}, where the graph runs"
        )


def _holds(buffer: Buffer, stored: Storage) -> bool:
    """True if a buffer is large enough for a tensor: memory without gaps of at least its bytes, or a tensor with the
    same strides and no smaller extents."""
    if buffer.dense:
        return buffer.nbytes >= stored.nbytes
    return len(buffer.dim) == len(stored.dim) and all(
        given >= extent and (extent <= 1 or step == stride)
        for given, step, extent, stride in zip(buffer.dim, buffer.stride, stored.dim, stored.stride, strict=True)
    )


def _is_flat(stored: Storage, buffer: Buffer) -> bool:
    """True if a buffer is a dense row of exactly the bytes of a tensor, in the order of the tensor's layout."""
    if buffer.dtype is not data_type.UINT8 or len(buffer.dim) != 1:
        return False
    return buffer.dense and buffer.nbytes == stored.nbytes


def _check_reordered(stored: Storage, buffer: Buffer) -> None:
    if buffer.dim is not None and (not buffer.dense or buffer.nbytes < stored.nbytes):
        raise VariantPackError(
            f"the memory given has shape {list(buffer.dim)}, stride {list(buffer.stride)}; accepted for reordered "
            f"scales: dense memory of at least {stored.nbytes} bytes, whole tiles of 128 rows by 4 blocks"
        )


def _check_ragged(tensor: FrozenTensor, buffer: Buffer) -> None:
    """Check the form of memory for a ragged tensor: without gaps and of any size, rows of all batches, or the tensor's
    own shape. The ragged offsets decide which part is used."""
    _, heads, rows, columns = zip(tensor.dim, tensor.stride, strict=True)
    forms = [tuple(zip(tensor.dim, tensor.stride, strict=True)), ((-1, rows[1]), heads, columns)]
    if buffer.dim is not None and not buffer.dense and not any(_has(buffer, form) for form in forms):
        raise VariantPackError(
            f"the shape given is {list(buffer.dim)}, stride {list(buffer.stride)}; accepted for a ragged tensor: dense "
            f"memory, {list(tensor.dim)} with stride {list(tensor.stride)}, or [rows of all batches, {heads[0]}, "
            f"{columns[0]}] with stride {[rows[1], heads[1], columns[1]]}"
        )


def _check_reach(tensor: FrozenTensor, nbytes: int | None, offsets: FrozenTensor, address: int) -> None:
    """Check that memory of a ragged tensor reaches the last of its offsets. nbytes: None for an unknown size. address:
    of the offsets, in host memory."""
    if nbytes is None or not address:
        return
    number = offsets.dtype.bits // 8
    last = ctypes.string_at(address + (offsets.dim[0] - 1) * offsets.stride[0] * number, number)
    end = int.from_bytes(last, sys.byteorder, signed=True) * tensor.multiplier
    held, row = nbytes * 8 // tensor.dtype.bits, tensor.stride[ROWS]
    if end > -(-held // row) * row:
        raise VariantPackError(
            f"the memory given has {counted(held, 'element')}; accepted: what its ragged offsets say, {end} or more"
        )


def _has(buffer: Buffer, form: tuple[tuple[int, int], ...]) -> bool:
    """True if a buffer has the (extent, stride) pairs of `form`. An extent of -1 stands for any."""
    return len(buffer.dim) == len(form) and all(
        extent in (given, -1) and (given <= 1 or step == stride)
        for given, step, (extent, stride) in zip(buffer.dim, buffer.stride, form, strict=True)
    )


def _check_address(tensor: FrozenTensor, address: int) -> None:
    buffers.check_address(address)
    if not tensor.elements:
        return
    if address == 0:
        raise VariantPackError(f"the address given is null; accepted: memory for {counted(tensor.elements, 'element')}")
    if address % tensor.alignment:
        raise VariantPackError(
            f"the address given, {address:#x}, is a multiple of {counted(_alignment(address), 'byte')}; "
            f"accepted: a multiple of {tensor.alignment}, as the tensor declares"
        )


def _packing(tensor: FrozenTensor) -> str:
    return " bytes of two values" if tensor.dtype is data_type.FP4_E2M1 else ""


def _flat(tensor: FrozenTensor, stored: Storage) -> str:
    return f", or {stored.nbytes} bytes (UINT8) in one row" if tensor.dtype in _AS_BYTES else ""


def _alignment(address: int) -> int:
    return address & -address


def _workspace(value: object, needed: int, device: Device) -> int:
    if value is None:
        if needed:
            raise WorkspaceError(f"no workspace was given; accepted: {needed} bytes on {device}")
        return 0
    try:
        buffer = buffers.describe(value)
    except VariantPackError as error:
        raise type(error)(f"workspace: {error}") from None
    if needed == 0:
        return buffer.address
    if buffer.device is not None and buffer.device != device.memory:
        raise WorkspaceError(f"the workspace is on {buffer.device}; accepted: {device.memory}, where the graph runs")
    if not buffer.dense:
        raise WorkspaceError(
            f"the workspace has shape {list(buffer.dim)}, stride {list(buffer.stride)}; accepted: dense memory"
        )
    if buffer.nbytes is not None and buffer.nbytes < needed:
        raise WorkspaceError(f"the workspace given has {counted(buffer.nbytes, 'byte')}; accepted: at least {needed}")
    if buffer.read_only:
        raise WorkspaceError("the workspace given is read-only; accepted: memory that can be written")
    return buffer.address


def _check_workspace_address(address: int, needed: int, device: Device) -> None:
    if address == 0:
        raise WorkspaceError(f"the workspace given is at the null address; accepted: {needed} bytes on {device}")
    wanted = WORKSPACE_ALIGNMENT[device.kind]
    if address % wanted:
        raise WorkspaceError(
            f"the workspace given, at {address:#x}, is a multiple of {counted(_alignment(address), 'byte')}; "
            f"accepted: a multiple of {wanted}"
        )
