"""Any graph, by the op table's reference semantics in torch: mode FALLBACK, and what runs without a GPU."""

from graphfuse import memory, rounding
from graphfuse.device import Device
from graphfuse.engine import Buffers, HostEngine, No, NoKnobs
from graphfuse.enums import heur_mode
from graphfuse.ir import Subgraph, Tensor


class ReferenceEngine(HostEngine[Subgraph, NoKnobs]):
    """Runs node by node in each node's compute type, on the CPU or the GPU.

    Values between nodes are not rounded; inputs are read and outputs rounded once, by
    ``graphfuse.rounding``.
    """

    name = "reference"
    facts = Subgraph
    modes = frozenset({heur_mode.A, heur_mode.B, heur_mode.FALLBACK})

    def why_not(self, facts: Subgraph, device: Device) -> No | None:
        return None

    def notes(self, facts: Subgraph, knobs: NoKnobs, device: Device) -> tuple[str, ...]:
        return ("reference: torch operations one by one, values between nodes kept in the compute type",)

    def run(self, facts: Subgraph, knobs: NoKnobs, device: Device, buffers: Buffers, stream: int) -> None:
        import torch

        with _on(torch, device, stream):
            values: dict[int, object] = {}
            for node in facts.nodes:
                compute = getattr(torch, node.compute.facts.torch)
                for _, t in node.inputs:
                    if t not in values:
                        values[t] = _load(torch, facts.graph.tensors[t], device, buffers, compute)
                inputs = {port: values[t].to(compute) for port, t in node.inputs}
                results = node.op.reference(torch, inputs, dict(node.attributes))
                for port, t in node.outputs:
                    made = facts.graph.tensors[t]
                    # Who reads an output reads what is stored, as where another engine made it.
                    values[t] = results[port] if made.virtual else rounding.round_to(torch, results[port], made.dtype)
            for t in facts.outputs:
                _store(torch, facts.graph.tensors[t], device, buffers, values[t])


def _on(torch, device: Device, stream: int):
    if device.memory == "cpu":
        return torch.device("cpu")
    # ExternalStream takes the default stream's address, 0, for none and makes a stream of its own.
    given = (
        torch.cuda.ExternalStream(stream, device=device.ordinal)
        if stream
        else torch.cuda.default_stream(device.ordinal)
    )
    return torch.cuda.stream(given)


def _load(torch, t: Tensor, device: Device, buffers: Buffers, compute):
    if not t.elements:
        return torch.empty(t.dim, dtype=compute, device=device.memory)
    if t.by_value:
        return torch.full(t.dim, buffers.scalar(t.id), dtype=compute, device=device.memory)
    values = rounding.decode(torch, _view(torch, t, device, buffers), t.dtype, compute)
    return values.movedim(-1, t.packed_axis) if t.dtype.bits < 8 else values


def _store(torch, t: Tensor, device: Device, buffers: Buffers, values) -> None:
    if not t.elements:
        return
    if t.dtype.bits < 8:
        # Along the last axis is where encode packs; the view has its axes in that order too.
        values = values.movedim(t.packed_axis, -1)
    _view(torch, t, device, buffers).copy_(rounding.encode(torch, values, t.dtype))


def _view(torch, t: Tensor, device: Device, buffers: Buffers):
    """A torch tensor over the bytes of `t`: of its dtype, or, for FP4, uint8 with the packed axis last and halved."""
    dim, stride, dtype = t.dim, t.stride, getattr(torch, t.dtype.facts.torch, None)
    if t.dtype.bits < 8:
        axis = t.packed_axis
        order = [a for a in range(len(dim)) if a != axis]
        dim = (*(dim[a] for a in order), dim[axis] // 2)
        stride = (*(stride[a] // 2 for a in order), 1)
        dtype = torch.uint8
    raw = memory.wrap(torch, buffers.address(t.id), t.nbytes, device)
    return raw.view(dtype).as_strided(dim, stride)
