"""Roles of nodes that compute: pointwise ops, norms and similar ops, reductions, quantization, rotation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.op_graph.ir import FrozenGraph, Node, TensorId
from graphfuse.ops import EXPANSIONS, OPS, REDUCTIONS, Expansion, quantize_axis
from graphfuse.patterns.axes import Axes
from graphfuse.patterns.role import PartialMatch, Role
from graphfuse.patterns.values import Values, Written
from graphfuse.rows.pairs import EachPair, Pairs
from graphfuse.rows.program import SWAP
from graphfuse.rows.steps import Column, Operand, Step

MOST_NORMS = 4
"""Largest number of consecutive norms in a kernel. Each adds a phase, in which rows that do not fit registers are
read and computed again."""


def _of_type(node: Node) -> str:
    return f"computes in {node.compute.name}; accepted: FLOAT"


def _not_whole(matched: PartialMatch, node: Node) -> str:
    return f"reads {matched.graph.tensors[node.input('input')]}, which has not all {matched.axes}"


def _too_early(matched: PartialMatch, t: TensorId) -> str:
    return f"needs {matched.graph.tensors[t]}, which is not known before all rows are done"


class Computing(Role):
    """A node whose inputs broadcast to the rows."""

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        axes, graph = matched.axes, matched.graph
        if node.compute is not data_type.FLOAT:
            return _of_type(node)
        for t in (t for _, t in node.inputs):
            if not axes.fits(t):
                return f"reads {graph.tensors[t]}, which does not broadcast to {axes}"
            if matched.ended(t):
                return _too_early(matched, t)
            if axes.shared(t) and t not in graph.producer:
                return f"reads {graph.tensors[t]} from memory, one value a part of a row"
        for t in (t for _, t in node.outputs):
            if matched.readers(t) and self.ends(axes, node, t):
                return f"makes {graph.tensors[t]} of all rows, before they can go on"
        return self.unfit(matched, node)

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        """Reason why a node may not join, apart from those that hold for all computing nodes; None if it may."""
        raise NotImplementedError

    def accepts(self, node: Node, t: TensorId, move: Role, regular: bool) -> bool:
        return regular


class Pointwise(Computing):
    """A node whose output elements depend on one element of each input."""

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes, output = matched.axes, node.output("output")
        if not axes.fits(output) or axes.repeated(output):
            return f"makes {matched.graph.tensors[output]}, which does not broadcast to {axes}"
        # Each row can compute a value that is the same for all rows, but no single row can write it.
        dim = axes.tensor(output).dim
        varies = any(dim[axis] != 1 for axis in axes.axes) or all(axes.dim[axis] == 1 for axis in axes.axes)
        same = f"makes {matched.graph.tensors[output]}, the same for all rows, of which none writes it"
        return None if varies or matched.kept(output) else same

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        operands = tuple((port, values.operand(t)) for port, t in node.inputs)
        output = node.output("output")
        values.values[output] = values.step(Step(node.op_name, operands, node.attributes, values.rounded(output)))


class Reshaping(Pointwise):
    """A reshape that divides rows into parts, with an axis of their own, or merges the parts again."""

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes, x, output = matched.axes, node.input("input"), node.output("output")
        is_of_parts = axes.has_part_axis(x) is not axes.has_part_axis(output)
        if is_of_parts and axes.tensor(x).dim == axes.tensor(output).dim:
            return super().unfit(matched, node)
        return "does not divide rows along the last axis into parts"

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        x, output = node.input("input"), node.output("output")
        value, rounded = values.operand(x), values.rounded(output)
        if rounded is not None or output in values.subgraph.outputs:
            value = values.step(Step("identity", (("input", value),), (), rounded))
        values.values[output] = value


class Numbering(Pointwise):
    """A node that returns the column number of each element."""

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes, x = matched.axes, node.input("input")
        axis = node.attribute("axis") - len(axes.graph.tensors[x].dim) + len(axes.dim)
        if axes.has_part_axis(x) or axes.columns != (axis,):
            return f"numbers elements along axis {axis}, and not the columns of {axes}"
        return super().unfit(matched, node)

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        output = node.output("output")
        values.values[output] = values.step(Step("identity", (("input", Column()),), (), values.rounded(output)))


@dataclass(frozen=True)
class NodeOperands:
    """Operands of a node by input port, read from memory in the order in which the op's expansion uses them."""

    expansion: Expansion
    values: Values
    node: Node

    def __getitem__(self, port: str) -> Operand:
        return self.values.operand(self.node.input(port), in_memory=port not in self.expansion.scalars)

    def __contains__(self, port: object) -> bool:
        return port in dict(self.node.inputs)


