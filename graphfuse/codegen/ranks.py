"""Printing of a kernel's synchronization with other ranks, from which it reads rows or to which it writes."""

from collections.abc import Iterator

from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.views import OfRank, RankGroup


def source(plan: PhasePlan) -> Iterator[str]:
    """The function ranks_of and the constant RANKS_LAST, for before struct Row. RANKS_LAST is the last phase that reads
    rows of other ranks, or a number after all phases if rows are written to other ranks."""
    program = plan.program
    of_ranks = (i for i, view in enumerate(program.inputs) if isinstance(view.place, OfRank))
    last = max((phase for i in of_ranks for phase in plan.read_in(i)), default=0)
    if any(isinstance(store.view.place, OfRank) for store in program.stores):
        last = program.last + 1
    yield ""
    yield f"constexpr int RANKS_LAST = {last};"
    made = _table(plan, 0) if _many(plan) else "gf::Ranks<1>()"
    yield f"GF_DEVICE auto ranks_of(const Arguments& a) {{ return {made}; }}"


def declared(plan: PhasePlan) -> Iterator[str]:
    """Members of struct Row: distances to the memory of each rank."""
    for group in plan.program.groups:
        for rank in range(group.size):
            yield f"  gf::i64 {_place(plan, group, rank).distance} = 0;  // bytes to the memory of that rank"


def located(plan: PhasePlan) -> Iterator[str]:
    """Statements that set these members."""
    for number, group in enumerate(plan.program.groups if _many(plan) else ()):
        for rank in range(group.size):
            yield f"  row.{_place(plan, group, rank).distance} = {_table(plan, number)}.to({rank});"


def _place(plan: PhasePlan, group: RankGroup, rank: int) -> OfRank:
    return OfRank(group, rank, plan.program.groups.index(group))


def _many(plan: PhasePlan) -> bool:
    return any(group.size > 1 for group in plan.program.groups)


def _table(plan: PhasePlan, number: int) -> str:
    return f"gf::Ranks<{plan.program.groups[number].size}>::of(a.peers{number}, a.rank)"
