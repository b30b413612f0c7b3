"""`Served`, an engine's declaration of what it accepts beyond the plain case.

Planning declines everything else for the engine, so that it never runs a graph that its author did not consider.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.op_graph.ir import FrozenTensor, Subgraph, packed_stride


@dataclass(frozen=True)
class Served:
    """An engine's declaration. The default is the plain case.

    compute: the types that its nodes may compute in.
    rounding: whether values between its nodes may be rounded to a narrower type. That happens to outputs, to operands
    of products, and with intermediate_rounding "declared".
    layouts: whether tensors in memory may have any strides or order. Otherwise they are row-major without gaps.
    by_value: whether its inputs may be numbers: constants of the graph, or given to execute.
    ragged: whether batches of a tensor may begin at ragged offsets. The tensor of offsets is an input of the node.
    """

    compute: frozenset[data_type] = frozenset({data_type.FLOAT})
    rounding: bool = False
    layouts: bool = False
    by_value: bool = False
    ragged: bool = False

    def why_not(self, subgraph: Subgraph) -> str | None:
        """The first property of these nodes that is not declared; None if there is none."""
        for field, reason in self._reasons(subgraph):
            return f"{reason} (the engine does not declare it in `serves.{field}`)"
        return None

    def _reasons(self, subgraph: Subgraph) -> Iterator[tuple[str, str]]:
        """(field, reason) for each property beyond the declaration."""
        tensors = subgraph.graph.tensors
        for node in subgraph.nodes:
            if node.compute not in self.compute:
                accepted = ", ".join(sorted(c.name for c in self.compute))
                yield "compute", f"{node} computes in {node.compute.name}; accepted: {accepted}"
        read = {t for node in subgraph.nodes for _, t in node.inputs}
        between = ((node, tensors[t]) for node in subgraph.nodes for _, t in node.outputs if t in read)
        for node, tensor in () if self.rounding else between:
            if tensor.dtype is not node.compute:
                kept = f"kept in {node.compute.name}, in which {node} computes"
                rounded = f"{tensor} is rounded to {tensor.dtype.name} before another node reads it"
                yield "rounding", f"{rounded}; accepted: {kept}"
        for t in () if self.layouts else (*subgraph.inputs, *subgraph.outputs):
            if not tensors[t].by_value and not _row_major(tensors[t]):
                accepted = f"stride {list(packed_stride(tensors[t].dim))}"
                yield "layouts", f"{tensors[t]} is not row-major without gaps; accepted: {accepted}"
        for t in () if self.by_value else subgraph.inputs:
            if tensors[t].by_value or tensors[t].value is not None:
                yield "by_value", f"{tensors[t]} is passed by value; accepted: tensors in memory"
        for t in () if self.ragged else (*subgraph.inputs, *subgraph.outputs):
            if tensors[t].ragged is not None:
                yield "ragged", f"{tensors[t]} has batches at ragged offsets; accepted: where stride says"


EVERYTHING = Served(
    frozenset({data_type.FLOAT, data_type.DOUBLE, data_type.INT32}),
    rounding=True,
    layouts=True,
    by_value=True,
    ragged=True,
)


def _row_major(tensor: FrozenTensor) -> bool:
    if tensor.reordering is not tensor_reordering.NONE:
        return False
    along = zip(tensor.dim, tensor.stride, packed_stride(tensor.dim), strict=True)
    return 0 in tensor.dim or all(extent == 1 or stride == packed for extent, stride, packed in along)
