"""Other knobs of our kernel in the chain of a model: which of them is fastest there, evictions above all.

Beside those of the first plan, which a call of the function has, it tries the knobs that the engine's model ranks
first, each with every eviction and reading late or ahead. None of them changes a bit of a result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import heur_mode, norm_forward_phase
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.benchmarks import session
from graphfuse.benchmarks.peer import Norm, in_place, through
from graphfuse.benchmarks.programs import products, turns
from graphfuse.benchmarks.programs.chain import EPS, LAYERS, ChainCase, sampler
from graphfuse.engines.rows.by_row.knobs import EVICTIONS
from graphfuse.tuning.report import words

ENGINE = "rows"
FIRST = "first plan"


@dataclass(frozen=True)
class Trial:
    """us: of one norm. over: the chain's time over that with the first
    plan's. wrong: why there are none."""

    label: str
    us: float | None = None
    over: float | None = None
    wrong: str | None = None


def graph(case: ChainCase, handle=None) -> pygraph:
    """As ``functional.fused_add_rmsnorm`` draws it: the sum is stored rounded and normalized as it is."""
    made = pygraph(intermediate_data_type=data_type.FLOAT, handle=handle)
    size = [case.rows, case.columns]
    x, residual = (made.tensor(size, data_type=data_type.BFLOAT16, name=name) for name in ("x", "residual"))
    weight = made.tensor([1, case.columns], data_type=data_type.BFLOAT16, name="weight")
    total = made.add(x, residual)
    made.identity(total).set_output().set_name("sum").set_data_type(data_type.BFLOAT16)
    y, _ = made.rmsnorm(total, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)
    y.set_output().set_name("out").set_data_type(data_type.BFLOAT16)
    return made


def planned(case: ChainCase, count: int, handle=None) -> tuple[pygraph, dict[str, int]]:
    """The graph, and its plans by words for their knobs: the first one, then others made from the model's first
    `count`. Nothing is compiled yet."""
    made = graph(case, handle)
    made.validate()
    made.build_operation_graph()
    made.create_execution_plans([heur_mode.OPENSOURCE, heur_mode.B])
    alone = [i for i in range(made.get_execution_plan_count()) if made.get_engine_and_knobs_at_index(i)[0] == ENGINE]
    first = made.get_engine_and_knobs_at_index(0)[1]
    plans, tried = {f"{FIRST}: {words(first)}": 0}, [first]
    for index in alone[: count + 1]:
        _, knobs = made.get_engine_and_knobs_at_index(index)
        for eviction in range(len(EVICTIONS)):
            for ahead in (0, 1):
                other = {**knobs, "eviction": eviction, "ahead": ahead}
                if other in tried:
                    continue
                tried.append(other)
                try:
                    plans[words(other)] = made.create_execution_plan(ENGINE, other)
                except GraphNotSupportedError:  # not legal together
                    continue
    return made, plans


def norm(made: pygraph, index: int) -> Norm:
    """One plan of the graph, in place."""
    made.build_plan_at_index(index)

    def run(x, residual, weight, eps) -> None:
        pack = {"x": x, "residual": residual, "weight": weight[None], "out": x, "sum": residual}
        made.execute_plan_at_index(pack, None, index)

    return in_place(run)


def trials(case: ChainCase, count: int, least: int, seconds: float, device: str, clock: session.Clock) -> list[Trial]:
    """The fastest first."""
    from graphfuse.runtime.handle import create_handle

    handle = create_handle(device)
    made, plans = planned(case, count, handle)
    (chain,) = case.sets(1, handle.device.memory)
    samplers = {products.PEER.name: sampler(chain, clock, products.PEER.make(case, [chain]).calls)}
    failed: list[Trial] = []
    for label, index in plans.items():
        try:
            work = through([chain], norm(made, index))
            if wrong := session.checked(case, chain, work, tight=True):
                failed.append(Trial(label, wrong=wrong))
                continue
            samplers[label] = sampler(chain, clock, work.calls)
        except Exception as error:  # one trial's failure is its result
            failed.append(Trial(label, wrong=session.first_line(error)))
    taken = turns.take(samplers, least, seconds)
    alone, usual = taken.pop(products.PEER.name), taken.get(next(iter(plans)))
    found = [
        Trial(
            label,
            statistics.median((a - b) / LAYERS for a, b in zip(times, alone, strict=True)),
            turns.ratio(times, usual) if usual else None,
        )
        for label, times in taken.items()
    ]
    return sorted(found, key=lambda trial: trial.us) + failed


def lines(case: ChainCase, count: int, least: int, seconds: float) -> Iterator[str]:
    """What all knobs took, a line each."""
    from graphfuse.runtime import timing

    yield f"{case}: us of one norm, whole chain over that with the first plan"
    for trial in trials(case, count, least, seconds, "cuda", timing):
        if trial.wrong:
            yield f"  {trial.label}: {trial.wrong}"
        else:
            over = "" if trial.over is None else f"  x {trial.over:.4f}"
            yield f"  {trial.us:8.3f}{over}  {trial.label}"
