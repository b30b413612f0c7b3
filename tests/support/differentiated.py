"""The two graphs of ``differentiate`` as one function of torch: forward runs the one, autograd the other."""

import types
from collections.abc import Callable, Mapping, Sequence

import torch

from graphfuse import Differentiated, data_type, heur_mode, norm_forward_phase, pygraph
from graphfuse.op_graph.tensor import Tensor
from support import graphs

DOUBLE = data_type.DOUBLE
TYPES = {**graphs.TORCH, DOUBLE: torch.float64, data_type.INT32: torch.int32, data_type.INT64: torch.int64}

Values = Mapping[str, torch.Tensor | float]


def new(device: str = "cpu", **options) -> pygraph:
    """An empty graph in which all is DOUBLE."""
    options = dict.fromkeys(("io_data_type", "intermediate_data_type", "compute_data_type"), DOUBLE) | options
    return graphs.new(device=device, **options)


def normed(**types) -> tuple[pygraph, dict]:
    """A norm with SiLU and a gate behind it; what is on the way is virtual."""
    g = graphs.new(**types)
    x, gate = (g.tensor([4, 8], name=name) for name in ("x", "gate"))
    w = g.tensor([1, 8], name="w")
    y, _ = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)
    out = g.mul(g.swish(y), gate).set_output().set_name("out")
    return g, {"x": x, "gate": gate, "w": w, "y": y, "out": out}


def built(graph: pygraph, modes: Sequence[heur_mode] = (heur_mode.FALLBACK,)) -> Callable[[Values], dict]:
    """Function from the values that a graph reads, by name, to those that it writes. Memory begins as zeros."""
    graph.build(list(modes))
    written = {t for node in graph.nodes for t in node.outputs.values()}
    made = [t for t in graph.tensors if t in written and not t.get_is_virtual()]
    read = {t.get_name() for t in graph.tensors if t not in written and t.value is None}

    def run(values: Values) -> dict[str, torch.Tensor]:
        found = {}
        for t in made:
            memory = torch.empty_strided(t.get_dim(), t.get_stride(), dtype=TYPES[t.get_data_type()])
            found[t.get_name()] = memory.zero_()
        pack = {name: value for name, value in values.items() if name in read}
        graph.execute({**pack, **found}, graphs.workspace(graph.get_workspace_size()))
        return found

    return run


def placed(values: torch.Tensor, t: Tensor) -> torch.Tensor:
    """`values` at a tensor's strides, in its type."""
    memory = torch.empty_strided(t.get_dim(), t.get_stride(), dtype=TYPES[t.get_data_type()])
    return memory.copy_(values)


def function(
    made: Differentiated, fixed: Values = types.MappingProxyType({}), modes: Sequence[heur_mode] = (heur_mode.FALLBACK,)
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Function of the tensors of `wrt`, in order, that returns `outputs`. fixed: all else that the graphs read."""
    forward, backward = built(made.forward, modes), built(made.backward, modes)
    wrt, outputs = list(made.gradients), list(made.given)

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            known = {**fixed, **dict(zip(wrt, (t.detach() for t in given), strict=True))}
            known |= forward(known)
            ctx.kept = {name: known[name] for name in made.kept}
            return tuple(known[name] for name in outputs)

        @staticmethod
        def backward(ctx, *grads):
            given = {t.get_name(): placed(g, t) for t, g in zip(made.given.values(), grads, strict=True)}
            found = backward({**fixed, **ctx.kept, **given})
            return tuple(found[made.gradients[name].get_name()] for name in wrt)

    return Both.apply


def checked(made: Differentiated, values: Values, fast: bool = False) -> None:
    """Holds the gradients against differences of forward's results. values: of all that forward reads."""
    fixed = {name: v for name, v in values.items() if name not in made.gradients}
    given = [values[name].clone().requires_grad_() for name in made.gradients]
    assert torch.autograd.gradcheck(function(made, fixed), given, fast_mode=fast, atol=1e-6, rtol=1e-4)