@dataclass(frozen=True)
class Expanding(Computing):
    """A node of an op with an expansion: a norm, a softmax, a loss, or a gradient of one."""

    expansion: Expansion
    starts = True

    def columns(self, graph: FrozenGraph, node: Node, dim: tuple[int, ...]) -> tuple[int, ...]:
        shapes = {port: graph.tensors[t].dim for port, t in node.inputs}
        return self.expansion.columns(shapes, dict(node.attributes))

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes = matched.axes
        if sum(matched.role(axes.graph.nodes[i]).expansion is not None for i in matched.inside) >= MOST_NORMS:
            return f"is a norm or softmax more than the {MOST_NORMS} that a kernel has"
        own = self.axes(axes.graph, node)
        if self._part(axes, node) > 0 or own == axes:
            return None
        if own is None or str(own) != str(axes):
            return f"works on {own}, and they on {axes}"
        if own.sums:
            return "makes gradients of a norm and sums over all rows, which no kernel computes with a norm or softmax"
        return "is a norm or softmax, which no kernel computes with gradients of a norm and sums over all rows"

    def _part(self, axes: Axes, node: Node) -> int:
        """Columns of a part, if the node reduces parts of rows; 0 if it reduces rows."""
        _, x = next((one for one in node.inputs if one[0] == "input"), node.inputs[0])
        last = len(axes.graph.tensors[x].dim) - 1
        numbered = self.expansion.of_rows or any(port.over_rows for port in node.op.outputs)
        return 0 if numbered or self.columns(axes.graph, node, axes.graph.tensors[x].dim) != (last,) else axes.part(x)

    def reduces(self, axes: Axes, node: Node) -> bool:
        return True

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        operands = NodeOperands(self.expansion, values, node)
        with values.of_parts(self._part(matched.axes, node)):
            made = self.expansion.of(values, operands, dict(node.attributes))
        for port, value in made.items():
            t = node.output(port)
            if isinstance(value, tuple) and t in values.subgraph.outputs:
                values.sums.append((t, value))
                if any(matched.axes.tensor(t).dim[axis] != 1 for axis in matched.axes.axes):
                    what = f"{matched.graph.tensors[t]} is a sum over the rows of each sample"
                    values.refuse(f"{what}; accepted: one over all rows")
            elif t is not None and not isinstance(value, tuple):
                values.make(t, value)


class RandomExpanding(Expanding):
    """A node that computes each element separately, with a random number for it."""

    alone = True

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes, dim = matched.axes, matched.graph.tensors[node.input("input")].dim
        of_all = dim == axes.dim and self.columns(axes.graph, node, dim) == axes.columns
        return None if of_all else f"generates a number for each element of {list(dim)}, and they work on {axes}"

    def reduces(self, axes: Axes, node: Node) -> bool:
        return False


class Reducing(Computing):
    """A reduction of each row or of its parts, a sum over all rows, or the largest magnitude of a tensor."""

    starts = True

    def columns(self, graph: FrozenGraph, node: Node, dim: tuple[int, ...]) -> tuple[int, ...] | None:
        """The reduced axes; None if several axes are reduced to one number, or if there are no columns.

        Axes of extent 1 count as rows. If all reduced axes have extent 1, the last of them is the columns."""
        axes = node.attribute("axes")
        columns = tuple(axis for axis in axes if dim[axis] != 1) or axes[-1:]
        rows = [axis for axis, extent in enumerate(dim) if axis not in columns and extent != 1]
        known = (rows or len(columns) == 1) and all(dim[axis] for axis in columns)
        return columns if known and columns and REDUCTIONS[node.attribute("mode")].in_rows else None

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        axes, mode, made = matched.axes, node.attribute("mode"), matched.graph.tensors[node.output("output")]
        if not axes.whole(node.input("input")) and not self._reduces_parts(axes, node):
            return _not_whole(matched, node)
        if self.reduces(axes, node) or self._reduces_parts(axes, node):
            return None if REDUCTIONS[mode].in_rows else f"reduces rows by {mode.name}, which no kernel does"
        if self._adds_rows(axes, node) or mode is reduction_mode.AMAX and all(e == 1 for e in made.dim):
            return None
        return (
            f"reduces {list(axes.dim)} to {list(made.dim)}; of {axes} a kernel makes one value each, or sums over all"
        )

    def reduces(self, axes: Axes, node: Node) -> bool:
        return axes.graph.tensors[node.output("output")].dim == axes.per_row

    def _reduces_parts(self, axes: Axes, node: Node) -> bool:
        """True if a node reduces each part of each row to one value."""
        x, made = node.input("input"), axes.graph.tensors[node.output("output")].dim
        return axes.part(x) > 0 and made == (*axes.graph.tensors[x].dim[:-1], 1)

    def _adds_rows(self, axes: Axes, node: Node) -> bool:
        """True if a node sums each column over all rows."""
        is_sum = node.attribute("mode") is reduction_mode.ADD
        return is_sum and axes.graph.tensors[node.output("output")].dim == axes.per_column

    def ends(self, axes: Axes, node: Node, t: TensorId) -> bool:
        return not self.reduces(axes, node) and not self._reduces_parts(axes, node)

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        x, output = node.input("input"), node.output("output")
        part = matched.axes.part(x)
        if self.reduces(matched.axes, node) or part:
            with values.of_parts(part):
                values.make(output, REDUCTIONS[node.attribute("mode")].of(values, values.operand(x, in_memory=True)))
        elif self._adds_rows(matched.axes, node):
            values.sums.append((output, (values.operand(x, in_memory=True),)))
        else:
            values.stores.append(Written(output, values.chain(x), amax=True))


