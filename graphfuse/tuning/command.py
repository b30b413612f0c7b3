"""``graphfuse tune``: times the knobs of the RMSNorm → SiLU problem classes on this machine's GPU."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from graphfuse.plan import Part
from graphfuse.tables.entry import Entry
from graphfuse.tuning import sizes

_QUICK = {"columns": (64, 1024), "rows": (1560, 99840)}
_LEAST = 1.0  # seconds that it makes sense to begin another class with
_LARGE = 1 << 28  # bytes; buffers of such sizes are not kept for the next class


def tune(
    rows: Annotated[list[int] | None, typer.Option(help="Only these; may be repeated.")] = None,
    columns: Annotated[list[int] | None, typer.Option(help="Only these; may be repeated.")] = None,
    output: Annotated[list[str] | None, typer.Option(help="bf16, fp8_e4m3 or nvfp4; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Twelve sizes only.")] = False,
    time_budget: Annotated[float, typer.Option(help="Seconds after which it stops; run it again to go on.")] = 600.0,
    again: Annotated[bool, typer.Option("--again", help="Also what is tuned already.")] = False,
    table: Annotated[Path | None, typer.Option(help="Write an engine's own table instead of the user's store.")] = None,
) -> None:
    """Time the knobs of RMSNorm → SiLU for many sizes on this GPU and keep the fastest.

    Kernels planned from then on use them. Finished sizes are skipped, so it can be stopped and run again.
    """
    from graphfuse import record

    wanted = _wanted(rows, columns, output, quick)
    if not time_budget > 0:
        raise typer.BadParameter(f"{time_budget}; accepted: seconds above 0", param_hint="--time-budget")
    reason = record.no_gpu()
    if reason:
        typer.echo(f"graphfuse tune needs a GPU: {reason}", err=True)
        raise typer.Exit(2)
    left = run(wanted, table, time_budget, again)
    if left:
        typer.echo(f"out of time: {len(left)} of {len(wanted)} sizes are left; run it again to go on", err=True)


def run(wanted: tuple[sizes.Size, ...], table: Path | None, time_budget: float, again: bool) -> list[sizes.Size]:
    """Tune `wanted` on the current device into `table` (default: the user's store); what is left is returned."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from graphfuse.runtime import device as devices
    from graphfuse.tables import store
    from graphfuse.tuning.autotune import autotune
    from graphfuse.tuning.report import words

    end, device = time.monotonic() + time_budget, devices.get("cuda")
    file, origin = (table.absolute(), "measured") if table else (store.user_file(device), "user")
    known = () if again else tuple(e for e in store.read(file) if e.source.device == device.name)
    left = [size for size in wanted if not tuned(size.planner().plans[0].parts[0], known)]
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for size in progress.track([*left], description=f"tuning on {device.name}"):
            budget = end - time.monotonic()
            if budget < _LEAST:
                break
            planner, tensors = size.planner(), size.tensors(device.memory)
            workspace = torch.empty(planner.plans[0].workspace_bytes, dtype=torch.uint8, device=device.memory)
            report = autotune(planner, tensors, workspace, None, budget, file, origin)
            if report.stored:
                left.remove(size)
                best = report.parts[0].trials[0]
                console.print(
                    f"{size!s:24} {best.time.median:9.2f} us  {words(best.knobs)}", highlight=False, soft_wrap=True
                )
            if size.moved >= _LARGE:
                del tensors
                torch.cuda.empty_cache()
    console.print(
        f"{len(wanted) - len(left)} of {len(wanted)} sizes are tuned: {file}", highlight=False, soft_wrap=True
    )
    return left


def tuned(part: Part, known: Iterable[Entry]) -> bool:
    """Whether the part's problem class is among the entries."""
    problem = part.engine.problem(part.facts)
    return any((e.engine, e.rows, e.key) == (part.engine.name, problem.rows, problem.key) for e in known)


def _wanted(rows, columns, output, quick: bool) -> tuple[sizes.Size, ...]:
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
