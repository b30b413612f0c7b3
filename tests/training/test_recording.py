"""Graphs of what a function calls are those of make_fx, where tensors that are given decide everything."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphfuse.torch.analysis.recording import graph_of
from graphfuse.torch.analysis.symbols import ForwardDeclined

pytestmark = pytest.mark.torch

X, W = torch.arange(12.0).reshape(3, 4), torch.full((4,), 2.0)


def normalized(x, w):
    return (torch.nn.functional.layer_norm(x.float(), (4,), w, None, 1e-5).to(x.dtype),)


def several_values(x, w):
    largest, _ = x.max(-1, keepdim=True)
    return torch.chunk(x - largest, 2, -1)


def in_place(x, w):
    y = x * w
    y.add_(1).mul_(w)
    return y, x.view(4, 3).t()


def made_anew(x, w):
    return (torch.cat([x, x.new_zeros(1, 4)]) * torch.ones_like(w),)


def calls(graph):
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])  # under a mode torch detaches what it makes of numbers
        graph.erase_node(node)
    place = {node: number for number, node in enumerate(graph.nodes)}
    return [
        (n.op, str(n.target) if n.op == "call_function" else "", [place[a] for a in n.all_input_nodes]) for n in place
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [normalized, several_values, in_place, made_anew])
def test_as_make_fx_has_it(function, mode):
    """In inference mode composite operators reach modes whole."""
    with mode():
        wanted, found = make_fx(function)(X.clone(), W).graph, graph_of(function, [X.clone(), W])
        assert calls(found) == calls(wanted)
        values = {node.name: node.meta["val"] for node in found.nodes if node.op != "output"}
        (results,) = found.output_node().args
        assert all(map(torch.equal, (values[node.name] for node in results), function(X.clone(), W)))


def test_what_is_asked_of_tensors_is_no_call():
    graph = graph_of(lambda x, w: (x + 1 if x.device.type == "cpu" and x.stride(0) == 4 else x,), [X, W])
    assert [str(n.target) for n in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)] == [
        "aten.add.Tensor"
    ]
    assert len(graph.nodes) == 4


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, w: (x if x.sum() > 0 else w,), "reads the value of a tensor"),
        (lambda x, w: (x * w.max().item(),), "reads the value of a tensor"),
        (lambda x, w: (x, torch._foreach_add_([x], 1.0))[:1], "changes a tensor in place"),
        (lambda x, w: (x * torch.ones_like(W).add_(OTHER),), "reads a tensor that is neither given nor a parameter"),
        (lambda x, w: (OTHER,), "reads a tensor that is neither given nor a parameter"),
    ],
)
def test_what_more_decides_is_declined(function, why):
    with torch.no_grad(), pytest.raises(ForwardDeclined, match=why):
        graph_of(function, [X.clone(), W])


OTHER = torch.ones(4)
