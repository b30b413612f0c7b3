"""The chain rule on graphs: from gradients of some tensors, nodes for the gradients of others.

It is independent of the graph that it builds and of the choice of kept values: ``differentiate`` and operators of torch
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from graphfuse.api import pygraph
from graphfuse.base.dtypes import SIXTEEN_BITS, data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.op_graph.freeze import infer
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import aligned
from graphfuse.ops.pullback import NoRule, Pullback

_CHOOSING = (reduction_mode.MIN, reduction_mode.MAX, reduction_mode.AMAX)
_OF_INTEGERS = NoRule("what is computed in INT32 has no gradient")

Value = Tensor | float
"""A tensor of the backward graph, or the number of a constant."""


@dataclass(eq=False)
class Walk:
    """Builds gradients of `forward`, a validated graph, in `graph`.

    kept: function that returns the tensor of `graph` with the value of a tensor of `forward`, or None to compute it
    again.
    rounds: whether recomputed values are rounded to the types that `forward` declares. Without rounding, a kept maximum
    may equal none of the recomputed values, and a kept mean may not be their mean.
    """

    forward: GraphRecord
    graph: pygraph
    kept: Callable[[Tensor], Tensor | None]
    rounds: bool = False
    _values: dict[Tensor, Value] = field(default_factory=dict)
    _drawn: dict[int, dict[object, Value]] = field(default_factory=dict)
    _inferred: int = 0

    def gradients(self, given: Mapping[Tensor, Tensor], wanted: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Gradients of the `wanted` tensors that have one, each in its tensor's shape. given: gradients, tensors of
        `graph`, by tensors of `forward`. Raises GraphNotSupportedError, naming the node, if a node on the way has no
        gradient."""
        active = self.active(wanted)
        found: dict[Tensor, Tensor] = dict(given)
        for node in reversed(self.forward.nodes):
            grads = {port: found[t] for port, t in node.outputs.items() if t in found}
            asked = frozenset(port for port, t in node.inputs.items() if t in active)
            if grads and asked:
                for t, grad in self._pulled_back(node, grads, asked):
                    found[t] = self.graph.add(found[t], grad) if t in found else grad
        return {t: self.expanded(found[t], tuple(t.get_dim())) for t in wanted if t in found}

    def value(self, t: Tensor) -> Value:
        """Value of a tensor of `forward`: kept or computed again."""
        if t not in self._values:
            found = t.value if t.value is not None else self.kept(t)
            if found is None:
                self._compute(self._producers[t], t)
                if self.rounds and t.get_data_type() in SIXTEEN_BITS:
                    self._values[t] = self.graph.identity(self._values[t]).set_data_type(t.get_data_type())
            else:
                self._values[t] = found
        return self._values[t]

    @cached_property
    def _producers(self) -> Mapping[Tensor, NodeRecord]:
        return {t: node for node in self.forward.nodes for t in node.outputs.values()}

    @cached_property
    def _chooses(self) -> bool:
        """True if a reduction chooses elements: backward compares them with the choice, so it must compute the same
        bits."""
        modes = (node.attributes.get("mode") for node in self.forward.nodes if node.op.name == "reduction")
        return any(mode in _CHOOSING for mode in modes)

    def dim(self, t: Tensor) -> tuple[int, ...]:
        """Shape of a tensor of `graph`, inferred from the nodes built so far."""
        new = self.graph.nodes[self._inferred :]
        self._inferred = len(self.graph.nodes)
        for node in new:
            for made in node.outputs.values():
                # Intermediate tensors are not rounded, and sums stay DOUBLE if everything is computed in DOUBLE.
                if made.get_is_virtual() and made.get_data_type() is data_type.NOT_SET:
                    made.set_data_type(node.compute)
            infer(self.graph, node)
        return tuple(t.get_dim())

    def expanded(self, grad: Value, dim: tuple[int, ...]) -> Tensor:
        """A gradient, expanded to a shape along whose other axes it is constant."""
        if isinstance(grad, Tensor) and self.dim(grad) == dim:
            return grad
        if not isinstance(grad, Tensor):
            ones = (1,) * len(dim)
            grad = self.graph.tensor_scalar(grad, self.graph.compute_data_type).set_dim(ones).set_stride(ones)
        return self.graph.expand(grad).set_dim(dim)

    def active(self, wanted: Collection[Tensor]) -> set[Tensor]:
        """`wanted`, and all tensors that depend on it differentiably."""
        active = set(wanted)
        for node in self.forward.nodes:
            reached = [port for port, t in node.inputs.items() if t in active]
            if any(not _is_constant(node.op.rule(port)) for port in reached):
                active.update(node.outputs.values())
        return active

    def _pulled_back(
        self, node: NodeRecord, grads: Mapping[str, Tensor], asked: frozenset[str]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients of the requested inputs of a node."""
        pullback = self._pullback(node, grads, asked)
        (made, *_) = (tuple(node.outputs[port].get_dim()) for port in grads)
        for port, t in node.inputs.items():
            rule = node.op.rule(port) if node.compute is not data_type.INT32 else _OF_INTEGERS
            if port not in asked or _is_constant(rule):
                continue
            with self._computing_in(node.compute):
                grad = rule if isinstance(rule, NoRule) else rule(pullback)
                if isinstance(grad, NoRule):
                    raise GraphNotSupportedError(
                        f"node {node.name!r} ({node.op.name}): no gradient of {port} ({t.get_name()!r}): {grad.reason}"
                    )
                if grad is None:
                    continue
                yield t, self._summed(grad, tuple(t.get_dim()), made if node.op.pointwise else ())

    def _pullback(self, node: NodeRecord, grads: Mapping[str, Tensor], asked: frozenset[str]) -> Pullback:
        tensors = {**node.inputs, **node.outputs}
        return Pullback(
            graph=self.graph,
            attributes=node.attributes,
            grads=grads,
            requested=asked,
            given=frozenset(node.inputs),
            outputs=frozenset(node.outputs) - node.absent,
            value_of=lambda port: self.value(tensors[port]),
            dim_of=lambda port: tuple(tensors[port].get_dim()),
            has_value=lambda port: tensors[port] in self._values,
            expand=self.expanded,
            shared=self._drawn.setdefault(id(node), {}),
        )

    def _summed(self, grad: Tensor, dim: tuple[int, ...], made: tuple[int, ...]) -> Tensor:
        """Gradient of an input of this shape, summed along axes where the input was broadcast. made: the shape of a
        pointwise node's output; `grad` is constant along its axes if it has extent 1 there."""
        has = self.dim(grad)
        target, wide = aligned(dim, len(has)), aligned(made, len(has)) if made else has
        if any(t == 1 and h != 1 for t, h in zip(target, has, strict=True)):
            kept = tuple(1 if t == 1 else h for t, h in zip(target, has, strict=True))
            grad = self.graph.reduction(grad, mode=reduction_mode.ADD).set_dim(kept)
        times = prod(w for t, h, w in zip(target, has, wide, strict=True) if t == h == 1)
        if times != 1:
            grad = self.graph.mul(grad, float(times))
        return grad if len(dim) == len(has) else self.graph.reshape(self.expanded(grad, target)).set_dim(dim)

    def _compute(self, node: NodeRecord, t: Tensor) -> None:
        """Adds a copy of a node to `graph`, or only the nodes that `t` requires."""
        with self._computing_in(node.compute):
            (port,) = (port for port, made in node.outputs.items() if made is t)
            if port in node.op.recompute and not (node.op.pointwise and self._chooses):
                self._values[t] = node.op.recompute[port](self._pullback(node, {}, frozenset()))
                return
            inputs = {port: self.value(made) for port, made in node.inputs.items()}
            getattr(self.graph, node.op.name)(**inputs, **node.attributes)
        again = self.graph.nodes[-1]
        for port, made in again.outputs.items():
            if port not in again.absent:
                self._values.setdefault(node.outputs[port], made.set_dim(node.outputs[port].get_dim()))

    @contextmanager
    def _computing_in(self, compute: data_type) -> Iterator[None]:
        before = self.graph.compute_data_type
        self.graph.compute_data_type = compute
        try:
            yield
        finally:
            self.graph.compute_data_type = before


def _is_constant(rule: object) -> bool:
    return isinstance(rule, NoRule) and rule.constant
