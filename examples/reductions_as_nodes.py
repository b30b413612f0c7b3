"""Layer norm and softmax, written with the nodes that cuDNN's graphs have for them: one kernel each.

Any reductions of the same rows fuse, and all that is pointwise around them. An RMSNorm written so is the kernel of
``graph.rmsnorm``, to the last bit.
"""

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode

ROWS, COLUMNS, EPS = 64, 1000, 1e-5


def over_row(graph, x, mode):
    """One value a row: its dim is 1 where x is reduced."""
    return graph.reduction(x, mode=mode).set_dim([ROWS, 1])


def layer_norm(graph, x, w, b):
    apart = graph.sub(x, over_row(graph, x, reduction_mode.AVG))
    variance = over_row(graph, graph.mul(apart, apart), reduction_mode.AVG)
    normal = graph.mul(apart, graph.rsqrt(graph.add(variance, EPS)))
    return graph.add(graph.mul(normal, w), b)


def softmax(graph, x, w, b):
    powers = graph.exp(graph.sub(x, over_row(graph, x, reduction_mode.MAX)))
    return graph.div(powers, over_row(graph, powers, reduction_mode.ADD))


def rms_norm(graph, x, w, b):
    mean = over_row(graph, graph.mul(x, x), reduction_mode.AVG)
    return graph.mul(graph.mul(x, graph.rsqrt(graph.add(mean, EPS))), w)


def rms_norm_node(graph, x, w, b):
    return graph.rmsnorm(x, w, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]


NODES = {
    layer_norm: ("xwb", lambda x, w, b: torch.nn.functional.layer_norm(x, (COLUMNS,), w[0], b[0], EPS)),
    softmax: ("x", lambda x, w, b: x.softmax(1)),
    rms_norm: ("xw", lambda x, w, b: torch.nn.functional.rms_norm(x, (COLUMNS,), w[0], EPS)),
    rms_norm_node: ("xw", lambda x, w, b: torch.nn.functional.rms_norm(x, (COLUMNS,), w[0], EPS)),
}
"""What each reads, and what it computes."""


def run(nodes, given: dict[str, torch.Tensor]) -> torch.Tensor:
    graph = graphfuse.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    tensors = {name: graph.tensor_like(t, name=name) for name, t in given.items()}
    y = nodes(graph, *tensors.values()).set_output()
    graph.build([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    out = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=given["x"].device)
    names, _ = NODES[nodes]
    graph.execute({tensors[name]: given[name] for name in names} | {y: out})
    print(f"{nodes.__name__}: {graph.get_plan_name_at_index(0)}")
    return out


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {"x": (ROWS, COLUMNS), "w": (1, COLUMNS), "b": (1, COLUMNS)}
    given = {name: torch.randn(shape, device=device).bfloat16() for name, shape in shapes.items()}
    results = {nodes: run(nodes, given) for nodes in NODES}
    for nodes, (_, of) in NODES.items():
        exact = of(*(t.double() for t in given.values()))
        torch.testing.assert_close(results[nodes].double(), exact, rtol=2.0**-8, atol=2.0**-9)
    same = torch.equal(results[rms_norm], results[rms_norm_node])
    print(f"all agree with float64; the two spellings of RMSNorm have the same bytes: {same}")
    if device == "cuda" and not same:
        raise SystemExit("they do not")


if __name__ == "__main__":
    main()
