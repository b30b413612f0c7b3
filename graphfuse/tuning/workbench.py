"""Private memory in which one part of a plan runs, and the reference engine's result for the same inputs.

It has several sets of the part's tensors, so that the L2 cache is cold. The user's tensors are only read, once.
"""

from collections.abc import Callable, Mapping, Sequence

from graphfuse.base.device import Device
from graphfuse.contract import memory
from graphfuse.contract.engine import NoKnobs, Prepared
from graphfuse.op_graph.ir import TensorId
from graphfuse.planning import registry as plugins
from graphfuse.planning.plan import Part, Plan
from graphfuse.runtime import fastcall, handle, timing
from graphfuse.runtime.variant_pack import Bindings
from graphfuse.tuning import compare

_POISON = 0xA5
_UNTOUCHED = 0
"""Content of outputs before they are computed. Elements that a node leaves unchanged have it in the reference's result,
too."""


class Workbench:
    """Buffers to try knobs of one part with. found: result of ``reference``."""

    def __init__(self, part: Part, device: Device, found: Mapping[TensorId, object], scalars: Mapping):
        import torch

        self.part, self.device = part, device
        subgraph = part.region.subgraph
        self._tensors = subgraph.graph.tensors
        self._outputs = [t for t in subgraph.outputs if found[t].numel()]
        self._reference = {t: found[t] for t in self._outputs}
        self._kept = {t for node in subgraph.nodes for port, t in node.outputs if node.op.keeps(port)}
        self._accepted: dict[TensorId, object] | None = None
        touched = [t for t in dict.fromkeys((*subgraph.inputs, *subgraph.outputs)) if t in found]
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device.memory)
        self._scalars = scalars
        self._sets = []
        for number in range(timing.buffer_sets(sum(found[t].numel() for t in touched))):
            made = {t: torch.empty_like(found[t]) for t in touched if number or t in self._outputs}
            for t in set(made) - set(self._outputs):
                made[t].copy_(found[t])
            self._sets.append({t: made.get(t, found[t]) for t in touched})

    def calls(self, prepared: Prepared) -> Sequence[Callable[[], None]]:
        """Calls that run the part, prepared with some knobs, on torch's current stream, one on each buffer set."""
        import torch

        if prepared.workspace_bytes > self._scratch.numel():
            self._scratch = torch.zeros(prepared.workspace_bytes, dtype=torch.uint8, device=self.device.memory)
        scratch, touched = self._scratch, [self._tensors[t] for t in self._sets[0]]
        start = fastcall.start(touched, {}, self._scalars, [fastcall.FrozenPart(prepared.freeze(False))])

        def call(one: Mapping[TensorId, object]) -> Callable[[], None]:
            places = [values.data_ptr() for values in one.values()]
            return lambda: start(handle.current_stream(self.device), scratch.data_ptr(), 0, *places)

        return [call(one) for one in self._sets]

    def check(self, calls: Sequence[Callable[[], None]]) -> str | None:
        """Description of a fault of the first of `calls`; None if it computes the reference's result."""
        import torch

        made = self._sets[0]
        for t in self._outputs:
            made[t].fill_(_UNTOUCHED if t in self._kept else _POISON)
        calls[0]()
        if self._accepted and all(torch.equal(made[t], self._accepted[t]) for t in self._outputs):
            return None
        rounded = compare.rounded_between(self.part.region.subgraph)
        wrong = (
            compare.difference(torch, self._tensors[t], made[t], self._reference[t], rounded) for t in self._outputs
        )
        reason = next(filter(None, wrong), None)
        if reason is None and self._accepted is None:
            self._accepted = {t: made[t].clone() for t in self._outputs}
        return reason


def tunable(part: Part) -> bool:
    """True if there are knobs to choose and work to time."""
    subgraph = part.region.subgraph
    works = any(subgraph.graph.tensors[t].elements for t in subgraph.outputs)
    return works and part.engine.problem(part.facts) is not None


def reference(plan: Plan, device: Device, bound: Bindings) -> dict[TensorId, object]:
    """The bytes of all tensors that parts of `plan` read and write, computed by the reference engine. bound: addresses
    of the caller's tensors; the inputs are copied. This needs several times their memory."""
    import torch

    (engine,) = (e for e in plugins.installed().engines if e.name == "reference")
    graph = plan.parts[0].region.subgraph.graph
    found = {}
    for t in dict.fromkeys(t for p in plan.parts for t in (*p.region.subgraph.inputs, *p.region.subgraph.outputs)):
        tensor = graph.tensors[t]
        if tensor.by_value:
            continue
        if t in graph.producer:
            found[t] = torch.full((tensor.nbytes,), _UNTOUCHED, dtype=torch.uint8, device=device.memory)
        else:
            found[t] = memory.wrap(torch, bound.address(t), tensor.nbytes, device).clone()
    buffers = Bindings({t: values.data_ptr() for t, values in found.items()}, bound.scalars, 0)
    for part in plan.parts:
        engine.run(part.region.subgraph, NoKnobs(), device, buffers, handle.current_stream(device))
    if device.kind == "cuda":
        torch.cuda.synchronize(device.ordinal)
    return found
