"""Sums over ranks: an input that each rank has is read from all of them, and added up in the order of ranks."""

from collections.abc import Mapping
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.rows.program import RowProgram
from graphfuse.rows.steps import Chain, Load, Operand, Step, renamed


def added_up(program: RowProgram, rounded: Mapping[int, data_type | None]) -> RowProgram:
    """The program with the sum over ranks in the place of each input that is of rank 0's memory.

    rounded: numbers of these inputs, each with the type that its sum is rounded to, None for float32.
    """
    inputs, steps, sums = list(program.inputs), list[Step](), dict[Operand, Operand]()
    for number, dtype in rounded.items():
        view, total = program.inputs[number], Load(number)
        group = view.place.group
        for rank in range(1, group.size):
            inputs.append(replace(view, place=replace(view.place, rank=rank)))
            operands = (("a", total), ("b", Load(len(inputs) - 1)))
            steps.append(Step("add", operands, (), dtype if rank == group.size - 1 else None))
            total = Chain(len(steps) - 1)
        sums[Load(number)] = total
    before = len(steps)
    moved = sums | {Chain(k): Chain(k + before) for k in range(len(program.steps))}
    return replace(
        program,
        inputs=tuple(inputs),
        steps=(*steps, *(renamed(step, moved) for step in program.steps)),
        stores=tuple(replace(store, value=moved[store.value]) for store in program.stores),
        sums=tuple(replace(s, factors=tuple(moved.get(o, o) for o in s.factors)) for s in program.sums),
    )
