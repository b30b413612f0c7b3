"""``Graph``: arrays in place of tensors, inputs and outputs by name, called like a function."""

import numpy as np
import pytest
import torch

import graphfuse
from graphfuse import (
    Graph,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    NotOfferedError,
    VariantPackError,
    WorkspaceError,
    data_type,
    heur_mode,
    norm_forward_phase,
)

pytestmark = pytest.mark.torch

INFERENCE = norm_forward_phase.INFERENCE


def cpu(**kwargs):
    types = {"io_data_type": data_type.BFLOAT16, "intermediate_data_type": data_type.FLOAT}
    return Graph(handle=graphfuse.create_handle("cpu"), **types | kwargs)


def norm(graph, x, w, name="norm"):
    y = graph.rmsnorm(input=x, scale=w, epsilon=1e-5, norm_forward_phase=INFERENCE, name=name)[0]
    graph.swish(y).set_output().set_name("out").set_data_type(data_type.BFLOAT16)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wanted(x, w):
    y = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], w[0].double(), 1e-5)
    return torch.nn.functional.silu(y)


def close(made, x, w):
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), wanted(x, w), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", ["norm::input", "norm::0", "tensor", "array", "uid"])
def test_called_like_a_function(name):
    x, w = values(4, 64), values(1, 64, seed=1)
    with cpu() as graph:
        norm(graph, x, w)
    tensor = graph.explanation  # looked at after the block only
    assert tensor().shown == 0
    chosen = {"tensor": "tensor_0", "array": x, "uid": 1}.get(name, name)
    graph.set_io_tuples([chosen, "norm::scale"], ["out"])
    for seed in (2, 3):
        x = values(4, 64, seed=seed)
        close(graph(x, w), x, w)


def test_inputs_and_outputs_of_the_constructor():
    x, w = values(4, 64), values(1, 64, seed=1)
    with cpu(inputs=[w, x], outputs=["out"], heuristics=[heur_mode.FALLBACK], name="named") as graph:
        norm(graph, x.clone().requires_grad_(), w)  # another array: the ones named are not of the graph
        assert graph is not None
        graph.set_io_tuples(["norm::scale", "norm::input"], ["out"])
    close(graph(w, x.requires_grad_()), x.detach(), w)


def test_one_array_is_one_tensor():
    x = values(4, 64)
    with cpu(inputs=[x], outputs=["sum", "double"]) as graph:
        total = graph.add(x, x).set_output().set_name("sum")
        graph.mul(total, 2.0).set_output().set_name("double")
    total, double = graph(x)
    assert torch.equal(total, x + x) and torch.equal(double, 2 * (x + x))


def test_by_name():
    x, w = values(4, 64), values(1, 64, seed=1)
    with cpu() as graph:
        t = graph.tensor([4, 64], data_type=data_type.BFLOAT16, name="x")
        norm(graph, t, w)
    given = {"x": x, "norm::scale": w}
    assert graph(given) is given
    close(given["out"], x, w)
    out = torch.zeros_like(x)
    assert graph({t: x, w: w, "out": out})["out"] is out
    close(out, x, w)


def test_numpy_arrays():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with cpu(inputs=[x], outputs=["y"], io_data_type=data_type.FLOAT) as graph:
        graph.relu(x).set_output().set_name("y")
    assert graph(x - 5).tolist() == np.maximum(x - 5, 0).tolist()


def test_workspace():
    x = values(4, 64)
    with cpu(inputs=["x"], outputs=["y"], workspace_alloc=False) as graph:
        graph.relu(graph.tensor([4, 64], data_type=data_type.BFLOAT16, name="x")).set_output().set_name("y")
    assert graph.get_workspace_size() == 0 and torch.equal(graph(x), x.relu())

    graph._graph.get_workspace_size = lambda: 256  # of a plan that needs some
    with pytest.raises(WorkspaceError, match="give workspace=, a buffer of 256 bytes"):
        graph(x)


def test_emulator_allocates_where_the_kernels_run():
    x, w = values(4, 64), values(1, 64, seed=1)
    types = {"intermediate_data_type": data_type.FLOAT}
    with Graph(handle=graphfuse.create_handle("emulator"), inputs=[x, w], outputs=["out"], **types) as graph:
        norm(graph, x, w)
    close(graph(x, w), x, w)
    assert graph.explanation().regions[0].engine == "rows"


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["norm::input", "nobody"], ["out"], r"input 1 \('nobody'\) is no tensor of it; there are: 'norm::input', 'n"),
        (["norm::input", "norm::scale"], ["norm::Y"], r"output 0 \('norm::Y'\) is virtual"),
        (["norm::input", "norm::0"], ["out"], r"input 1 \('tensor_0'\) is input 0 already"),
        (["norm::input", "out"], ["norm::scale"], r"input 1 \('out'\) is no input of the graph"),
        (["norm::input"], ["out"], "neither input nor output: 'tensor_1'"),
        (["norm::input", torch.ones(2)], ["out"], r"input 1 \(a Tensor\) is no tensor of it"),
    ],
)
def test_wrong_inputs_and_outputs(inputs, outputs, message):
    with pytest.raises(GraphValidationError, match=message), cpu(inputs=inputs, outputs=outputs) as graph:
        norm(graph, values(4, 64), values(1, 64))


