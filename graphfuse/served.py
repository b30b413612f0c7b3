"""What an engine accepts beyond the plain case, as data.

Planning declines everything else for it. So an engine is not asked to run a graph that its author did not think of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.dtypes import data_type
from graphfuse.enums import tensor_reordering
from graphfuse.ir import Subgraph, Tensor, packed_stride


@dataclass(frozen=True)
class Served:
    """An engine's declaration. The default is the plain case.

    compute: the types that its nodes may compute in.
    rounding: whether a value that one of its nodes reads of another may be rounded to a narrower type first. That
    happens to outputs, and with intermediate_rounding "declared".
    layouts: whether tensors in memory may have any strides or order. Otherwise they are row-major without gaps.
    by_value: whether its inputs may be numbers: constants of the graph, or given to execute.
    """

    compute: frozenset[data_type] = frozenset({data_type.FLOAT})
    rounding: bool = False
    layouts: bool = False
    by_value: bool = False

    def why_not(self, subgraph: Subgraph) -> str | None:
        """The first thing about these nodes that is not declared, None if there is none."""
        for field, reasons in _REASONS.items():
            for reason in reasons(getattr(self, field), subgraph):
                return f"{reason} (the engine does not declare it in `serves.{field}`)"
        return None


EVERYTHING = Served(frozenset({data_type.FLOAT, data_type.DOUBLE}), rounding=True, layouts=True, by_value=True)


def _compute(served: frozenset[data_type], subgraph: Subgraph) -> Iterator[str]:
    for node in subgraph.nodes:
        if node.compute not in served:
            accepted = ", ".join(sorted(c.name for c in served))
            yield f"{node} computes in {node.compute.name}; accepted: {accepted}"


def _rounding(served: bool, subgraph: Subgraph) -> Iterator[str]:
    if served:
        return
    read = {t for node in subgraph.nodes for _, t in node.inputs}
    for node in subgraph.nodes:
        for _, t in node.outputs:
            tensor = subgraph.graph.tensors[t]
            if t in read and tensor.dtype is not node.compute:
                yield (
                    f"{tensor} is rounded to {tensor.dtype.name} before another node reads it; accepted: kept in "
                    f"{node.compute.name}, in which {node} computes"
                )


def _layouts(served: bool, subgraph: Subgraph) -> Iterator[str]:
    if served:
        return
    for t in (*subgraph.inputs, *subgraph.outputs):
        tensor = subgraph.graph.tensors[t]
        if not tensor.by_value and not _row_major(tensor):
            yield f"{tensor} is not row-major without gaps; accepted: stride {list(packed_stride(tensor.dim))}"


def _by_value(served: bool, subgraph: Subgraph) -> Iterator[str]:
    if served:
        return
    for t in subgraph.inputs:
        tensor = subgraph.graph.tensors[t]
        if tensor.by_value or tensor.value is not None:
            yield f"{tensor} is passed by value; accepted: tensors in memory"


def _row_major(tensor: Tensor) -> bool:
    if tensor.reordering is not tensor_reordering.NONE:
        return False
    along = zip(tensor.dim, tensor.stride, packed_stride(tensor.dim), strict=True)
    return 0 in tensor.dim or all(extent == 1 or stride == packed for extent, stride, packed in along)


_REASONS = {"compute": _compute, "rounding": _rounding, "layouts": _layouts, "by_value": _by_value}
"""By field of ``Served``: what of a subgraph goes beyond what is declared."""
