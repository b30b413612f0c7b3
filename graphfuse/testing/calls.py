"""Runs of an engine as by ``execute``: for engines that run from Python, and for any engine on a GPU."""

from graphfuse.base.errors import GraphfuseError, KernelFaultError
from graphfuse.planning.planner import Planner
from graphfuse.runtime.handle import Handle
from graphfuse.testing.acceptance import AcceptedCase
from graphfuse.testing.subject import REFERENCE, Subject
from graphfuse.testing.valued_graph import ValuedGraph


def fault(torch, subject: Subject, one: AcceptedCase, tolerance: float, seed: int) -> str | None:
    """Fault of the part's results; None if there is none."""
    graph, where = one.case.graph, one.device.memory
    valued = ValuedGraph(torch, graph, seed)
    pack: dict[int, object] = {}
    buffers: dict[int, object] = {}
    for t in graph.bound:
        if t.by_value:
            pack[t.uid] = valued.number(t)
            continue
        content = valued.memory(t, t.id not in graph.producer)
        memory = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(where, copy=True)
        # Allocations are aligned to more than any access requires; the tensor's declared alignment must be enough.
        room = torch.empty(memory.numel() + 256, dtype=torch.uint8, device=where)
        start = -room.data_ptr() % 256 + t.alignment % 256
        buffers[t.id] = room[start : start + memory.numel()].copy_(memory)
        pack[t.uid] = buffers[t.id].data_ptr()
    try:
        planner = Planner(graph, Handle(one.device), subject.registry.patterns, (*subject.engines, REFERENCE))
        index = _planned(planner, one)
        planner.build_at(index)
        workspace = torch.empty(planner.at(index).workspace_bytes, dtype=torch.uint8, device=where)
        memory = workspace if workspace.numel() else None
        planner.run(planner.executable(index), pack, memory, None, False, lambda pack: None)
        if one.device.kind == "cuda":
            torch.cuda.synchronize(one.device.ordinal)
    except GraphfuseError as error:
        return str(error)
    made = (t for t in graph.outputs if t.id in buffers)
    faults = (valued.fault(t, buffers[t.id].cpu().numpy().tobytes()[: t.nbytes], tolerance) for t in made)
    return next(filter(None, faults), None)


def _planned(planner: Planner, one: AcceptedCase) -> int:
    for mode in sorted(one.engine.modes, key=lambda mode: mode.name):
        planner.create([mode])
        for index, p in enumerate(planner.plans):
            if any(part.engine is one.engine and part.knobs == one.part.knobs for part in p.parts):
                return index
    raise KernelFaultError(f"engine {one.engine.name!r} accepted the case once, and declines it when asked again")
