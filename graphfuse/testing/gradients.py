"""Checks of gradients: rules against finite differences, and backward graphs to run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphfuseError
from graphfuse.gradients.differentiate import DIFFERENTIABLE, Differentiated, differentiate
from graphfuse.op_graph.ir import FrozenGraph, TensorId
from graphfuse.op_graph.tensor import Tensor
from graphfuse.testing import reference
from graphfuse.testing.sample_graphs import SampleGraph, sample_of

_STEP = 1e-6
_CLOSE = 1e-4


@dataclass(frozen=True, eq=False)
class GradientProblem:
    """A graph whose gradients are checked. name: description of the graph. made: forward and backward for all its
    outputs and inputs that have gradients."""

    name: str
    made: Differentiated

    @property
    def backward(self) -> SampleGraph:
        return replace(sample_of(self.made.backward), name=f"{self.name}, backward")


def problems(samples: Sequence[SampleGraph]) -> tuple[list[GradientProblem], list[str]]:
    """Problems of the samples that have gradients, and for the others the reasons why they have none."""
    found = [(sample, _differentiated(sample.recorded)) for sample in samples]
    refused = [made for _, made in found if isinstance(made, str)]
    return [GradientProblem(sample.name, made) for sample, made in found if not isinstance(made, str)], refused


def _differentiated(graph: pygraph) -> Differentiated | str:
    made = {t for node in graph.nodes for t in node.outputs.values()}
    outputs = [t for t in graph.tensors if t in made and not t.get_is_virtual() and t.get_data_type() in DIFFERENTIABLE]
    found = {t: _gradients(graph, outputs, [t]) for t in graph.tensors if t not in made}
    wrt = [t for t, gradient in found.items() if not isinstance(gradient, str)]
    return _gradients(graph, outputs, wrt) if wrt else next(iter(found.values()), f"graph {graph.name!r} reads nothing")


def _gradients(graph: pygraph, outputs: Sequence[Tensor], wrt: Sequence[Tensor]) -> Differentiated | str:
    """The graphs of gradients, or the reason why there are none."""
    try:
        return differentiate(graph, outputs, wrt)
    except GraphfuseError as error:
        return str(error)


def fault(torch, problem: GradientProblem, seed: int) -> str | None:
    """Fault of a gradient that differs from the outputs' change along a direction, in float64; None if there is
    none."""
    made = problem.made
    forward, backward = (_in_double(sample_of(graph).graph) for graph in (made.forward, made.backward))
    source = torch.Generator().manual_seed(seed)
    inputs = reference.inputs(torch, forward, seed)
    values = _by_name(forward, reference.evaluated(torch, forward, inputs, wide=True))
    given_name = {name: grad.get_name() for name, grad in made.given.items()}
    grads = {
        given_name[name]: torch.randn(values[name].shape, generator=source, dtype=torch.float64) for name in made.given
    }
    read: dict[TensorId, object] = {}
    for t in backward.tensors:
        if t.id not in backward.producer:
            known = {**values, **grads}
            read[t.id] = torch.full(t.dim, t.value, dtype=torch.float64) if t.value is not None else known[t.name]
    found = _by_name(backward, reference.evaluated(torch, backward, read, wide=True))
    for name, grad in made.gradients.items():
        (t,) = (t for t in forward.tensors if t.name == name)
        along = torch.randn(t.dim, generator=source, dtype=torch.float64)
        ends = [
            _by_name(forward, reference.evaluated(torch, forward, {**inputs, t.id: inputs[t.id] + step * along}, True))
            for step in (_STEP, -_STEP)
        ]
        changes = [(ends[0][out] - ends[1][out]) * grads[given_name[out]] / (2 * _STEP) for out in made.given]
        change, expected = float(sum(c.sum() for c in changes)), found[grad.get_name()] * along
        size = float(expected.abs().sum()) + sum(
            float((values[out] * grads[given_name[out]]).abs().sum()) for out in made.given
        )
        if abs(change - float(expected.sum())) > _CLOSE * size:
            return (
                f"{t}: along a direction outputs change by {change:.9g}, its gradient says {float(expected.sum()):.9g}"
            )
    return None


def _in_double(graph: FrozenGraph) -> FrozenGraph:
    double = data_type.DOUBLE
    tensors = tuple(replace(t, dtype=double) if t.dtype.is_float else t for t in graph.tensors)
    return replace(graph, tensors=tensors, nodes=tuple(replace(node, compute=double) for node in graph.nodes))


def _by_name(graph: FrozenGraph, values: Mapping[TensorId, object]) -> dict[str, object]:
    return {t.name: values[t.id] for t in graph.tensors if t.id in values}
