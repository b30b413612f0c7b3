"""cuDNN as an engine: products, convolutions and attention with the pointwise operations after them, and norms.

A plan is built once, and run with raw addresses on the caller's stream. By default, planning queries the engine only
for nodes that no engine of another pattern accepts. GRAPHFUSE_CUDNN changes that.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import behavior_note, heur_mode, numerical_note
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.contract.engine import Engine, No, Prepared, ProblemClass, Site
from graphfuse.contract.served import Served
from graphfuse.engines.cudnn import calls, devices, package, plans, support
from graphfuse.engines.cudnn.handles import Handles
from graphfuse.engines.cudnn.plans import BuiltPlan, CudnnKnobs, Proposed
from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.patterns.epilogues import EpilogueFacts

MOST = 8
"""Maximum number of cuDNN's plans that are proposed in mode A; in mode B there is no limit."""

_KEPT = 256  # cached answers of cuDNN
_READY = 16  # plans that were built by a query and are kept for their first use


class CudnnEngine(Engine[EpilogueFacts, CudnnKnobs]):
    """Runs regions with plans of cuDNN.

    Whether cuDNN has a plan is known only after building one. So planning queries cuDNN, once for equal nodes on a
    device, until the first plan can be built."""

    name = "cudnn"
    facts = EpilogueFacts
    knobs = CudnnKnobs
    modes = frozenset(plans.MODES)
    serves = Served(frozenset({data_type.FLOAT}), rounding=True, layouts=True, by_value=True)

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._handles: dict[int, Handles] = {}
        self._answers: OrderedDict[tuple[str, Device], tuple[Proposed, ...] | No] = OrderedDict()
        self._ready: deque[tuple[Subgraph, Device, CudnnKnobs, BuiltPlan]] = deque(maxlen=_READY)

    def why_not(self, facts: EpilogueFacts, device: Device) -> No | None:
        found = support.why_not(facts.subgraph, device) or devices.why_not(device)
        if found is not None:
            return found
        answer = self._query(facts.subgraph, device)
        return answer if isinstance(answer, No) else None

    def propose(self, facts: EpilogueFacts, device: Device, mode: heur_mode) -> Sequence[CudnnKnobs]:
        """Plans of cuDNN's heuristics.

        Mode A has the best of its mode A, mode B has all plans, those of its FALLBACK last, and mode FALLBACK has
        only the latter."""
        found = self._proposed(facts, device)
        best = [one.knobs for one in found if one.mode is heur_mode.A]
        last = [one.knobs for one in found if one.mode is heur_mode.FALLBACK]
        wide = [one.knobs for one in found if one.mode is not heur_mode.FALLBACK]
        by_mode = {heur_mode.A: best[:MOST], heur_mode.B: wide + last, heur_mode.FALLBACK: last}
        # A mode without plans gets the first one, which can be built.
        return by_mode[mode] or [found[0].knobs]

    def illegal(self, facts: EpilogueFacts, knobs: CudnnKnobs, device: Device) -> No | None:
        known = [one.knobs for one in self._proposed(facts, device)]
        if knobs in known:
            return None
        return No(f"cuDNN proposes no such plan; it proposes: {', '.join(map(str, known)) or 'none'}")

    def notes(self, facts: EpilogueFacts, knobs: CudnnKnobs, device: Device) -> tuple[str, ...]:
        between = sorted(
            facts.subgraph.graph.tensors[t].name
            for node in facts.subgraph.nodes
            for _, t in node.outputs
            if t not in facts.subgraph.outputs
        )
        kept = f"; {', '.join(map(repr, between))} kept in FLOAT" if between else ""
        return (f"cuDNN: sums in FLOAT in an order of the plan's own{kept}",)

    def behavior_notes_of(self, facts: EpilogueFacts, knobs: CudnnKnobs, device: Device) -> frozenset[behavior_note]:
        found = (one.behavior_notes for one in self._proposed(facts, device) if one.knobs == knobs)
        return next(found, frozenset())

    def numerical_notes_of(self, facts: EpilogueFacts, knobs: CudnnKnobs, device: Device) -> frozenset[numerical_note]:
        """TENSOR_CORE if tensor cores may be used.

        cuDNN does not report notes of a plan, but can exclude plans by notes (``plans.REFUSED``)."""
        nodes = facts.subgraph
        products = any(node.op_name in plans.MULTIPLIES for node in nodes.nodes)
        used = products and not plans.rounds_inputs(nodes)
        return frozenset({numerical_note.TENSOR_CORE} if used else ())

    def problem(self, facts: EpilogueFacts) -> ProblemClass | None:
        cudnn = package.load()
        if isinstance(cudnn, No):
            return None
        return ProblemClass({"nodes": _key(facts.subgraph), "cudnn": cudnn.backend_version()}, 1)

    def prepare(self, facts: EpilogueFacts, knobs: CudnnKnobs, device: Device, site: Site) -> Prepared:
        cudnn = package.load()
        if isinstance(cudnn, No):
            raise GraphNotSupportedError(str(cudnn))
        handles, nodes = self._handles_of(cudnn, device), facts.subgraph
        built = self._take_ready(nodes, device, knobs)
        try:
            with devices.current(device.ordinal):
                built = built or plans.build(cudnn, nodes, knobs, handles.mine())
                call = calls.frozen(cudnn, nodes.graph, built, handles)
        except GraphNotSupportedError:
            raise
        except plans.errors(cudnn) as error:
            names = ", ".join(node.name for node in nodes.nodes)
            raise GraphNotSupportedError(f"cuDNN cannot build {knobs} for {names}: {plans.words(error)}") from error
        return Prepared(
            lambda dependent: call,
            built.workspace_bytes,
            "cuDNN does not say that its kernels wait for the work before them",
        )

    def _proposed(self, facts: EpilogueFacts, device: Device) -> tuple[Proposed, ...]:
        answer = self._query(facts.subgraph, device)
        return () if isinstance(answer, No) else answer

    def _query(self, nodes: Subgraph, device: Device) -> tuple[Proposed, ...] | No:
        """Proposals of cuDNN for some nodes. The answer is cached for equal nodes."""
        key = (_key(nodes), device)
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        cudnn = package.load()
        if isinstance(cudnn, No):
            return cudnn  # not cached, as the package may be installed later
        with devices.current(device.ordinal):
            try:
                handle = self._handles_of(cudnn, device).mine()
            except RuntimeError as error:
                return No(f"cuDNN makes no handle for {device}: {plans.words(error)}")
            found = plans.query(cudnn, nodes, handle)
        answer = found if isinstance(found, No) else found.proposed
        with self._lock:
            self._answers[key] = answer
            if not isinstance(found, No):
                self._ready.append((nodes, device, found.proposed[0].knobs, found.first))
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        return answer

    def _take_ready(self, nodes: Subgraph, device: Device, knobs: CudnnKnobs) -> BuiltPlan | None:
        """The plan that a query for these nodes has built, if it has these knobs; else None. It is returned once."""
        with self._lock:
            for place, (of, on, known, built) in enumerate(self._ready):
                # Equal nodes of another graph have tensors with other uids.
                if of.graph is nodes.graph and of == nodes and on == device and known == knobs:
                    del self._ready[place]
                    return built
        return None

    def _handles_of(self, cudnn, device: Device) -> Handles:
        with self._lock:
            if device.ordinal not in self._handles:
                self._handles[device.ordinal] = Handles(cudnn, device.ordinal)
            return self._handles[device.ordinal]


def _key(nodes: Subgraph) -> str:
    """A digest of the computation of some nodes and of which results they write. It is the same in all graphs."""
    graph, written = nodes.graph, frozenset(nodes.outputs)
    tensors = tuple(replace(t, virtual=t.id not in written and t.virtual) for t in graph.tensors)
    return FrozenGraph("", tensors, nodes.nodes).key()
