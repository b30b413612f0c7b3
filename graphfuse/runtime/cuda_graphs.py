"""Adds a plan's work to a CUDA graph of the caller, and sets other buffers in it.

Graphs are given by address (of a CUgraph, which is the same type as cudaGraph_t). The launches of the plan are captured
on a new stream, which never runs anything. Work of one stream is a chain of nodes, so two graphs of one plan have the
same nodes in the same order.
"""

import contextlib
from collections.abc import Callable, Iterator

from cuda.bindings import driver

from graphfuse.base.device import Device
from graphfuse.base.errors import GraphStateError
from graphfuse.base.wording import counted
from graphfuse.runtime import device as devices

Start = Callable[[int], None]
"""Function that launches the work on a stream, which is given by address."""

# In bindings of CUDA 12 the plain name is of the first version, which fails for edges of dependent launches.
_edges_of = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)


def populate(graph: int, device: Device, start: Start) -> None:
    """Add the work to a graph without nodes.

    Raises GraphStateError if it has nodes, DeviceError with the driver's error. After a DeviceError, the graph may have
    a part of the work."""
    with devices.current(device.ordinal):
        handle = driver.CUgraph(graph)
        error, *_, count = driver.cuGraphGetNodes(handle, 0)
        devices.check(error, "reading a CUDA graph")
        if count:
            raise GraphStateError(
                f"the CUDA graph has {counted(count, 'node')}; accepted: one without nodes, which can then be "
                "a child of another"
            )
        _capture(handle, device, start)


def update(graph: int, device: Device, start: Start) -> None:
    """Set the buffers of `start` in a graph that ``populate`` filled, or in a child node that is its copy.

    Raises GraphStateError, without a change, if the nodes of the graph are not those of this plan. Executable graphs
    that were made of it are updated by the driver's calls (cuGraphExecUpdate, cuGraphExecChildGraphNodeSetParams).
    """
    with devices.current(device.ordinal), _new() as fresh:
        _capture(fresh, device, start)
        given, wanted = _chain(driver.CUgraph(graph)), _chain(fresh)
        if [_kind(node) for node in given] != [_kind(node) for node in wanted]:
            raise GraphStateError(
                f"the CUDA graph has {counted(len(given), 'node')}, not those of this plan ({len(wanted)}); accepted: "
                "a graph that populate_cuda_graph filled from the same plan, or its copy as a child node"
            )
        for node, other in zip(given, wanted, strict=True):
            _, get, set_ = _WAYS[_type(node)]
            error, parameters = get(other)
            devices.check(error, "reading a node of a CUDA graph")
            (error,) = set_(node, parameters)
            devices.check(error, "updating a node of a CUDA graph")


@contextlib.contextmanager
def _new() -> Iterator[object]:
    error, graph = driver.cuGraphCreate(0)
    devices.check(error, "making a CUDA graph")
    try:
        yield graph
    finally:
        driver.cuGraphDestroy(graph)


def _capture(graph: object, device: Device, start: Start) -> None:
    error, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    devices.check(error, f"making a stream on {device}")
    try:
        # In this mode, CUDA calls of other threads are not captured and do not invalidate the capture.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        (error,) = driver.cuStreamBeginCaptureToGraph(stream, graph, None, None, 0, mode)
        devices.check(error, "beginning to capture into a CUDA graph")
        try:
            start(int(stream))
        finally:
            error, _ = driver.cuStreamEndCapture(stream)
        devices.check(error, "capturing into a CUDA graph")
    finally:
        driver.cuStreamDestroy(stream)


def _chain(graph: object) -> list[object]:
    """The nodes in running order. Raises GraphStateError if they do not form a chain."""
    error, *_, count = driver.cuGraphGetNodes(graph, 0)
    devices.check(error, "reading a CUDA graph")
    if not count:
        return []
    error, nodes, _ = driver.cuGraphGetNodes(graph, count)
    devices.check(error, "reading a CUDA graph")
    error, *_, edges = _edges_of(graph, 0)
    devices.check(error, "reading the edges of a CUDA graph")
    after: dict[int, int] = {}
    if edges:
        error, sources, targets, *_ = _edges_of(graph, edges)
        devices.check(error, "reading the edges of a CUDA graph")
        after = {int(one): int(other) for one, other in zip(sources[:edges], targets[:edges], strict=True)}
    by_address = {int(node): node for node in nodes[:count]}
    at = next(iter(by_address.keys() - after.values()), None)
    chain: list[object] = []
    while at is not None and len(chain) < count:
        chain.append(by_address[at])
        at = after.get(at)
    if len(chain) != count or edges != count - 1:
        raise GraphStateError(
            f"the CUDA graph has {counted(count, 'node')} and {counted(edges, 'edge')}; accepted: nodes one after "
            "the other, as populate_cuda_graph makes them"
        )
    return chain


def _type(node: object) -> int:
    error, kind = driver.cuGraphNodeGetType(node)
    devices.check(error, "reading a node of a CUDA graph")
    return int(kind)


def _kind(node: object) -> tuple[int, int | None]:
    """Type of a node, and the function of a kernel node."""
    kind = _type(node)
    if kind not in _WAYS:
        return kind, None
    of, get, _ = _WAYS[kind]
    error, parameters = get(node)
    devices.check(error, "reading a node of a CUDA graph")
    return kind, of(parameters)


_WAYS: dict[int, tuple[Callable[..., object], ...]] = {
    int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL): (
        lambda parameters: int(parameters.func),
        driver.cuGraphKernelNodeGetParams,
        driver.cuGraphKernelNodeSetParams,
    ),
    int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET): (
        lambda parameters: None,
        driver.cuGraphMemsetNodeGetParams,
        driver.cuGraphMemsetNodeSetParams,
    ),
}
"""Functions by type of node, for the types that plans have: the kernel function of parameters, and the driver's calls
that read and write parameters."""
