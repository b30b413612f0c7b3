"""Programs over several ranks: their inputs are read from all ranks and summed in the order of ranks, and their outputs
are written to all ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphfuse.base.dtypes import data_type
from graphfuse.rows.program import RowProgram
from graphfuse.rows.steps import Chain, Load, Operand, Step, renamed
from graphfuse.rows.views import OfRank, View

MOST_TABLES = 2
"""Tables of ranks in one program: a kernel reads the memory of one and writes that of another."""


def over_ranks(program: RowProgram, rounded: Mapping[int, data_type | None]) -> RowProgram:
    """The program with inputs and stores of rank 0 replaced by those of all ranks. Inputs become their sum over ranks.

    rounded: numbers of these inputs, each with the type that its sum is rounded to; None for float32.
    """
    groups = program.groups
    if not groups:
        return program

    def views(view: View) -> Iterator[View]:
        group = view.place.group
        for rank in range(group.size):
            yield replace(view, place=OfRank(group, rank, groups.index(group)))

    inputs, steps, sums = list(program.inputs), list[Step](), dict[Operand, Operand]()
    for number, dtype in rounded.items():
        total: Operand = Load(number)
        inputs[number], *others = views(program.inputs[number])
        for view in others:
            inputs.append(view)
            operands = (("a", total), ("b", Load(len(inputs) - 1)))
            steps.append(Step("add", operands, (), dtype if view is others[-1] else None))
            total = Chain(len(steps) - 1)
        sums[Load(number)] = total
    before = len(steps)
    renames = sums | {Chain(k): Chain(k + before) for k in range(len(program.steps))}
    stores = []
    for store in program.stores:
        written = views(store.view) if isinstance(store.view.place, OfRank) else [store.view]
        stores += [replace(store, view=view, value=renames[store.value]) for view in written]
    return replace(
        program,
        inputs=tuple(inputs),
        steps=(*steps, *(renamed(step, renames) for step in program.steps)),
        stores=tuple(stores),
        sums=tuple(replace(s, factors=tuple(renames.get(o, o) for o in s.factors)) for s in program.sums),
    )