def test_nodes_under_cudnns_names():
    """Of two names, of concatenated arrays, arrays in tuples, and arrays for what is written on demand."""
    x, y = values(4, 8), values(4, 8, seed=1)
    with cpu(inputs=["b::input", "b::bias"], outputs=["sum"]) as graph:
        graph.bias(x, y, name="b").set_output().set_name("sum")
    torch.testing.assert_close(graph(x, y), x + y)
    with cpu(inputs=["all::0", "all::1", "all::2"], outputs=["rows"]) as graph:
        graph.concatenate(0, inputs=[x, y, values(4, 8, seed=2)], name="all").set_output().set_name("rows")
    assert torch.equal(graph(x, y, y), torch.cat([x, y, y]))

    q, k, v = (values(1, 2, 4, 8, seed=s) for s in range(3))
    mask = values(1, 2, 4, 4, seed=3)
    largest = torch.empty(1, 2, 4, 1)
    reads = [f"a::{port}" for port in ("q", "k", "v", "dropout_mask")]
    with cpu(inputs=reads, outputs=["o", "a::score_max"]) as graph:
        made = graph.scaled_dot_product_flash_attention(
            q, k, v, attn_scale=0.5, generate_stats=False, dropout=(mask, 1.25), score_max=largest, name="a"
        )
        made[0].set_output().set_name("o")
    o, largest = graph(q, k, v, mask)
    scores = q.double() @ k.double().mT * 0.5
    torch.testing.assert_close(largest.double(), scores.amax(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    exact = (scores.softmax(-1) * mask.double() * 1.25) @ v.double()
    torch.testing.assert_close(o.double(), exact, rtol=2**-7, atol=1e-2)


def test_wrong_calls():
    x, w = values(4, 64), values(1, 64)
    with cpu() as graph:
        norm(graph, x, w)
        with pytest.raises(GraphStateError, match="a call is for after its with block; the graph is open"):
            graph(x, w)
        with pytest.raises(GraphStateError, match="explain is for after its with block"):
            graph.explain()
        with pytest.raises(GraphStateError, match="Graph has no build_plans"):
            graph.build_plans()
        with pytest.raises(NotOfferedError, match="mamba2"):
            graph.mamba2()
        with pytest.raises(AttributeError, match="no attribute 'swich'"):
            graph.swich(x)
    with pytest.raises(GraphStateError, match=r"set_io_tuples\(\) first"):
        graph(x, w)
    with pytest.raises(VariantPackError, match="no value for 'norm::scale'"):
        graph({"norm::input": x})
    with pytest.raises(VariantPackError, match="'nobody' is no tensor of it"):
        graph({"nobody": x})
    graph.set_io_tuples([x, w], ["out"])
    with pytest.raises(VariantPackError, match="got 1 argument; accepted: 'norm::input', 'norm::scale'"):
        graph(x)
    with pytest.raises(GraphStateError, match="relu is for inside of its with block; the graph is built"):
        graph.relu(x)
    with pytest.raises(GraphStateError, match="entered before"), graph:
        pass
    with pytest.raises(GraphTypeError, match="inputs: give a list or tuple, got str"):
        Graph(inputs="norm::input")


def test_an_error_in_the_block_is_the_users():
    with pytest.raises(ZeroDivisionError), cpu() as graph:
        graph.relu(values(4, 64))
        raise ZeroDivisionError
    with pytest.raises(GraphStateError, match="the graph is failed"):
        graph(values(4, 64))


# Graphs as functions write them down


def test_jit_and_graph_cache():
    handle, made = graphfuse.create_handle("cpu"), []

    @graphfuse.graph_cache(key_fn=lambda rows: rows, maxsize=2)
    @graphfuse.jit(heur_modes=[heur_mode.A])
    def relu(rows):
        made.append(rows)
        with graphfuse.graph(handle, name="relu", io_data_type=data_type.FLOAT) as (g, tensors):
            x = g.tensor([rows, 8], name="x")
            tensors += [x, g.relu(x).set_output()]
        return g, tensors

    for rows in (2, 3, 2, 4, 2, 3):
        g, (x, y) = relu(rows)
        out = torch.empty(rows, 8)
        g.execute({x: torch.full((rows, 8), -1.0), y: out})
        assert (out == 0).all()
    assert made == [2, 3, 4, 2, 3] and relu.__name__ == "relu"


def test_a_graph_that_has_plans_is_not_built_again():
    g = graphfuse.pygraph(io_data_type=data_type.FLOAT, handle=graphfuse.create_handle("cpu"))
    y = g.relu(g.tensor([8])).set_output()
    g.build([heur_mode.FALLBACK])
    planner = g._planner
    assert graphfuse.jit()(lambda: (g, [y]))() == (g, [y.get_uid()]) and g._planner is planner


def test_wrong_decorators():
    with pytest.raises(GraphTypeError, match="heur_modes must be a heur_mode"):
        graphfuse.jit("A")
    with pytest.raises(GraphTypeError, match="maxsize must be an int >= 1, got 0"):
        graphfuse.graph_cache(len, 0)


def test_graph_is_no_module():
    assert callable(graphfuse.graph) and graphfuse.graph.__module__ == "graphfuse.api.building"
