"""Timing of an engine's kernel on this machine's GPU, compared with the stream limit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from graphfuse.planning.kernels import prepare
from graphfuse.testing.acceptance import AcceptedCase, accepted_cases
from graphfuse.testing.subject import Subject
from graphfuse.testing.valued_graph import ValuedGraph
from graphfuse.testing.variants import CheckCase, resized
from graphfuse.tuning.workbench import Workbench

SIZES = ((1024, 1024), (8192, 4096), (32768, 8192))


def timed(torch, subject: Subject) -> Iterator[str]:
    """A line for each size, for the first graph that is accepted at it; none for a size that no engine accepts."""
    from graphfuse.runtime import device

    here = device.get()
    for size in SIZES:
        for sample in subject.samples:
            graph = resized(sample.graph, size)
            found = (
                []
                if graph is None
                else list(accepted_cases(subject, CheckCase(sample.name, graph, ()), here, Counter()))
            )
            if found:
                yield _line(torch, found[0])
                break


def _line(torch, one: AcceptedCase) -> str:
    from graphfuse.runtime import timing

    graph, where = one.case.graph, one.device.memory
    moved = sum(t.nbytes for t in graph.bound if not t.by_value)
    words = max(1, moved // 8)  # words of 4 bytes; half of the bytes are read and half written
    calls = calls_of(torch, one)
    halves = [torch.zeros(2, words, dtype=torch.int32, device=where) for _ in calls]
    stream = [lambda read=read, made=made: torch.neg(read, out=made) for read, made in halves]
    ours, limit = timing.compare([timing.capture(calls), timing.capture(stream)])
    shapes = ", ".join(f"{t.name} {t.dtype.name} {list(t.dim)}" for t in graph.bound)
    return f"{shapes}: {ours.median:.1f} us, {limit.median / ours.median:.1%} of the stream limit"


def calls_of(torch, one: AcceptedCase) -> Sequence[Callable[[], None]]:
    """Calls that run the part, one on each of several sets of buffers."""
    subgraph, valued = one.part.region.subgraph, ValuedGraph(torch, one.case.graph, 0)
    touched = [subgraph.graph.tensors[t] for t in dict.fromkeys((*subgraph.inputs, *subgraph.outputs))]
    scalars = {t.id: valued.number(t) for t in touched if t.by_value}
    memory = {
        t.id: torch.frombuffer(bytearray(valued.memory(t, True)), dtype=torch.uint8).to(one.device.memory)
        for t in touched
        if not t.by_value
    }
    return Workbench(one.part, one.device, memory, scalars).calls(prepare(one.part, one.device))
