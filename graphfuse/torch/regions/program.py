"""The op graph of a region as data: for tensors of any number of rows, and for any process."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import norm_forward_phase, reduction_mode
from graphfuse.base.errors import SerializedError
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.op_graph.freeze import infer
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.tensor import Tensor
from graphfuse.ops import OPS

Source = str | int | float
"""What a step reads: an input by name, a step by "@" and its number, or a number."""

_ENUMS = {"mode": reduction_mode, "norm_forward_phase": norm_forward_phase}


@dataclass(frozen=True)
class RowExtents:
    """The shape of a tensor, by that of the rows: for each axis "n" for their extent, "1" for 1, "-" where the tensor
    has no such axis."""

    axes: str

    def of(self, rows: Shape) -> Shape:
        """The shape, where the rows have this one, of which leading axes may be joined."""
        return tuple(
            n if kind == "n" else 1 for kind, n in zip(self.joined(len(rows)), rows, strict=True) if kind != "-"
        )

    def joined(self, rank: int) -> str:
        """Axes where leading ones are joined, so that there are `rank`."""
        return self.axes[:1] + self.axes[1 + len(self.axes) - rank :] if rank < len(self.axes) else self.axes

    @property
    def whole(self) -> bool:
        return set(self.axes) == {"n"}

    @property
    def is_odd(self) -> bool:
        """True for some axes of rows and not for others, as of what is the same for all rows of a sample."""
        return len(set(self.axes[:-1])) > 1

    @property
    def is_vector(self) -> bool:
        """True for a value of each column, the same in all rows."""
        return set(self.axes[:-1]) <= {"-", "1"} and self.axes[-1] == "n"

    @property
    def is_split(self) -> bool:
        """True if an axis is missing between others, or more than the last behind them."""
        return "-" in self.axes.removesuffix("-").lstrip("-")

    @property
    def without_columns(self) -> bool:
        """True if the last axis is missing, and not one before it."""
        return self.axes.endswith("-") and self.axes.strip("-") != ""


@dataclass(frozen=True)
class RegionInput:
    """An input. dtype: name of its data type."""

    name: str
    axes: str
    dtype: str

    @property
    def extents(self) -> RowExtents:
        return RowExtents(self.axes)


@dataclass(frozen=True)
class ProgramStep:
    """A node: an op of the table, what it reads by port, its attributes, and the type that its first output is rounded
    to, "" for none."""

    op: str
    inputs: Mapping[str, Source]
    attributes: Mapping[str, object] = field(default_factory=dict)
    dtype: str = ""


@dataclass(frozen=True)
class Result:
    """An output: the step that makes it."""

    step: int
    axes: str
    dtype: str

    @property
    def name(self) -> str:
        return f"out{self.step}"

    @property
    def extents(self) -> RowExtents:
        return RowExtents(self.axes)


@dataclass(frozen=True)
class Program:
    """Steps in order. The last axis has the columns, the others rows. follows: whether outputs that have all of these
    lie in memory as the first input does, not row after row."""

    inputs: tuple[RegionInput, ...]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[Result, ...]
    follows: bool = False

    @cached_property
    def text(self) -> str:
        """JSON, the same for equal programs."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @property
    def operations(self) -> str:
        """Names of its ops, as reports say them."""
        names = (step.op if step.op != "identity" else f"cast to {step.dtype or 'FLOAT'}" for step in self.steps)
        return ", ".join(dict.fromkeys(names))

    @staticmethod
    def read(text: str) -> Program:
        """The program of a text. SerializedError, which names what is wrong, for one that is none."""
        try:
            made = json.loads(text)
            inputs = tuple(RegionInput(**one) for one in made["inputs"])
            steps = tuple(ProgramStep(**one) for one in made["steps"])
            outputs = tuple(Result(**one) for one in made["outputs"])
            program = Program(inputs, steps, outputs, made.get("follows", False))
        except (ValueError, TypeError, KeyError) as error:
            raise SerializedError(f"the graph of a region is damaged: {type(error).__name__}: {error}") from None
        if (why := program._fault()) is not None:
            raise SerializedError(f"the graph of a region is damaged: {why}")
        return program

    def _fault(self) -> str | None:
        """The first thing that is wrong; None for a program that can be drawn."""
        if not self.inputs:
            return "it has no inputs"
        names = [f"in{n}" for n in range(len(self.inputs))]  # parts of generated code
        if [one.name for one in self.inputs] != names:
            return f"its inputs are {[one.name for one in self.inputs]}; accepted: {', '.join(names)}"
        rank = len(self.inputs[0].axes)
        for one in (*self.inputs, *self.outputs):
            if len(one.axes) != rank or not set(one.axes) <= set("n1-"):
                return f"{one.name} has axes {one.axes!r}; accepted: {rank} of n, 1 and -"
            if one.dtype not in data_type.__members__:
                return f"{one.name} has data type {one.dtype!r}, which is none"
        known: set[Source] = {one.name for one in self.inputs}
        for number, step in enumerate(self.steps):
            if (why := _fault_of(step, known)) is not None:
                return f"step {number}: {why}"
            known.add(f"@{number}")
        made = [one.step for one in self.outputs]
        if not made or any(f"@{n}" not in known for n in made) or len({*made}) != len(made):
            return f"its outputs are of steps {made}; accepted: different ones of {len(self.steps)}"
        return None

    @staticmethod
    def empty() -> pygraph:
        """A graph to draw steps into."""
        return pygraph(
            "region",
            intermediate_data_type=data_type.FLOAT,
            compute_data_type=data_type.FLOAT,
            intermediate_rounding="declared",
        )

    def graph(
        self, dims: Sequence[Shape], strides: Sequence[Shape] = (), training: bool = False
    ) -> tuple[pygraph, dict[str, Tensor], list[Tensor]]:
        """A graph of its own, its inputs by name, and what its steps make. dims, strides: of inputs, all of one rank;
        without strides rows lie one after the other."""
        graph = self.empty()
        strides = strides or [*map(packed_stride, dims)]
        given = {
            one.name: graph.tensor(dim, stride, data_type[one.dtype], name=one.name)
            for one, dim, stride in zip(self.inputs, dims, strides, strict=True)
        }
        made = self.draw(graph, given, training)
        for one in self.outputs:
            made[one.step].set_output().set_data_type(data_type[one.dtype])
            if self.follows and one.extents.whole:
                made[one.step].set_stride(strides[0])
        return graph, given, made

    def draw(self, graph: pygraph, given: Mapping[str, Tensor], training: bool = False) -> list[Tensor]:
        """The tensors that steps make, drawn into a graph. given: its tensors for the inputs, all of one rank.
        training: whether norms make what their gradients need."""
        made: list[Tensor] = []
        for number, step in enumerate(self.steps):
            op = OPS[step.op]
            attributes = {name: _ENUMS[name][v] if name in _ENUMS else v for name, v in step.attributes.items()}
            inputs = {port: self._read(source, given, made) for port, source in step.inputs.items()}
            attributes |= op.training if training else {}
            getattr(graph, step.op)(**inputs, **attributes, name=f"s{number}")
            node = graph.nodes[-1]
            out = node.outputs[op.outputs[0].name]
            if step.op == "reduction":
                out.set_dim((*node.inputs["input"].get_dim()[:-1], 1))
            if step.dtype:
                out.set_data_type(data_type[step.dtype])
            infer(graph, node)  # for reductions that read it
            made.append(out)
        return made

    def _read(self, source: Source, given: Mapping[str, Tensor], made: list[Tensor]) -> Tensor | float:
        if isinstance(source, str):
            return made[int(source[1:])] if source.startswith("@") else given[source]
        return source


