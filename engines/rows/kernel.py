"""What kernels of all schedules share: prelude, and tensors that may be updated in place."""

import enum
import math
from collections.abc import Mapping
from functools import lru_cache

from graphfuse.codegen import rowwise
from graphfuse.codegen.phase_plan import PhasePlan, alike
from graphfuse.engines.rows.limits import MAX_DIVIDED
from graphfuse.op_graph.ir import TensorId
from graphfuse.patterns.rows import RowFacts

_INT_COLUMNS = 2**28  # below this, byte offsets within a row and past its end fit an int


class Access(enum.Enum):
    """Access of a kernel to memory, in C++."""

    USUAL = "gf::Access::USUAL"
    READ_ONLY = "gf::Access::READ_ONLY"
    FIRST = "gf::Access::FIRST"
    LAST = "gf::Access::LAST"


def constant(name: str, value: bool | int | Access) -> str:
    """The declaration of a constant of the C++ type that its value has."""
    if isinstance(value, Access):
        return f"constexpr gf::Access {name} = {value.value};\n"
    return f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"


def prelude(plan: PhasePlan, constants: Mapping[str, bool | int | Access], kernel: str) -> str:
    """The generated part of a kernel. constants: values by name; kernel: its qualifiers, in C++."""
    few = plan.in_32_bits and math.prod(plan.extents) < MAX_DIVIDED  # rows
    return "".join(
        [
            *(f'#include "graphfuse/{name}"\n' for name in rowwise.headers(plan.program)),
            "namespace problem {\n\n",
            f"using Index = {'int' if plan.columns < _INT_COLUMNS else 'gf::i64'};\n",
            f"using RowIndex = {'gf::u32' if few else 'gf::i64'};\n",
            f"constexpr gf::i64 COLUMNS = {plan.columns};\n",
            *(constant(name, value) for name, value in constants.items()),
            rowwise.source(plan, kernel),
            "\n}  // namespace problem\n",
        ]
    )


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