class Quantizing(Computing):
    """A quantization in blocks along the columns."""

    starts = alone = final = True

    def columns(self, graph: FrozenGraph, node: Node, dim: tuple[int, ...]) -> tuple[int, ...]:
        return (node.attribute("axis"),)

    def unfit(self, matched: PartialMatch, node: Node) -> str | None:
        return None if matched.axes.whole(node.input("input")) else _not_whole(matched, node)

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        axes, axis = matched.axes, quantize_axis(matched.axes.dim, dict(node.attributes))
        if axis not in axes.columns[-1:]:
            columns = list(axes.columns)
            values.refuse(f"{node} quantizes along axis {axis}, not along the last normalized axis of {columns}")
        y, scale, value = node.output("Y"), node.output("scale"), values.chain(node.input("input"))
        size = node.attribute("block_size")
        if y in values.subgraph.outputs:
            values.stores.append(Written(y, value, size, scale))
        else:  # only the scales are used
            values.stores.append(Written(scale, value, size, scales_of=node.attribute("element_type")))


class Turning(Role):
    """A rotation of pairs of columns by a right angle."""

    starts = alone = True

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        axes, x = matched.axes, node.input("input")
        if node.compute is not data_type.FLOAT:
            return _of_type(node)
        if not axes.last or not axes.has_all(x):
            return _not_whole(matched, node)
        if not axes.has_rows(node.output("output")):
            return f"makes {axes.graph.tensors[node.output('output')]}, of which one stride does not serve whole rows"
        return _too_early(matched, x) if matched.ended(x) else None

    def accepts(self, node: Node, t: TensorId, move: Role, regular: bool) -> bool:
        return regular

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        # Interleaved pairs are the same in parts as in rows.
        part = 0 if node.attribute("interleaved") else self.part(matched.axes, node)
        pairs = Pairs((part or matched.axes.width) // 2, node.attribute("interleaved"), part)
        values.make(node.output("output"), self.swapped(values, node, pairs))

    @staticmethod
    def part(axes: Axes, node: Node) -> int:
        """Columns of a part, if parts have the pairs; 0 if whole rows do."""
        found = axes.part(node.input("input"))
        return found if found < axes.width else 0

    @staticmethod
    def swapped(values: Values, node: Node, pairs: Pairs) -> Operand:
        x = values.operand(node.input("input"), in_memory=True)
        return values.op(SWAP, asdict(pairs), input=x)


class Rotating(Turning):
    """A rotation of pairs of columns. Moves may choose the rows of its cosines and sines."""

    def why_not(self, matched: PartialMatch, node: Node) -> str | None:
        made = [n for port in ("cos", "sin") if (n := matched.made_by(node.input(port))) is not None]
        if not all(matched.role(n).narrows for n in made):
            return f"reads cosines and sines that {made[0]} computes"
        cos, axes = node.input("cos"), matched.axes
        if axes.has_part_axis(node.input("input")) and not axes.of_all_parts(cos):
            return f"reads {axes.graph.tensors[cos]}, which has other columns for each part of a row"
        return super().why_not(matched, node)

    def accepts(self, node: Node, t: TensorId, move: Role, regular: bool) -> bool:
        return regular if t == node.input("input") else move.narrows

    def compute(self, values: Values, matched: PartialMatch, node: Node) -> None:
        count, part = values.graph.tensors[node.input("cos")].dim[-1], self.part(matched.axes, node)
        pairs = Pairs(count, node.attribute("interleaved"), part)
        cos = values.pair(node.input("cos"), EachPair(pairs, 1.0))
        sin = values.pair(node.input("sin"), EachPair(pairs, 0.0))
        other, x = self.swapped(values, node, pairs), values.operand(node.input("input"), in_memory=True)
        how = "fnma" if node.attribute("inverse") else "fma"
        values.make(node.output("output"), values.op(how, a=other, b=sin, c=values.op("mul", a=x, b=cos)))


COMPUTING: Mapping[str, Role] = {
    **{name: Pointwise() for name, op in OPS.items() if op.pointwise},
    **{name: (RandomExpanding if e.is_random else Expanding)(e) for name, e in EXPANSIONS.items()},
    "block_scale_quantize": Quantizing(),
    "gen_index": Numbering(),
    "reduction": Reducing(),
    "reshape": Reshaping(),
    "rotate_pairs": Rotating(),
    "turn_pairs": Turning(),
}
