"""What kernels of all schedules share: prelude, problem class, and tensors that may be updated in place."""

from collections.abc import Mapping
from functools import lru_cache

from graphfuse.codegen import rowwise
from graphfuse.codegen.phase_plan import PhasePlan, access, alike
from graphfuse.engine import ProblemClass
from graphfuse.ir import TensorId
from graphfuse.ops import BLOCKS
from graphfuse.patterns.rows import RowFacts
from graphfuse.rows.program import RowProgram, Store
from graphfuse.rows.steps import Chain
from graphfuse.rows.views import View

_INT_COLUMNS = 2**28  # below this, byte offsets within a row and past its end fit an int


def prelude(plan: PhasePlan, constants: Mapping[str, object], kernel: str = "GF_KERNEL(THREADS)") -> str:
    """The generated part of a kernel. constants: values by type and name; kernel: its qualifiers, in C++."""
    return "".join(
        [
            *(f'#include "graphfuse/{name}"\n' for name in rowwise.headers(plan.program)),
            "namespace problem {\n\n",
            f"using Index = {'int' if plan.columns < _INT_COLUMNS else 'gf::i64'};\n",
            *(f"constexpr {name} = {value};\n" for name, value in constants.items()),
            rowwise.source(plan, kernel),
            "\n}  // namespace problem\n",
        ]
    )


def cpp(value: bool) -> str:
    return str(value).lower()


@lru_cache(maxsize=256)
def overwritable(facts: RowFacts) -> frozenset[tuple[int, int]]:
    """Numbers of an input and a store that may be one memory, whatever the schedule and knobs: what can be where rows
    are kept, or where there are sums over rows, copied ahead. Other kernels write later what they would else lose."""
    stages = int(bool(facts.program.sums))
    plan = PhasePlan(facts.program, facts.row_extents, facts.columns, 1, resident=True, stages=stages)
    return frozenset(plan.overwritable())


def in_place(facts: RowFacts) -> tuple[tuple[TensorId, TensorId], ...]:
    inputs, stores = facts.program.inputs, facts.program.stores
    pairs = (alike(inputs[i], stores[number].view) for i, number in sorted(overwritable(facts)))
    return tuple((x.tensor, y.tensor) for found in pairs for x, y in found)


def problem(facts: RowFacts, chunk: int, within: float = 2.0) -> ProblemClass:
    """chunk: elements that are always taken together. within: as of ``ProblemClass``.

    Copies of values are no steps: a sum that is stored rounded and read unrounded takes what one takes that is read as
    it is stored.
    """
    program = facts.program
    steps, numbers = _without_copies(program)

    def described(view: View) -> dict[str, object]:
        varies = "rows" * view.rows + "columns" * view.columns
        found: dict[str, object] = {"type": view.dtype.value, "varies": varies, "access": access(view, chunk)}
        for number in view.place.numbers:
            found["indexed"] = program.indices[number].dtype.value
        if pairs := view.unit.pairs:
            found["pairs"] = [pairs.count, pairs.interleaved]
        if view.place.span:
            found["parts"] = [access(part, chunk) for part in view.parts]
        return found

    def stored(store: Store) -> dict[str, object]:
        made = described(store.view) | {"block": store.block_size, "value": numbers[store.value.index]}
        scales = store.block_scale if store.scales_of is None else store.view
        if store.block_size and scales is not None and not scales.swizzled and scales.column_stride != 1:
            made |= {"scales": "apart"}
        if store.scales_of is not None:
            return made | {"scales of": store.scales_of.value}
        if store.block_scale is not None and store.block_scale.dtype is not BLOCKS[store.block_size].scales[0]:
            return made | {"scale": store.block_scale.dtype.value}
        return made

    key = {
        "columns": facts.columns,
        "axes": len(facts.row_extents),
        "inputs": [described(view) for view in program.inputs],
        "steps": steps,
        "stores": [stored(s) for s in program.stores],
    }
    if program.sums:
        key["sums"] = [s.view.dtype.value for s in program.sums]
    return ProblemClass(key, facts.rows, within)


def _without_copies(program: RowProgram) -> tuple[list[str], list[int]]:
    """The names of the steps that are no copies of another step's value, and for each step the number of its value
    among theirs."""
    names: list[str] = []
    numbers: list[int] = []
    for step in program.steps:
        (_, first), *_ = step.operands
        if step.op_name == "identity" and isinstance(first, Chain):
            numbers.append(numbers[first.index])
        else:
            numbers.append(len(names))
            names.append(step.op_name)
    return names, numbers
