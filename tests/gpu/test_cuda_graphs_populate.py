"""populate_cuda_graph and update_cuda_graph: a plan as a child of a CUDA graph of the driver's."""

import gc

import pytest
import torch
from cuda.bindings import driver

import graphfuse
from graphfuse import GraphNotSupportedError, GraphStateError, VariantPackError, heur_mode
from support import graphs
from support.graphs import Norm

pytestmark = pytest.mark.gpu

CASES = {
    "one kernel": Norm(999, 320),
    "statistics": Norm(33, 4096, training=True),
}


def done(result):
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else tuple(values)


@pytest.fixture
def empty():
    """empty(): a new CUDA graph, thrown away in the end."""
    torch.zeros(1, device="cuda")  # torch's context is current
    made = []

    def new():
        made.append(done(driver.cuGraphCreate(0)))
        return made[-1]

    yield new
    for graph in made:
        driver.cuGraphDestroy(graph)


def expected(case: Norm, inputs: dict) -> dict:
    outputs = case.outputs("cuda")
    graphs.fused(case).execute(inputs | outputs)
    torch.cuda.synchronize()
    return outputs


def launch(executable) -> None:
    done(driver.cuGraphLaunch(executable, driver.CUstream(torch.cuda.current_stream().cuda_stream)))
    torch.cuda.synchronize()


def same(outputs: dict, wanted: dict) -> bool:
    raw = lambda t: t.contiguous().view(torch.uint8)  # noqa: E731
    return all(torch.equal(raw(outputs[name]), raw(wanted[name])) for name in wanted)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_populated_as_a_child_and_updated(case, empty):
    """As cuDNN's sample does it: the plan in a graph of its own, that as a child, then other buffers, in place."""
    graph, first, second = graphs.fused(case), case.inputs("cuda", 1), case.inputs("cuda", 2)
    handle = graphfuse.create_handle("cuda")
    outputs, others = case.outputs("cuda"), case.outputs("cuda")
    own, main = empty(), empty()
    graph.populate_cuda_graph(handle, first | outputs, None, int(own))
    torch.cuda.synchronize()
    assert not same(outputs, expected(case, first)), "nothing runs before the graph is launched"
    node = done(driver.cuGraphAddChildGraphNode(main, None, 0, own))
    executable = done(driver.cuGraphInstantiate(main, 0))
    launch(executable)
    assert same(outputs, expected(case, first))
    child = done(driver.cuGraphChildGraphNodeGetGraph(node))
    graph.update_cuda_graph(handle, second | others, None, child)
    done(driver.cuGraphExecChildGraphNodeSetParams(executable, node, child))
    for t in outputs.values():
        t.zero_()
    launch(executable)
    assert same(others, expected(case, second)) and not any(t.float().any() for t in outputs.values())
    done(driver.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("largest", [True, False])
def test_cleared_memory_and_several_kernels(empty, largest):
    """Two norms of other rows, and the largest magnitude of all, whose memory is set to zero first. Without that the
    second kernel begins before the first one ends."""
    g = graphs.new(device="cuda")
    x, y = (g.tensor([n, 256], name=name) for n, name in ((77, "x"), (12, "y")))
    for t, name in ((x, "a"), (y, "b")):
        made, _ = g.rmsnorm(t, None, 1e-5, norm_forward_phase=graphfuse.norm_forward_phase.INFERENCE)
        made.set_output().set_name(name)
        if largest:
            g.reduction(made, mode=graphfuse.reduction_mode.AMAX).set_output().set_name(f"{name}_max").set_dim([1, 1])
    g.build([heur_mode.OPENSOURCE])
    assert len(g.get_engine_and_knobs_at_index(0)[0]) == 2

    def pack(seed):
        source = graphs.generator("cuda", seed)
        given = {n: torch.randn(r, 256, generator=source, device="cuda") for n, r in (("x", 77), ("y", 12))}
        made = {"a": torch.empty_like(given["x"]), "b": torch.empty_like(given["y"])}
        of_all = ("a_max", "b_max") if largest else ()
        return given, made | {n: torch.full((1, 1), 9e9, device="cuda") for n in of_all}

    graph = empty()
    (one, outputs), (two, others), (_, wanted) = pack(1), pack(2), pack(3)
    space = graphs.workspace(g.get_workspace_size(), "cuda")
    g.populate_cuda_graph(None, one | outputs, space, graph)
    for given, made in ((one, outputs), (two, others)):
        if given is two:
            g.update_cuda_graph(None, two | others, space, graph)
        main = empty()
        done(driver.cuGraphAddChildGraphNode(main, None, 0, graph))
        executable = done(driver.cuGraphInstantiate(main, 0))
        for _ in range(2):
            launch(executable)
        g.execute(given | wanted, space)
        torch.cuda.synchronize()
        assert same(made, wanted)
        done(driver.cuGraphExecDestroy(executable))


def test_no_rows_are_no_nodes(empty):
    case, graph = Norm(0, 64), empty()
    pack = case.inputs("cuda") | case.outputs("cuda")
    for _ in range(2):
        graphs.fused(case).populate_cuda_graph(None, pack, None, graph)
    assert done(driver.cuGraphGetNodes(graph, 0))[-1] == 0


def test_launched_after_the_plan_is_gone(empty):
    case = Norm(64, 512)
    graph, inputs, outputs = graphs.fused(case), case.inputs("cuda"), case.outputs("cuda")
    own = empty()
    graph.populate_cuda_graph(None, inputs | outputs, None, own)
    executable = done(driver.cuGraphInstantiate(own, 0))
    del graph
    gc.collect()
    launch(executable)
    assert same(outputs, expected(case, inputs))
    done(driver.cuGraphExecDestroy(executable))


def test_refused(empty):
    case, other = Norm(64, 512), Norm(64, 512, training=True)
    graph, pack = graphs.fused(case), case.inputs("cuda") | case.outputs("cuda")
    filled = empty()
    graph.populate_cuda_graph(None, pack, None, filled)
    with pytest.raises(GraphStateError, match="has 1 node; accepted: one without nodes"):
        graph.populate_cuda_graph(None, pack, None, filled)
    with pytest.raises(GraphStateError, match=r"has 0 nodes, not those of this plan \(1\)"):
        graph.update_cuda_graph(None, pack, None, empty())
    with pytest.raises(GraphStateError, match=r"has 1 node, not those of this plan \(1\)"):
        graphs.fused(other).update_cuda_graph(None, other.inputs("cuda") | other.outputs("cuda"), None, filled)
    with pytest.raises(VariantPackError, match="missing: 'x'"):
        graph.populate_cuda_graph(None, {n: v for n, v in pack.items() if n != "x"}, None, empty())
    reference = case.graph("cuda")
    reference.build([heur_mode.FALLBACK])
    with pytest.raises(GraphNotSupportedError, match="for plans of kernels; 'reference' may allocate"):
        reference.populate_cuda_graph(None, pack, None, empty())