def _fault_of(step: ProgramStep, known: Collection[Source]) -> str | None:
    """Fault of a step, of which these sources are known; None for one without."""
    op = OPS.get(step.op)
    if op is None:
        return f"op {step.op!r}, which the op table lacks"
    ports, attributes = {port.name for port in op.inputs}, {a.name for a in op.attributes}
    if others := [*(step.inputs.keys() - ports), *(step.attributes.keys() - attributes)]:
        return f"{step.op} is given {', '.join(others)}; accepted: {', '.join((*sorted(ports), *sorted(attributes)))}"
    if lacking := [port.name for port in op.inputs if not port.optional and port.name not in step.inputs]:
        return f"{step.op} lacks {', '.join(lacking)}"
    for port, source in step.inputs.items():
        is_number = isinstance(source, int | float) and not isinstance(source, bool)
        if not is_number and source not in known:
            return f"{step.op} reads {source!r} as {port}, which nothing before it makes"
    for name, value in step.attributes.items():
        if name in _ENUMS and value not in _ENUMS[name].__members__:
            return f"{step.op} has {name} {value!r}; accepted: {', '.join(_ENUMS[name].__members__)}"
    if step.dtype and step.dtype not in data_type.__members__:
        return f"{step.op} makes {step.dtype!r}, which is no data type"
    return None
