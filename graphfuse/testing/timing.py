"""Times an engine's kernel on this machine's GPU, beside the stream limit."""

from collections import Counter
from collections.abc import Callable, Iterator

from graphfuse.errors import DeviceError
from graphfuse.planner import Planner
from graphfuse.record import gpu_needed
from graphfuse.testing import reference, storage
from graphfuse.testing.subject import REFERENCE, Subject
from graphfuse.testing.taken import Taken, taken
from graphfuse.testing.variants import Case, resized

SIZES = ((1024, 1024), (8192, 4096), (32768, 8192))


def need_gpu() -> None:
    """DeviceError where there is no GPU."""
    reason = gpu_needed("check(benchmark=True)")
    if reason:
        raise DeviceError(reason)


def timed(torch, subject: Subject) -> Iterator[str]:
    """A line for each size, of the first graph that is taken at it; a size that no engine takes has none."""
    from graphfuse.runtime import device

    here = device.get()
    for size in SIZES:
        for drawing in subject.drawings:
            graph = resized(drawing.graph, size)
            found = [] if graph is None else list(taken(subject, Case(drawing.name, graph, ()), here, Counter()))
            if found:
                yield _line(torch, subject, found[0])
                break


def _line(torch, subject: Subject, one: Taken) -> str:
    from graphfuse.runtime import timing

    graph = one.case.graph
    moved = sum(t.nbytes for t in graph.bound if not t.by_value)
    sets = timing.buffer_sets(moved)
    words = max(1, moved // 8)  # of 4 bytes, half of them read and half written
    where = one.device.memory
    halves = [
        (torch.zeros(words, dtype=torch.int32, device=where), torch.empty(words, dtype=torch.int32, device=where))
    ]
    halves += [tuple(map(torch.empty_like, halves[0])) for _ in range(sets - 1)]
    stream = [lambda a=a, b=b: torch.neg(a, out=b) for a, b in halves]
    calls = _calls(torch, subject, one, sets)
    ours, limit = timing.compare([timing.capture(calls), timing.capture(stream)])
    shapes = ", ".join(f"{t.name} {t.dtype.name} {list(t.dim)}" for t in graph.bound)
    return f"{shapes}: {ours.median:.1f} us, {limit.median / ours.median:.1%} of the stream limit"


def _calls(torch, subject: Subject, one: Taken, sets: int) -> list[Callable[[], None]]:
    from graphfuse.runtime.handle import Handle

    graph, where = one.case.graph, one.device.memory
    planner = Planner(graph, Handle(one.device), subject.registry.patterns, (*subject.engines, REFERENCE))
    planner.create([next(iter(one.engine.modes))])
    planner.build_at(0)
    workspace = torch.empty(max(planner.at(0).workspace_bytes, 1), dtype=torch.uint8, device=where)
    given = reference.inputs(torch, graph, 0)

    def call() -> Callable[[], None]:
        pack: dict[int, object] = {}
        kept = []
        for t in graph.bound:
            if t.by_value:
                pack[t.uid] = float(given[t.id].reshape(-1)[0])
            else:
                content = storage.stored(torch, t, None if t.id in graph.producer else given[t.id])
                kept.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where))
                pack[t.uid] = kept[-1].data_ptr()
        return lambda kept=kept: planner.execute(None, pack, workspace, None, False, lambda pack: None)

    return [call() for _ in range(sets)]
