"""Check of a phase plan against the rules of phase plans.

Properties that the plan derives (phases, kept values, reads) are not computed a second time, but checked against what
the kernel will do with them. With GRAPHFUSE_VERIFY=on every plan is checked before it is printed.
"""

from collections.abc import Iterator

from graphfuse.base.errors import MalformedError
from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.check_program import check_program
from graphfuse.rows.steps import Chain, Load, Operand, Reduce


def check_plan(plan: PhasePlan) -> None:
    """Raises MalformedError, with every fault, if a plan or its program breaks a rule."""
    check_program(plan.program)
    if found := list(faults(plan)):
        raise MalformedError(f"phase plan: {'; '.join(found)}")


def faults(plan: PhasePlan) -> Iterator[str]:
    """Faults of a plan, as text. Its program must be valid."""
    yield from _numbers(plan)
    for phase in plan.phases:
        yield from (f"phase {phase} {fault}" for fault in _phase(plan, phase))
    yield from _rows(plan)
    yield from _written(plan)


def _numbers(plan: PhasePlan) -> Iterator[str]:
    for name in ("columns", "piece"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}; accepted: 1 and more"
    if any(len(view.row_strides) != len(plan.extents) for view in plan.program.all_views):
        yield f"row extents are {list(plan.extents)}, and not one for each row axis of the program"
    if plan.across and plan.stages:
        yield f"rows lie across pieces and are copied in {plan.stages} stages"
    for pairs in plan.program.all_pairs:
        if pairs.columns > (pairs.part or plan.columns) or pairs.part and plan.columns % pairs.part:
            within = f" in parts of {pairs.part}" * bool(pairs.part)
            yield f"{pairs.columns} columns are in pairs{within}, of rows of {plan.columns}"


def _phase(plan: PhasePlan, phase: int) -> Iterator[str]:
    """Faults of values with columns. Each must be kept from the phase before, read, or computed from earlier values."""
    program, there = plan.program, set[Operand]()
    before = {*plan.elements(phase - 1), *plan.kept[phase - 1]} if phase else set()
    for o in plan.kept[phase]:
        if o not in before:
            yield f"keeps {_named(o)}, which phase {phase - 1} does not have"
        if not (program.extent(o).rows and program.extent(o).columns):
            yield f"keeps {_named(o)}, of which there is not one an element"
    read = {*plan.reads(phase, True), *plan.reads(phase, False)}
    for o in plan.elements(phase):
        there.add(o)
        if o in plan.kept[phase]:
            continue
        if isinstance(o, Load):
            if o.index not in read:
                yield f"uses {_named(o)} and neither reads nor keeps it"
            continue
        for _, operand in program.steps[o.index].operands:
            if not isinstance(operand, Chain | Load):
                continue
            if program.extent(operand).columns and operand not in there:
                yield f"makes {_named(o)} before {_named(operand)}"
            elif isinstance(operand, Chain) and not program.extent(operand).columns:
                if program.known[operand.index] > phase:
                    yield f"makes {_named(o)} of {_named(operand)}, known in phase {program.known[operand.index]}"
    for o in program.wanted(phase):
        if isinstance(o, Chain | Load) and program.extent(o).columns and o not in there:
            yield f"stores, reduces or sums {_named(o)}, which it does not have"


def _rows(plan: PhasePlan) -> Iterator[str]:
    """Faults of values of one per row."""
    program = plan.program
    for k, step in enumerate(program.steps):
        if program.extents[k].columns:
            continue
        if program.known[k] not in plan.phases:
            yield f"{_named(Chain(k))} is known in phase {program.known[k]} of {len(plan.phases)}"
        narrow = (o for _, o in step.operands if isinstance(o, Chain) and not program.extents[o.index].columns)
        for o in narrow:
            if program.known[o.index] > program.known[k]:
                yield f"{_named(Chain(k))} is known before {_named(o)}, which it is made of"
        if isinstance(step, Reduce):
            after = [phase for phase in plan.phases if k in program.reduced_after(phase, step.join)]
            if after != [program.known[k] - 1]:
                yield f"{_named(Chain(k))} is reduced after phases {after} and known in phase {program.known[k]}"


def _written(plan: PhasePlan) -> Iterator[str]:
    program = plan.program
    times = [number for phase in plan.phases for number, _ in program.stored_in(phase)]
    for number, store in enumerate(program.stores):
        columns = program.extents[store.value.index].columns
        if times.count(number) != columns:
            yield f"store {number} ({store.view.name!r}) is written in {times.count(number)} phases"
    times = [number for phase in plan.phases for number, _ in program.summed_in(phase)]
    for number, total in enumerate(program.sums):
        if times.count(number) != 1:
            yield f"sum {number} ({total.view.name!r}) is added to in {times.count(number)} phases"


def _named(o: Operand) -> str:
    return f"input {o.index}" if isinstance(o, Load) else f"value {o.index}"
