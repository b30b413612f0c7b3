"""Prints how a kernel meets those on other ranks, whose rows it reads."""

from collections.abc import Iterator

from graphfuse.codegen.phase_plan import PhasePlan
from graphfuse.rows.views import OfRank


def source(plan: PhasePlan) -> Iterator[str]:
    """The function ranks_of, and RANKS_READ, the last phase that reads rows of other ranks; before the struct Row."""
    program, group = plan.program, plan.program.group
    of_ranks = (i for i, view in enumerate(program.inputs) if isinstance(view.place, OfRank))
    read = max((phase for i in of_ranks for phase in plan.read_in(i)), default=0)
    many = group is not None and group.size > 1
    made = f"gf::Ranks<{group.size}>::of(a.peers, a.rank)" if many else "gf::Ranks<1>()"
    yield ""
    yield f"constexpr int RANKS_READ = {read};"
    yield f"GF_DEVICE auto ranks_of(const Arguments& a) {{ return {made}; }}"
