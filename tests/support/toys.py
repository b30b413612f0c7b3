"""A pattern and an engine small enough to see through: one node at a time, run by the reference engine.

They cut a graph into as many regions as one likes, on any device.
"""

from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.contract.engine import Address, Buffers, HostEngine, KernelEngine, Launch, No, NoKnobs
from graphfuse.contract.match import Match, Pattern, PatternGraph
from graphfuse.contract.served import EVERYTHING
from graphfuse.engines.reference import ReferenceEngine
from graphfuse.op_graph.ir import Subgraph
from graphfuse.ops import OPS


@dataclass(frozen=True)
class Solo:
    """Facts: the matched nodes themselves."""

    subgraph: Subgraph


@dataclass(frozen=True)
class Knobs:
    size: int = 1


def solo(*names: str) -> tuple[Pattern, ...]:
    """Patterns that match one node of these ops each."""

    def pattern(name: str) -> Pattern:
        def template(g: PatternGraph):
            return {"out": getattr(g, name)(*(g.capture(p.name) for p in OPS[name].inputs))}

        return Pattern(f"solo_{name}", template, facts)

    return tuple(map(pattern, names))


def facts(match: Match) -> Solo:
    return Solo(match.subgraph)


class HostSolo(HostEngine[Solo, Knobs]):
    """Runs its nodes as the reference engine does. sizes: knobs it proposes, best first."""

    facts = Solo
    knobs = Knobs
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A})
    serves = EVERYTHING

    def __init__(self, name: str = "solo", sizes: tuple[int, ...] = (1,), reason: str | None = None):
        self.name, self.sizes, self.reason = name, sizes, reason

    def why_not(self, facts: Solo, device: Device) -> No | None:
        return None if self.reason is None else No(self.reason)

    def propose(self, facts: Solo, device: Device, mode: heur_mode) -> tuple[Knobs, ...]:
        return tuple(Knobs(size) for size in self.sizes)

    def illegal(self, facts: Solo, knobs: Knobs, device: Device) -> No | None:
        return None if 0 < knobs.size <= 100 else No(f"size is {knobs.size}; accepted: 1 to 100")

    def run(self, facts: Solo, knobs: Knobs, device: Device, buffers: Buffers, stream: int) -> None:
        ReferenceEngine().run(facts.subgraph, NoKnobs(), device, buffers, stream)


class ScratchSolo(KernelEngine[Solo, NoKnobs]):
    """Planned but never compiled: its launches ask for `scratch_bytes`."""

    name = "scratch"
    facts = Solo
    modes = frozenset({heur_mode.OPENSOURCE, heur_mode.A})
    serves = EVERYTHING
    entry = "none"

    def __init__(self, scratch_bytes: int):
        self.scratch_bytes = scratch_bytes

    def why_not(self, facts: Solo, device: Device) -> No | None:
        return None

    def source(self, facts: Solo, knobs: NoKnobs) -> str:
        raise NotImplementedError

    def launch(self, facts: Solo, knobs: NoKnobs) -> Launch:
        return Launch(1, 32, tuple(Address(t) for t in facts.subgraph.inputs), scratch_bytes=self.scratch_bytes)
