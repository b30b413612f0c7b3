"""Differentiation rules of ops: for each input of a node, a rule that builds its gradient (a vector-Jacobian product).

A rule adds nodes to the backward graph. It reads the gradients of the node's outputs, and values of its inputs and
outputs, which are kept or computed again (``graphfuse.gradients``). It ignores broadcasting: a gradient with more
elements than its input is summed afterwards, and one with fewer is broadcast. A rule returns None if the outputs that
have gradients do not depend on the input.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pullback:
    """Context of a differentiated node for its rules.

    graph: the backward graph, whose op methods rules call.
    attributes: the node's, as the user gave them.
    grads: gradients of its outputs by port; each has its output's shape, or extents of 1 along which it is the same.
    requested: the input ports whose gradients are built.
    given: the input ports that are connected.
    outputs: the output ports that the node writes.
    value_of, dim_of: the value and the shape of a port.
    has_value: whether the backward graph already has the value of a port.
    expand: converts a gradient, or a number, to a tensor of a shape.
    shared: results that rules share: output port -> its gradient in full shape; function -> its result (`once`).
    """

    graph: Any
    attributes: Mapping[str, object]
    grads: Mapping[str, Any]
    requested: frozenset[str]
    given: frozenset[str]
    outputs: frozenset[str]
    value_of: Callable[[str], Any]
    dim_of: Callable[[str], Shape]
    has_value: Callable[[str], bool]
    expand: Callable[[Any, Shape], Any]
    shared: dict[Any, Any] = field(default_factory=dict)

    def __getitem__(self, port: str) -> Any:
        """Value of an input or output port: a tensor of the backward graph, or a constant's number."""
        return self.value_of(port)

    def __contains__(self, port: str) -> bool:
        return port in self.given

    def get(self, port: str) -> Any:
        """Value of an input port; None if it is not connected."""
        return self[port] if port in self else None

    @property
    def grad(self) -> Any:
        """Gradient of the only output that has one."""
        (grad,) = self.grads.values()
        return grad

    def whole(self, port: str) -> Any:
        """Gradient of an output, broadcast to the output's shape."""
        if port not in self.shared:
            self.shared[port] = self.expand(self.grads[port], self.dim_of(port))
        return self.shared[port]

    def zeros(self, dim: Shape) -> Any:
        return self.expand(0.0, dim)

    def once(self, build: Callable[["Pullback"], Any]) -> Any:
        """Result of `build`, called once for all rules of the node."""
        if build not in self.shared:
            self.shared[build] = build(self)
        return self.shared[build]

    def elements(self, port: str) -> int:
        """Number of elements of "input" that are reduced to one of an output."""
        pairs = zip(self.dim_of("input"), self.dim_of(port), strict=True)
        return math.prod(e for e, made in pairs if made == 1)


Rule = Callable[[Pullback], Any]


@dataclass(frozen=True)
class NoRule:
    """Reason why an input has no gradient.

    constant: whether the gradient is zero, because the result is piecewise constant. If not, requesting it is an error.
    """

    reason: str
    constant: bool = False


NO_SECOND = NoRule("the gradient of a gradient is not offered")
UNKNOWN = NoRule("the op table has no rule for its gradient")
JUMPS = NoRule("the result is constant but for jumps", constant=True)
NUMBERS = NoRule("row numbers have no gradient", constant=True)


def passed(p: Pullback) -> Any:
    """The gradient itself."""
    return p.grad


def negated(p: Pullback) -> Any:
    return p.graph.neg(p.grad)


def times(port: str) -> Rule:
    """The gradient times the value of a port."""
    return lambda p: p.graph.mul(p.grad, p[port])


def by_op(name: str) -> Rule:
    """Rule that calls an op of the table with the gradient, the input and the node's attributes."""
    return lambda p: getattr(p.graph, name)(p.grad, p["input"], **p.attributes)


def by_output(name: str, slope: Callable[[Pullback], Any]) -> Rule:
    """Rule that multiplies the gradient by a slope of the output, if that is at hand; else `by_op`."""
    of_input = by_op(name)
    return lambda p: p.graph.mul(p.grad, slope(p)) if p.has_value("output") else of_input(p)


def reciprocal(p: Pullback, value: Any) -> Any:
    return 1.0 / value if isinstance(value, int | float) else p.graph.reciprocal(value)


def sign(p: Pullback, value: Any) -> Any:
    """1 above 0, -1 below, else 0."""
    return p.graph.sub(p.graph.cmp_gt(value, 0.0), p.graph.cmp_lt(value, 0.0))


def larger(own: str, other: str, lost: str) -> Rule:
    """Rule of a maximum or minimum: the gradient if `own` was chosen, half of it if both are equal, as in torch.

    lost: the comparison that is true if `own` was not chosen."""

    def rule(p: Pullback) -> Any:
        half = p.graph.mul(p.grad, 0.5)
        shared = p.graph.binary_select(half, p.grad, p.graph.cmp_eq(p[own], p[other]))
        return p.graph.binary_select(0.0, shared, getattr(p.graph, lost)(p[own], p[other]))

    return rule
