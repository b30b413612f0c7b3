"""What ``graphfuse tune`` does: times the knobs of problem classes on this machine's GPU."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import typer

from graphfuse.api import pygraph
from graphfuse.benchmarks import sizes
from graphfuse.benchmarks.sizes import planner
from graphfuse.planning.plan import Part
from graphfuse.tuned_tables.entry import TunedEntry

_QUICK = {"columns": (64, 1024), "rows": (1560, 99840)}
_LEAST = 1.0  # seconds that it makes sense to begin another class with
_LARGE = 1 << 28  # bytes; buffers of such sizes are not kept for the next class


class Tunable(Protocol):
    """A problem to tune for."""

    @property
    def moved(self) -> int:
        """Bytes: each input read once, each output written once."""

    def graph(self) -> pygraph: ...

    def tensors(self, device: str) -> dict[str, object]:
        """Random inputs and memory for outputs, by the names of the graph's tensors."""


def run(
    wanted: Sequence[Tunable],
    table: Path | None,
    time_budget: float,
    again: bool,
    progress_on_stderr: bool = False,
) -> list[Tunable]:
    """Tune `wanted` on the current device into `table` (default: the user's store); what is left is returned."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from graphfuse.runtime import device as devices
    from graphfuse.tuned_tables import store
    from graphfuse.tuning.autotune import autotune
    from graphfuse.tuning.report import BEST, words

    end, device = time.monotonic() + time_budget, devices.get("cuda")
    file, origin = (table.absolute(), "measured") if table else (store.user_file(device), "user")
    known = () if again else tuple(e for e in store.read(file) if e.source.device == device.name)
    left = [one for one in wanted if not all(tuned(part, known) for part in planner(one.graph()).plans[0].parts)]
    console = Console(stderr=progress_on_stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for one in progress.track([*left], description=f"tuning on {device.name}"):
            budget = end - time.monotonic()
            if budget < _LEAST:
                break
            planned, tensors = planner(one.graph()), one.tensors(device.memory)
            workspace = torch.empty(planned.plans[0].workspace_bytes, dtype=torch.uint8, device=device.memory)
            report = autotune(planned, tensors, workspace, None, budget, file, origin)
            found = [best for part in report.parts for best in part.trials[:1] if best.status == BEST]
            if len(found) == len(report.parts) and report.stored:
                left.remove(one)
            for best in found:
                console.print(
                    f"{one!s:24} {best.time.median:9.2f} us  {words(best.knobs)}", highlight=False, soft_wrap=True
                )
            if one.moved >= _LARGE:
                del tensors
                torch.cuda.empty_cache()
    console.print(
        f"{len(wanted) - len(left)} of {len(wanted)} sizes are tuned: {file}", highlight=False, soft_wrap=True
    )
    return left


def tuned(part: Part, known: Iterable[TunedEntry]) -> bool:
    """Whether the part's problem class is among the entries."""
    problem = part.engine.problem(part.facts)
    return any((e.engine, e.rows, e.key) == (part.engine.name, problem.rows, problem.key) for e in known)


def rmsnorm_silu(rows, columns, output, quick: bool) -> tuple[sizes.Size, ...]:
    """The sizes of RMSNorm → SiLU that are asked for, any numbers among them."""
    outputs = tuple(output or sizes.OUTPUTS)
    for name in outputs:
        if name not in sizes.OUTPUTS:
            raise typer.BadParameter(f"{name!r}; accepted: {', '.join(sizes.OUTPUTS)}", param_hint="--output")
    default = _QUICK if quick else {"columns": sizes.COLUMNS, "rows": sizes.ROWS}
    columns, rows = tuple(columns or default["columns"]), tuple(rows or default["rows"])
    for name, values in (("--columns", columns), ("--rows", rows)):
        if min(values) < 1:
            raise typer.BadParameter(f"{min(values)}; accepted: 1 or more", param_hint=name)
    odd = [c for c in columns if c % sizes.BLOCK]
    if odd and "nvfp4" in outputs:
        raise typer.BadParameter(f"{odd[0]}; accepted for nvfp4: multiples of {sizes.BLOCK}", param_hint="--columns")
    return sizes.seeds(columns, rows, outputs)
