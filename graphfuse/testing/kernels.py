"""Runs of kernels on the emulator, in a separate program under sanitizers, compared with the reference."""

from dataclasses import replace

from graphfuse.base.errors import GraphfuseError, KernelCompileError, KernelFaultError
from graphfuse.contract.engine import Launch
from graphfuse.emulator.check import Memory, check
from graphfuse.emulator.compiler import Build
from graphfuse.op_graph.ir import TensorId
from graphfuse.testing.acceptance import AcceptedCase
from graphfuse.testing.valued_graph import ValuedGraph

_PAGE = 1 << 16  # between tensors
MOST_THREADS = 1 << 16
_LINES = 24  # lines of a sanitizer's report that are kept


def emulated(one: AcceptedCase) -> bool:
    """True if the part is a kernel that the emulator runs from its source."""
    return one.device.kind == "emulator" and isinstance(one.part.outline, Launch) and len(_sources(one)) == 1


def light(one: AcceptedCase) -> bool:
    """True if the launch has few enough threads to be run on the CPU in seconds."""
    return one.part.outline.grid * one.part.outline.block <= MOST_THREADS


def source(one: AcceptedCase) -> str:
    return _sources(one)[0]


def _sources(one: AcceptedCase) -> tuple[str, ...]:
    return one.engine.sources(one.part.facts, one.part.knobs)


def fault(
    torch, one: AcceptedCase, sanitizers: Build, tolerance: float, seed: int, in_place: bool = False
) -> str | None:
    """Fault of the kernel in three orders of its threads; None if there is none. in_place: whether the engine's first
    pair of tensors that may share memory do so."""
    graph, subgraph = one.case.graph, one.part.region.subgraph
    valued = ValuedGraph(torch, graph, seed)
    memory: dict[TensorId, Memory] = {}
    at = 1 << 40
    for t in map(graph.tensors.__getitem__, dict.fromkeys((*subgraph.inputs, *subgraph.outputs))):
        if not t.by_value:
            memory[t.id] = Memory(at + t.alignment, valued.memory(t, t.id in subgraph.inputs))
            at += -(-t.nbytes // _PAGE) * _PAGE + _PAGE
    if in_place:
        read, made = one.engine.in_place(one.part.facts, one.part.knobs)[0]
        memory[made] = replace(memory[read])
    scalars = {t.id: valued.number(t) for t in graph.tensors if t.by_value and t.id in valued.near}
    try:
        results = check(source(one), one.engine.entry, one.part.outline, memory, scalars, sanitizers)
    except (KernelFaultError, KernelCompileError) as error:
        return _brief(error)
    for t in map(graph.tensors.__getitem__, subgraph.outputs):
        contents = [result[t.id] for result in results]
        if len(set(contents)) > 1:
            return f"{t}: its bytes depend on the order in which threads run"
        wrong = valued.fault(t, contents[0], tolerance, in_place)
        if wrong:
            return wrong
    for t in () if in_place else subgraph.inputs:
        if t in memory and results[0][t] != memory[t].content:
            return f"{graph.tensors[t]}: the kernel wrote to it, and it is an input"
    return None


def _brief(error: GraphfuseError) -> str:
    """The error without the sanitizers' dump of memory and their hints for debugging themselves."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("=====")]
    end = next((n for n, line in enumerate(lines) if line.startswith(("Shadow bytes", "SUMMARY"))), len(lines))
    return "\n".join(lines[: min(end, _LINES)])
