"""Key of the problem class that tuned knobs are stored for. It describes the work, not the steps that it is made of.

So an op and the nodes that do the same are in one class, also after a change of how either is lowered.
"""

import json
from collections.abc import Iterable

from graphfuse.codegen.phase_plan import access
from graphfuse.contract.engine import ProblemClass
from graphfuse.ops import BLOCKS, Cost
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.pairs import Pairs
from graphfuse.rows.program import RowProgram, Store, cost_of, part_of
from graphfuse.rows.steps import Join, Pick
from graphfuse.rows.views import View

_KINDS = {(True, True): "element", (True, False): "row", (False, True): "column", (False, False): "one"}
"""Granularity of a tensor's values, by whether it varies along rows and columns."""


def problem(facts: RowFacts, chunk: int, within: float = 2.0, across: bool = False) -> ProblemClass:
    """The problem class of these facts. chunk: the number of elements that a thread always processes together, of a row
    or, if `across`, of neighbouring rows. within: as in ``ProblemClass``.

    The key describes inputs, reductions and outputs. Of the steps it has only whether there are functions, exchanged
    pairs of columns, and the number of picked elements. The order of tensors does not depend on the graph.
    """
    program = facts.program
    key: dict[str, object] = {
        "columns": facts.columns,
        "axes": len(facts.row_extents),
        "inputs": _in_order(_tensor(program, view, chunk) for view in program.inputs),
        "reductions": [
            [join.name.lower() for join in Join for _ in program.reduced_after(phase, join)]
            for phase in range(program.last)
        ],
        "outputs": _in_order(_written(program, store, chunk) for store in program.stores),
    }
    more = {
        "sums": sorted(s.view.dtype.value for s in program.sums),
        "functions": any(cost_of(step) is Cost.FUNCTION for step in program.elementwise),
        "exchanged": sorted(map(_pairs, program.swapped)),
        "picked": sum(isinstance(step, Pick) for step in program.steps),
        "across": chunk if across else 0,
        "parts": sorted([step.op_name, part_of(step)] for step in program.steps if part_of(step)),
    }
    return ProblemClass(key | {name: value for name, value in more.items() if value}, facts.rows, within)


def _tensor(program: RowProgram, view: View, chunk: int) -> dict[str, object]:
    """Description of a tensor. access: in bytes."""
    found = {"type": view.dtype.value, "kind": _KINDS[view.rows, view.columns], "access": access(view, chunk)}
    for number in view.place.numbers:
        found["indexed"] = program.indices[number].dtype.value
    if pairs := view.unit.pairs:
        found["pairs"] = _pairs(pairs)
    if view.unit.part:
        found["part"] = view.unit.part
    if view.unit.period:
        found["period"] = view.unit.period
    if view.place.span:
        found["parts"] = [access(part, chunk) for part in view.parts]
    return found


def _pairs(pairs: Pairs) -> list[int]:
    return [pairs.count, pairs.interleaved, *[pairs.part] * bool(pairs.part)]


def _written(program: RowProgram, store: Store, chunk: int) -> dict[str, object]:
    """Description of an output. phase: the number of consecutive reductions that its value depends on."""
    found = _tensor(program, store.view, chunk) | {"phase": program.phase[store.value.index]}
    if not store.block_size:
        return found
    found["block"] = store.block_size
    scales = store.block_scale if store.scales_of is None else store.view
    if scales is not None and not scales.swizzled and scales.column_stride != 1:
        found["scales"] = "apart"
    if store.scales_of is not None:
        found["scales of"] = store.scales_of.value
    elif store.block_scale is not None and store.block_scale.dtype is not BLOCKS[store.block_size].scales[0]:
        found["scale"] = store.block_scale.dtype.value
    return found


def _in_order(tensors: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(tensors, key=json.dumps)
