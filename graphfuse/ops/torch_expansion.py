"""Computation of expansions in torch, which is the reference of ops that have one."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from graphfuse.base.errors import MalformedError
from graphfuse.ops import references
from graphfuse.ops.expansion import Join, RowArithmetic
from graphfuse.ops.op import Attributes, Op
from graphfuse.ops.reductions import REDUCTIONS
from graphfuse.ops.shapes import aligned

_FUSED = {"fma": lambda a, b, c: a * b + c, "fnma": lambda a, b, c: c - a * b}


class TorchRows(RowArithmetic):
    """Arithmetic of rows on tensors that broadcast to `like`, whose rows run along `axes`. ops: the op table."""

    def __init__(self, t, ops: Mapping[str, Op], like, axes: tuple[int, ...]):
        self.t, self.ops, self.like, self.axes = t, ops, like, axes
        self.columns = math.prod(like.shape[axis] for axis in axes)
        self.most = t.finfo(like.dtype).max

    def op(self, name: str, attributes: Mapping[str, object] = MappingProxyType({}), /, **operands):
        values = {port: self._tensor(value) for port, value in operands.items()}
        if name in _FUSED:
            return _FUSED[name](**values)
        op = self.ops.get(name)
        if op is None or not op.pointwise:
            raise MalformedError(
                f"an expansion has op {name!r}; accepted: pointwise ops of the table, {', '.join(_FUSED)}"
            )
        inputs = {port.name: values[port.name] for port in op.inputs}
        slots = {a.name: attributes.get(a.name, a.default) for a in op.attributes}
        return op.reference(self.t, inputs, slots)["output"]

    # Without axes torch would reduce all of them.

    def reduce(self, join: Join, value):
        how = {Join.SUM: self.t.sum, Join.MAX: self.t.amax}[join]
        return how(value, dim=self.axes, keepdim=True) if self.axes else value

    def mean(self, value):
        return value.mean(dim=self.axes, keepdim=True) if self.axes else value

    def power(self, value):
        return value.exp()

    def product(self, value):
        """The product of each row, which has one axis. No kernel computes it."""
        return value.prod(dim=self.axes[0], keepdim=True)

    def numbers(self):
        numbers = self.t.arange(self.columns, dtype=self.like.dtype, device=self.like.device)
        return numbers.reshape([e if axis in self.axes else 1 for axis, e in enumerate(self.like.shape)])

    def random_at_least(self, seed, offset, least):
        order = [*(axis for axis in range(self.like.dim()) if axis not in self.axes), *self.axes]
        places = self.t.arange(self.like.numel(), device=self.like.device).reshape([self.like.shape[a] for a in order])
        places = places.permute([order.index(axis) for axis in range(self.like.dim())])
        columns = max(self.columns, 1)
        drawn = references.random_uniform(self.t, seed, offset, places // columns, places % columns)
        return (drawn >= least * 2.0**-16).to(drawn.dtype)

    def _tensor(self, value):
        # A number becomes a 0-dimensional tensor: an op of two Python numbers would be in float32.
        plain = isinstance(value, int | float)
        return self.t.full((), value, dtype=self.like.dtype, device=self.like.device) if plain else value


def expanded(ops: Mapping[str, Op], op: Op, t, x, a: Attributes) -> dict[str, object]:
    """Outputs of an op's expansion by port, as from ``Op.reference``."""
    shapes = {port: tuple(value.shape) for port, value in x.items()}
    like = x["input"] if "input" in x else next(iter(x.values()))
    made = op.expansion.of(TorchRows(t, ops, like, op.expansion.columns(shapes, a)), x, a)
    written = op.infer(shapes, a, {})
    return {
        port: _summed(value, written[port]) if isinstance(value, tuple) else value
        for port, value in made.items()
        if port in written
    }


def _summed(factors: tuple[object, ...], shape: tuple[int, ...]):
    """The product of `factors`, summed to a shape."""
    product = math.prod(factors[1:], start=factors[0])
    return product.sum_to_size(aligned(shape, product.dim())).reshape(shape)


def reduction(ops: Mapping[str, Op], t, x, a: Attributes) -> dict[str, object]:
    """Output of the op ``reduction``."""
    values, how = x["input"], REDUCTIONS[a["mode"]]
    dim = [1 if axis in a["axes"] else e for axis, e in enumerate(values.shape)]
    kept = [axis for axis in range(len(dim)) if axis not in a["axes"]]
    count = math.prod(values.shape[axis] for axis in a["axes"])
    if count == 0:
        return {"output": values.new_full(dim, how.start)}
    rows = values.permute(*kept, *a["axes"]).reshape([*(dim[axis] for axis in kept), count])
    return {"output": how.of(TorchRows(t, ops, rows, (len(kept),)), rows).reshape(dim)}
