"""Common parts of the kernels of all schedules: the generated prelude, and the tensors that may be updated in place."""

import enum
import math
from collections.abc import Mapping
from functools import lru_cache

from graphfuse.codegen import rowwise
from graphfuse.codegen.phase_plan import PhasePlan, alike
from graphfuse.engines.rows.limits import MAX_DIVIDED
from graphfuse.op_graph.ir import TensorId
from graphfuse.patterns.rows import RowFacts

_INT_COLUMNS = 2**28  # with fewer columns, byte offsets within a row and past its end fit an int


class Access(enum.Enum):
    """Ways in which a kernel accesses memory, with their C++ names."""

    USUAL = "gf::Access::USUAL"
    READ_ONLY = "gf::Access::READ_ONLY"
    FIRST = "gf::Access::FIRST"
    LAST = "gf::Access::LAST"


def constant(name: str, value: bool | int | Access) -> str:
    """C++ declaration of a constant, of the type of its value."""
    if isinstance(value, Access):
        return f"constexpr gf::Access {name} = {value.value};\n"
    return f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"


def prelude(plan: PhasePlan, constants: Mapping[str, bool | int | Access], kernel: str) -> str:
    """The generated part of a kernel's source. constants: values by name. kernel: its qualifiers in C++."""
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
    """Pairs (input, store), by number, that may be the same memory for all schedules and knobs.

    They are those of kernels that keep rows in registers, or that prefetch rows if there are sums over rows. Other
    kernels delay stores that would overwrite inputs."""
    stages = int(bool(facts.program.sums))
    plan = PhasePlan(facts.program, facts.row_extents, facts.columns, 1, resident=True, stages=stages)
    return frozenset(plan.overwritable())


def in_place(facts: RowFacts) -> tuple[tuple[TensorId, TensorId], ...]:
    inputs, stores = facts.program.inputs, facts.program.stores
    pairs = (alike(inputs[i], stores[number].view) for i, number in sorted(overwritable(facts)))
    return tuple((x.tensor, y.tensor) for found in pairs for x, y in found)
