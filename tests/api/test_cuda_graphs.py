"""What populate_cuda_graph and update_cuda_graph refuse before they ask for a driver."""

import pytest

from graphfuse import GraphNotSupportedError, GraphStateError, GraphTypeError, heur_mode
from support import graphs
from support.graphs import Norm

CASE = Norm()
CALLS = pytest.mark.parametrize("call", ["populate_cuda_graph", "update_cuda_graph"])


@CALLS
def test_they_take_a_device_that_has_them(call):
    graph = CASE.graph()
    with pytest.raises(GraphStateError, match="call build_plans"):
        getattr(graph, call)(None, {}, None, 4096)
    graph.build([heur_mode.FALLBACK])
    outputs = CASE.outputs()
    with pytest.raises(GraphNotSupportedError, match=f"{call} needs a CUDA device; it is on cpu"):
        getattr(graph, call)(None, CASE.inputs() | outputs, None, 4096)


@CALLS
@pytest.mark.parametrize("given", [None, 0, -16, True, 4096.0, "4096", object()])
def test_graphs_are_known_by_address(call, given):
    graph = graphs.new()
    graph.relu(graph.tensor([4], name="x")).set_output()
    graph.build([heur_mode.FALLBACK])
    with pytest.raises(GraphTypeError, match=f"{call}: cuda_graph is .*; accepted: the address of a cudaGraph_t"):
        getattr(graph, call)(None, {}, None, given)
