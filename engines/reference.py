"""The reference engine: runs any graph with the op table's semantics in torch. It needs no GPU."""

import itertools

from graphfuse.base import ragged, reordering, rounding
from graphfuse.base.device import Device
from graphfuse.base.dtypes import common_type, data_type
from graphfuse.base.enums import heur_mode, tensor_reordering
from graphfuse.base.errors import VariantPackError
from graphfuse.contract import memory
from graphfuse.contract.engine import Buffers, HostEngine, No, NoKnobs
from graphfuse.contract.served import EVERYTHING
from graphfuse.op_graph.ir import FrozenTensor, Node, Subgraph, TensorId
from graphfuse.ops import OFFSETS


class ReferenceEngine(HostEngine[Subgraph, NoKnobs]):
    """Runs node by node in each node's compute type, on the CPU or the GPU. Ops that only move values keep them.

    Every value is rounded once to its tensor's type, by ``graphfuse.base.rounding``. The type of a virtual tensor is
    its node's compute type, unless the graph rounds to declared types.
    """

    name = "reference"
    facts = Subgraph
    modes = frozenset({heur_mode.A, heur_mode.B, heur_mode.FALLBACK})
    serves = EVERYTHING

    def why_not(self, facts: Subgraph, device: Device) -> No | None:
        return next((No(f"{node} {node.op.elsewhere}") for node in facts.nodes if node.op.elsewhere), None)

    def notes(self, facts: Subgraph, knobs: NoKnobs, device: Device) -> tuple[str, ...]:
        tensors = facts.graph.tensors
        made = [(tensors[t], (node.compute, _moved(facts, node))) for node in facts.nodes for _, t in node.outputs]
        rounded = [f"{t.name!r} to {t.dtype.name}" for t, exact in made if t.virtual and t.dtype not in exact]
        between = f"rounded, as declared: {', '.join(rounded)}" if rounded else "kept in the compute type"
        return (f"reference: torch operations one by one, values between nodes {between}",)

    def in_place(self, facts: Subgraph, knobs: NoKnobs) -> tuple[tuple[int, int], ...]:
        # Every input is copied before the first output is written.
        return tuple((i, o) for i in facts.inputs for o in facts.outputs)

    def run(self, facts: Subgraph, knobs: NoKnobs, device: Device, buffers: Buffers, stream: int) -> None:
        import torch

        with memory.on(torch, device, stream):
            values: dict[int, object] = {}
            for node in facts.nodes:
                compute = getattr(torch, node.compute.facts.torch)
                for _, t in node.inputs:
                    if t not in values:
                        values[t] = _load(torch, facts, t, device, buffers, compute)
                inputs = {p: values[t] if p in node.op.exact else values[t].to(compute) for p, t in node.inputs}
                for port in node.op.moved:
                    made = facts.graph.tensors[node.output("output")].dtype
                    inputs[port] = _rounded(torch, inputs[port], made, compute)
                for port in (p.name for p in node.op.outputs if p.kept):
                    inputs[port] = _load(torch, facts, node.output(port), device, buffers, compute)
                if node.op.check is not None and device.memory == "cpu":
                    _check_numbers(facts, node, inputs)
                results = node.op.reference(torch, inputs, dict(node.attributes))
                for port, t in node.outputs:
                    # Later nodes read the stored value of an output, as if another engine had made it.
                    values[t] = _rounded(torch, results[port], facts.graph.tensors[t].dtype, compute)
            for t in facts.outputs:
                _store(torch, facts, t, device, buffers, values[t])


def _check_numbers(facts: Subgraph, node: Node, inputs) -> None:
    """Raises VariantPackError, which names the node, for invalid numbers in memory, such as lengths."""
    tensors = facts.graph.tensors
    places = {p.removesuffix(OFFSETS): p for p, _ in node.inputs if p.endswith(OFFSETS)}
    apart = {p: tensors[t] for p, t in (*node.inputs, *node.outputs) if p in places}
    room = {p: ragged.rows(apart[p].stride, inputs[at], apart[p].multiplier).tolist() for p, at in places.items()}
    try:
        node.op.check(inputs, dict(node.attributes), room)
    except VariantPackError as error:
        raise VariantPackError(f"{node}: {error}") from None


def _moved(facts: Subgraph, node: Node) -> data_type:
    """The type that can hold the values that a node moves; the compute type of a node that moves none."""
    return common_type({facts.graph.tensors[node.input(port)].dtype for port in node.op.moved} or {node.compute})


