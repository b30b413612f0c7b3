"""``differentiate``: the training forward of a graph, and the backward graph that reads what forward keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.errors import GraphNotSupportedError, GraphTypeError, GraphValidationError
from graphfuse.base.wording import with_article
from graphfuse.gradients import graph_copy
from graphfuse.gradients.graph_copy import copy_of
from graphfuse.gradients.walk import Walk
from graphfuse.op_graph.graph_record import NodeRecord
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops.pullback import NoRule

DIFFERENTIABLE = (data_type.FLOAT, data_type.BFLOAT16, data_type.HALF, data_type.DOUBLE)
"""Types of tensors that have a gradient; it has the same type."""


@dataclass(frozen=True, eq=False)
class Differentiated:
    """Two validated graphs, neither built.

    forward: the graph with an additional output for each kept value that is not one already. Norms are in their
    TRAINING phase.
    backward: reads gradients and kept values, writes gradients. Each kept tensor has the same name, shape and type as
    in `forward`.
    kept: names of the inputs and outputs of `forward` that `backward` reads.
    given: by the name of an output, the tensor of `backward` that receives its gradient, called dNAME; without outputs
    that do not depend on `wrt`.
    gradients: by the name of a tensor of `wrt`, the output of `backward` that is its gradient, called dNAME.
    """

    forward: pygraph
    backward: pygraph
    kept: tuple[str, ...]
    given: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def differentiate(
    graph: pygraph,
    outputs: Sequence[Tensor | str],
    wrt: Sequence[Tensor | str],
    kept: Sequence[Tensor | str] = (),
) -> Differentiated:
    """The training forward of a graph, and the graph of its gradients, by the rules of its ops (``Op.vjp``).

    graph: validated here if it is not; it is not changed. outputs, wrt, kept: tensors of it, or their names. outputs:
    tensors whose gradients are given. wrt: tensors whose gradients are computed, each with its tensor's shape, strides
    and type. Nothing else is computed.

    Backward reads inputs of the graph, values with fewer elements than their operands (such as one per row, of a norm),
    results of products, convolutions and attention, and outputs. It does not read an output if it reads everything that
    the output is computed from, or if the output has less than 16 bits. Everything else is computed again, unrounded.
    kept: more tensors that it reads instead of computing them.

    Raises GraphNotSupportedError if a node between has no gradient, or if no output depends on a tensor of `wrt`; it
    names both. Raises GraphTypeError or GraphValidationError if a tensor is not the graph's, or its type has no
    gradient.
    """
    if not isinstance(graph, pygraph):
        raise GraphTypeError(f"differentiate: graph must be a pygraph, got {type(graph).__name__}")
    graph.validate()
    forward, copies = copy_of(graph, lambda node: {**node.attributes, **node.op.training})
    forward.validate()

    def chosen(what: str, given: Sequence[Tensor | str]) -> list[Tensor]:
        is_list = not isinstance(given, str | Tensor) and isinstance(given, Sequence)
        wrong = [t for t in given if not isinstance(t, str | Tensor)] if is_list else []
        if not is_list or wrong:
            kind = f"{type(wrong[0]).__module__}.{type(wrong[0]).__qualname__}" if wrong else ""
            got = f"a list with {with_article(kind.removeprefix('builtins.'))}" if wrong else repr(given)
            raise GraphTypeError(f"differentiate: {what} must be a list of tensors or names, got {got}")
        found = []
        for requested in given:
            fits = [copy for t, copy in copies.items() if requested is t or requested == t.get_name()]
            if len(fits) != 1:
                names = ", ".join(repr(t.get_name()) for t in copies if not t.get_is_virtual() and t.value is None)
                twice = f"has {len(fits)} times; give the tensor, or names that differ"
                has = twice if fits else f"has not; it has {names}"
                raise GraphValidationError(f"differentiate: {what} has {requested!r}, which graph {graph.name!r} {has}")
            found += fits
        return list(dict.fromkeys(found))

    made, wanted, more = chosen("outputs", outputs), chosen("wrt", wrt), chosen("kept", kept)
    if not made or not wanted:
        raise GraphTypeError(f"differentiate: {'wrt' if made else 'outputs'} is empty; accepted: one tensor or more")
    for t in (*made, *wanted):
        if t.get_data_type() not in DIFFERENTIABLE or t.get_is_pass_by_value():
            accepted = ", ".join(dtype.name for dtype in DIFFERENTIABLE)
            kind = "passed by value" if t.get_is_pass_by_value() else t.get_data_type().name
            raise GraphValidationError(f"differentiate: {t.get_name()!r} is {kind}; accepted: {accepted}, in memory")
    written = {t for node in forward.nodes for t in node.outputs.values()}
    for t in made:
        if t not in written:
            where = f"which no node of graph {graph.name!r} writes"
            raise GraphValidationError(f"differentiate: outputs has {t.get_name()!r}, {where}")
    for t in wanted:
        if t in made:
            raise GraphValidationError(f"differentiate: {t.get_name()!r} is in outputs, its gradient given, and in wrt")
    for t in more:
        if t in written and t.get_data_type() not in DIFFERENTIABLE:
            raise GraphValidationError(f"differentiate: kept has {t.get_name()!r}, which is {t.get_data_type().name}")
    built = _BackwardGraph(forward, made, wanted, frozenset(more))
    if again := built.needless():
        built = _BackwardGraph(forward, made, wanted, frozenset(more), again)
    return built.finished()


class _BackwardGraph:
    """A backward graph, and the tensors that it reads. more: tensors that are kept regardless of the rule. again:
    outputs that are not kept."""

    def __init__(
        self,
        forward: pygraph,
        outputs: Sequence[Tensor],
        wrt: Sequence[Tensor],
        more: frozenset[Tensor],
        again: frozenset[Tensor] = frozenset(),
    ):
        self.forward, self.outputs, self.wrt, self.more, self.again = forward, outputs, wrt, more, again
        self.producers = {t: node for node in forward.nodes for t in node.outputs.values()}
        self.graph = pygraph(
            f"{forward.name}_backward",
            compute_data_type=forward.compute_data_type,
            handle=forward.handle,
            intermediate_rounding="declared",  # no intermediate tensor declares a type, so nothing is rounded
        )
        self.read: dict[Tensor, Tensor] = {}
        self.given = {t: self._like(t, f"d{t.get_name()}") for t in outputs}
        self.walk = Walk(forward, self.graph, self._kept)
        self.gradients = self.walk.gradients(self.given, wrt)
        self._drop_unused()

    def needless(self) -> frozenset[Tensor]:
        """Outputs that backward reads although it also reads everything that they are computed from, except reduced
        values."""
        found = (t for t in self.read if t in self.producers and not t.get_is_virtual() and t not in self.more)
        found = (t for t in found if self.producers[t].op.may_recompute and not _is_reduced(self.producers[t], t))
        sources = self._sources()
        return frozenset(t for t in found if sources[t] <= self.read.keys() - {t})

    def _drop_unused(self) -> None:
        """Removes nodes for a gradient that was not used, such as that of a norm's statistics with respect to its
        scale."""
        live, nodes = set(self.gradients.values()), list[NodeRecord]()
        for node in reversed(self.graph.nodes):
            if not live.isdisjoint(node.outputs.values()):
                live.update(node.inputs.values(), node.outputs.values())
                nodes.insert(0, node)
        self.graph.nodes[:] = nodes
        self.graph.tensors[:] = [t for t in self.graph.tensors if t in live]
        self.read = {t: read for t, read in self.read.items() if read in live}
        self.given = {t: grad for t, grad in self.given.items() if grad in live}

    def _kept(self, t: Tensor) -> Tensor | None:
        if t not in self.read and self._is_kept(t):
            self.read[t] = graph_copy.leaf(self.graph, t)
            if t.get_is_virtual() and _is_reduced(self.producers.get(t), t):
                self.read[t].set_data_type(self.producers[t].compute)
        return self.read.get(t)

    def _is_kept(self, t: Tensor) -> bool:
        if t not in self.producers or t in self.more:
            return True
        if t in self.again:
            return False
        node = self.producers[t]
        fit = _is_reduced(node, t) if t.get_is_virtual() else t.get_data_type() in DIFFERENTIABLE
        return fit or not node.op.may_recompute

    def _sources(self) -> Mapping[Tensor, frozenset[Tensor]]:
        """Kept tensors that each node's output is computed from, by output."""
        found: dict[Tensor, frozenset[Tensor]] = {}
        for node in self.forward.nodes:
            made = [t for port, t in node.outputs.items() if port not in node.absent]
            read = [t for t in node.inputs.values() if t.value is None and not t.get_is_pass_by_value()]
            of = [frozenset((t,)) if self._is_kept(t) else found[t] for t in read]
            statistics = [t for t in made if node.op.recompute and _is_reduced(node, t)]
            found |= dict.fromkeys(made, frozenset(statistics).union(*of))
        return found

    def _like(self, t: Tensor, name: str) -> Tensor:
        """Input or output of the backward graph, with the shape and type of a tensor of forward."""
        return _without_overlap(self.graph.tensor_like(t, name).set_is_virtual(False))

    def finished(self) -> Differentiated:
        """The result, with graphs in which all tensors are named, typed and validated."""
        for t in self.wrt:
            if t not in self.gradients:
                raise GraphNotSupportedError(self._no_gradient(t))
        stored = {t: self._stored(t) for t in self.wrt}
        for t, read in self.read.items():
            if t in self.producers and t.get_is_virtual():
                t.set_output(True).set_data_type(read.get_data_type())
        self._make_names_unique()
        self._check_names()
        self.forward.validate()
        self.graph.validate()
        return Differentiated(
            self.forward,
            self.graph,
            tuple(t.get_name() for t in self.read),
            {t.get_name(): grad for t, grad in self.given.items()},
            {t.get_name(): grad for t, grad in stored.items()},
        )

    def _make_names_unique(self) -> None:
        """Renames intermediate tensors that have the name of a kept tensor, which keeps its own."""
        names = {t.get_name() for t in self.read.values()}
        for t in (t for node in self.graph.nodes for t in node.outputs.values() if t.get_is_virtual()):
            name = t.get_name()
            while name in names:
                name = f"backward::{name}"
            t.set_name(name)

    def _check_names(self) -> None:
        """Raises GraphValidationError if two tensors in memory have one name: callers find tensors of backward by
        name."""
        names = [t.get_name() for t in self.graph.tensors if t.value is None and not t.get_is_virtual()]
        for name in names:
            if names.count(name) > 1:
                raise GraphValidationError(
                    f"differentiate: two tensors of backward would be called {name!r}: what is kept has the name that "
                    f"it has in graph {self.forward.name!r}, and the gradient of NAME is called dNAME; rename one"
                )

    def _stored(self, t: Tensor) -> Tensor:
        grad = self.gradients[t]
        is_read = any(grad in node.inputs.values() for node in self.graph.nodes)
        shared = list(self.gradients.values()).count(grad) > 1
        if is_read or shared or grad in self.given.values():
            grad = self.graph.identity(grad)  # a gradient that is read must not be rounded
        grad.set_output(True).set_name(f"d{t.get_name()}").set_data_type(t.get_data_type())
        return _without_overlap(grad.set_dim(t.get_dim()).set_stride(t.get_stride()))

    def _no_gradient(self, t: Tensor) -> str:
        reached = self.walk.active({t})
        reasons = [
            f"node {node.name!r} ({node.op.name}) reads {source.get_name()!r} as {port}: {rule.reason}"
            for node in self.forward.nodes
            for port, source in node.inputs.items()
            if source in reached and isinstance(rule := node.op.rule(port), NoRule)
        ]
        names = ", ".join(repr(made.get_name()) for made in self.outputs)
        why = "".join(f"; {reason}" for reason in reasons)
        return f"differentiate: {t.get_name()!r} has no gradient, as none of outputs ({names}) changes with it{why}"


def _is_reduced(node: NodeRecord | None, t: Tensor) -> bool:
    """True if a node computes a tensor from one with more elements."""
    if node is None or node.op.moved:
        return False
    return prod(t.get_dim()) < max(prod(source.get_dim()) for source in node.inputs.values())


def _without_overlap(t: Tensor) -> Tensor:
    """The tensor, in row-major order if its elements would share addresses."""
    overlaps = any(extent > 1 and not stride for extent, stride in zip(t.get_dim(), t.get_stride(), strict=True))
    return t.set_stride(packed_stride(t.get_dim())) if overlaps else t
