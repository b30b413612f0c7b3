"""How good the choice of knobs is where nothing was tuned: the heuristic's first against an exhaustive search.

    python -m graphfuse.benchmarks.programs.heuristics [--record FOLDER] [--all FILE] [--sizes 60] [--seed N]
                                                       [--time-budget 240]

For each of 60 random sizes, tables left aside, all knobs of mode B are timed, the best of
them and the heuristic's choice again by the whole protocol, and at last these two in turns:
the smallest of many noisy times is too small. The ratio is that of the turns' medians.
"""

import json
import statistics
import time
from pathlib import Path

from graphfuse.base.enums import heur_mode
from graphfuse.benchmarks import sizes
from graphfuse.benchmarks.programs.study import Study
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.planning.kernels import prepare
from graphfuse.planning.plan import Part
from graphfuse.tuning.report import Trial, words
from graphfuse.tuning.search import HALVING, Round, search

STUDY = Study("heuristics", __doc__)
ROUNDS = (Round(1, 300, within=1.4, most=1000), Round(3, 1000, within=1.05, most=4), HALVING[-1])
"""Nothing is left out that one glance may have misjudged."""
TURNS = 3


def case(size: sizes.Size, deadline: float) -> tuple[dict[str, object], tuple[Trial, ...]] | None:
    """The row of the record and what all knobs took; None if the time did not suffice."""
    import torch

    from graphfuse.runtime import timing
    from graphfuse.tuning.workbench import Workbench, reference

    planner = size.planner()
    plan, device = planner.plans[0], planner.device
    (part,) = plan.parts
    first = part.engine.propose(part.facts, device, heur_mode.A)[0]
    space = list(dict.fromkeys([first, *part.engine.propose(part.facts, device, heur_mode.B)]))
    with torch.cuda.device(device.ordinal):
        tensors = size.tensors(device.memory)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device.memory)
        bound = planner.binder(plan).bind(tensors, workspace)
        bench = Workbench(part, device, reference(plan, device, bound), bound.scalars)
        del tensors, bound
        trials = search(bench, space, deadline, ROUNDS)
        if time.monotonic() >= deadline:
            return None
        best = next(k for k in space if knobs_to_dict(k) == trials[0].knobs)
        pair = [bench.calls(prepare(Part(part.region, part.engine, k), device)) for k in (first, best)]
        us, ratio = timing.measure(pair[0]).median, 1.0
        if best != first:
            turns = [[timing.measure(calls, 5).median for calls in pair] for _ in range(TURNS)]
            us, least = map(statistics.median, zip(*turns, strict=True))
            ratio = us / least
    row = {
        "rows": size.rows,
        "columns": size.columns,
        "output": size.output,
        "space": len(space),
        "ratio": round(ratio, 4),
        "us": round(us, 3),
        "GB/s": round(size.moved / us / 1e3),
        "heuristic": knobs_to_dict(first),
        "best": trials[0].knobs,
    }
    return row, trials


def main() -> None:
    parser = STUDY.parser()
    parser.add_argument("--all", type=Path, metavar="FILE", help="write the times of all knobs, to fit the model to")
    parser.add_argument("--sizes", type=int, default=60, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=sizes.JUDGED, help="of the sizes; others than usual to fit to")
    parser.add_argument("--time-budget", type=float, default=240.0, metavar="SECONDS")
    arguments = parser.parse_args()
    STUDY.need_gpu(parser)
    import torch
    from rich.progress import track

    deadline = time.monotonic() + arguments.time_budget
    wanted = sizes.off_the_table(arguments.sizes, arguments.seed)
    results, everything = [], []
    for size in track(wanted, description="heuristics"):
        found = case(size, deadline)
        if found is None:
            break
        row, trials = found
        results.append(row)
        times = [{"knobs": t.knobs, "us": t.time and t.time.median, "status": t.status} for t in trials]
        everything.append({key: row[key] for key in ("rows", "columns", "output")} | {"trials": times})
        print(
            f"{size!s:24} {row['us']:9.2f} us  {row['GB/s']:5} GB/s  x {row['ratio']:.3f}  of {row['space']:3}  "
            f"{words(row['heuristic'])}" + ("" if row["best"] == row["heuristic"] else f"  best: {words(row['best'])}")
        )
        torch.cuda.empty_cache()
    if not results:
        parser.exit(1, "out of time before the first size\n")
    ratios = [row["ratio"] for row in results]
    summary = {"sizes": len(results), "median": statistics.median(ratios), "worst": max(ratios)}
    print(f"{len(results)} of {len(wanted)} sizes: median {summary['median']:.3f}, worst {summary['worst']:.3f}")
    if arguments.all:
        arguments.all.write_text(json.dumps(everything))
    if arguments.record:
        print(STUDY.write(arguments.record, {"seed": arguments.seed, "summary": summary, "results": results}))


if __name__ == "__main__":
    main()
