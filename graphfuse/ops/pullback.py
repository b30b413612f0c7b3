"""How ops are differentiated: for each input of a node, a rule that draws its gradient (a vector-Jacobian product).

A rule draws nodes of the backward graph. It reads the gradients of the node's outputs, and values of its inputs and
outputs, which are kept or computed again (``graphfuse.gradients``). It knows nothing of broadcasting: a gradient that
it draws may have more elements than its input, and is summed then, or fewer, and is the same along those axes. It is
None where the outputs that have gradients do not change with the input.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pullback:
    """A node that is differentiated, as its rules see it.

    graph: the backward graph, whose op methods rules call.
    attributes: the node's, as the user gave them.
    grads: gradients of its outputs by port; each has its output's shape, or extents of 1 where it is the same.
    asked: the input ports whose gradients are drawn.
    given: the input ports that are connected.
    outputs: the output ports that the node writes.
    value_of, dim_of: the value and the shape of a port.
    at_hand: whether a port has a value that was drawn before.
    expand: makes a gradient, or a number, a tensor of a shape.
    drawn: what rules drew once for all of them: by the output, its gradient in whole; by a function, what it drew.
    """

    graph: Any
    attributes: Mapping[str, object]
    grads: Mapping[str, Any]
    asked: frozenset[str]
    given: frozenset[str]
    outputs: frozenset[str]
    value_of: Callable[[str], Any]
    dim_of: Callable[[str], Shape]
    at_hand: Callable[[str], bool]
    expand: Callable[[Any, Shape], Any]
    drawn: dict[Any, Any] = field(default_factory=dict)

    def __getitem__(self, port: str) -> Any:
        """Value of an input or output port: a tensor of the backward graph, or the number that a constant has."""
        return self.value_of(port)

    def __contains__(self, port: str) -> bool:
        return port in self.given

    def get(self, port: str) -> Any:
        """Value of an input port; None where it is not connected."""
        return self[port] if port in self else None

    @property
    def grad(self) -> Any:
        """Gradient of the only output that has one."""
        (grad,) = self.grads.values()
        return grad

    def whole(self, port: str) -> Any:
        """Gradient of an output in that output's shape."""
        if port not in self.drawn:
            self.drawn[port] = self.expand(self.grads[port], self.dim_of(port))
        return self.drawn[port]

    def zeros(self, dim: Shape) -> Any:
        return self.expand(0.0, dim)

    def once(self, draw: Callable[["Pullback"], Any]) -> Any:
        """Value that `draw` draws, once for all rules of the node."""
        if draw not in self.drawn:
            self.drawn[draw] = draw(self)
        return self.drawn[draw]

    def elements(self, port: str) -> int:
        """Number of elements of "input" that one of an output is made of."""
        pairs = zip(self.dim_of("input"), self.dim_of(port), strict=True)
        return math.prod(e for e, made in pairs if made == 1)


Rule = Callable[[Pullback], Any]


@dataclass(frozen=True)
class NoRule:
    """A reason for which nothing is differentiated along an input.

    constant: the result does not change with the input, but in jumps: its gradient is zero. Else asking for it is an
    error.
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
    """An op of the table that makes the gradient of loss and input, with the attributes of the node."""
    return lambda p: getattr(p.graph, name)(p.grad, p["input"], **p.attributes)


def by_output(name: str, slope: Callable[[Pullback], Any]) -> Rule:
    """`by_op`, or the gradient times a slope that is made of the output, where that is at hand."""
    of_input = by_op(name)
    return lambda p: p.graph.mul(p.grad, slope(p)) if p.at_hand("output") else of_input(p)


def reciprocal(p: Pullback, value: Any) -> Any:
    return 1.0 / value if isinstance(value, int | float) else p.graph.reciprocal(value)


def sign(p: Pullback, value: Any) -> Any:
    """1, -1, or 0 of 0."""
    return p.graph.sub(p.graph.cmp_gt(value, 0.0), p.graph.cmp_lt(value, 0.0))


def larger(own: str, other: str, lost: str) -> Rule:
    """The gradient where `own` was chosen, half of it where both are equal, as torch has it. lost: the comparison that
    says that `own` was not."""

    def rule(p: Pullback) -> Any:
        half = p.graph.mul(p.grad, 0.5)
        shared = p.graph.binary_select(half, p.grad, p.graph.cmp_eq(p[own], p[other]))
        return p.graph.binary_select(0.0, shared, getattr(p.graph, lost)(p[own], p[other]))

    return rule