def _rounded(torch, values, dtype: data_type, compute):
    """Values rounded to `dtype`, as tensors of type `compute`, or of `dtype` if float32 cannot represent it.

    Floats keep the type in which they were rounded if `compute` is an integer type."""
    if dtype.is_wide:
        return rounding.encode(torch, values, dtype)
    rounded = rounding.round_to(torch, values, dtype)
    return rounded.to(compute) if compute.is_floating_point or not dtype.is_float else rounded


def _load(torch, facts: Subgraph, number: TensorId, device: Device, buffers: Buffers, compute):
    """Values of a tensor in type `compute`, or in their stored type if float32 cannot represent it."""
    t = facts.graph.tensors[number]
    if t.dtype.is_wide:
        compute = getattr(torch, t.dtype.facts.torch)
    if not t.elements:
        return torch.empty(t.dim, dtype=compute, device=device.memory)
    if t.by_value:
        return torch.full(t.dim, buffers.scalar(t.id), dtype=compute, device=device.memory)
    if t.reordering is not tensor_reordering.NONE:
        stored = _memory(torch, t, device, buffers)[reordering.offsets(torch, t.dim, device.memory, t.blocks)]
        return rounding.decode(torch, stored.view(getattr(torch, t.dtype.facts.torch)), t.dtype, compute)
    if t.ragged is not None:
        stored = _places(torch, t, facts, device, buffers).read(_flat(torch, t, device, buffers))
        return rounding.decode(torch, stored.view(getattr(torch, t.dtype.facts.torch)), t.dtype, compute)
    stored = _view(torch, t, device, buffers)
    values = rounding.decode(torch, stored, t.dtype, compute)
    values = values.clone() if values is stored else values
    return values.movedim(-1, t.packed_axis) if t.dtype.bits < 8 else values


def _store(torch, facts: Subgraph, number: TensorId, device: Device, buffers: Buffers, values) -> None:
    t = facts.graph.tensors[number]
    if not t.elements:
        return
    if t.dtype.bits < 8:
        # encode packs along the last axis, and the axes of the view have this order, too.
        values = values.movedim(t.packed_axis, -1)
    stored = rounding.encode(torch, values, t.dtype)
    if t.ragged is not None:
        flat = _flat(torch, t, device, buffers)
        _places(torch, t, facts, device, buffers).write(flat, stored.view(flat.dtype))
        return
    if t.reordering is tensor_reordering.NONE:
        _view(torch, t, device, buffers).copy_(stored)
    else:
        places = reordering.offsets(torch, t.dim, device.memory, t.blocks)
        _memory(torch, t, device, buffers)[places] = stored.view(torch.uint8)


def _view(torch, t: FrozenTensor, device: Device, buffers: Buffers):
    """A torch tensor on the memory of `t`: of its dtype, or, for FP4, of uint8 with the packed axis last and halved."""
    dim, stride, dtype = t.dim, t.stride, getattr(torch, t.dtype.facts.torch, None)
    if t.dtype.bits < 8:
        axis = t.packed_axis
        order = [a for a in range(len(dim)) if a != axis]
        dim = (*(dim[a] for a in order), dim[axis] // 2)
        stride = (*(stride[a] // 2 for a in order), 1)
        dtype = torch.uint8
    return _memory(torch, t, device, buffers).view(dtype).as_strided(dim, stride)


def _flat(torch, t: FrozenTensor, device: Device, buffers: Buffers):
    """The memory of `t` as a row of integers of its element size, with which torch can index all types."""
    kind = "uint8" if t.dtype.bits == 8 else f"int{t.dtype.bits}"
    return _memory(torch, t, device, buffers).view(getattr(torch, kind))


def _places(torch, t: FrozenTensor, facts: Subgraph, device: Device, buffers: Buffers) -> ragged.Places:
    offsets = _view(torch, facts.graph.tensors[t.ragged], device, buffers)
    if device.memory == "cpu":  # on a GPU the numbers are known only after earlier work has ended
        _check_offsets(t, facts.graph.tensors[t.ragged], offsets)
    return ragged.places(torch, t.dim, t.stride, offsets, t.multiplier)


def _check_offsets(t: FrozenTensor, of: FrozenTensor, offsets) -> None:
    """Raises VariantPackError unless batches are one after another, within memory for the rows of all."""
    found = [number * t.multiplier for number in offsets.flatten().tolist()]
    apart = t.stride[ragged.ROWS]
    room = -(-t.span // apart) * apart
    if found[0] < 0 or found[-1] > room or any(after < before for before, after in itertools.pairwise(found)):
        raise VariantPackError(
            f"{of}: its offsets of {t} are {found} elements; accepted: ascending numbers from 0 to {room}"
        )


def _memory(torch, t: FrozenTensor, device: Device, buffers: Buffers):
    """The bytes of `t`, including padding and gaps."""
    return memory.wrap(torch, buffers.address(t.id), t.nbytes, device)
