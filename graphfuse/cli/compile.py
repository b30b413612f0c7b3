"""``graphfuse compile``: compiles kernels into the cache, for a chip that need not be present."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphfuse.base.wording import counted
from graphfuse.cli import exits, output
from graphfuse.cli.output import Json
from graphfuse.cli.subject import Cases, Quick, Subject, graphs, planner
from graphfuse.explain.account import count

if TYPE_CHECKING:
    from rich.console import Console

    from graphfuse.api import pygraph
    from graphfuse.base.device import Device
    from graphfuse.base.errors import KernelCompileError
    from graphfuse.planning.plan import Plan
    from graphfuse.planning.planner import Planner


@dataclass(frozen=True)
class NamedSource:
    """A kernel's source, with the name under which planning looks for its cubin."""

    source: str
    name: str


def compile(
    subject: Subject,
    arch: Annotated[str, typer.Option(help="the chip to compile for, as sm_90a")],
    case: Cases = (),
    quick: Quick = False,
    every: Annotated[
        bool, typer.Option("--all", help="the kernels of all plans of mode B, not of the best one")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="also write the graph, of one case, with its plans and kernels to this file, for pygraph.deserialize",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of graphs ahead of time, for a chip that need not be there.

    A machine with such a chip, the same NVRTC and this cache finds them there and compiles nothing; its user's own
    tuning may choose other knobs, which are then compiled as ever. Exits with 1 if a graph has no plan of generated
    kernels, or a kernel does not compile.
    """
    from rich.console import Console

    from graphfuse.base.device import for_arch
    from graphfuse.base.enums import heur_mode
    from graphfuse.base.errors import GraphfuseError, GraphNotSupportedError
    from graphfuse.runtime import cache, toolkit

    device, mode = for_arch(arch), heur_mode.B if every else heur_mode.OPENSOURCE
    found = graphs(subject, case, quick)
    if file is not None and len(found) != 1:
        raise typer.BadParameter(f"a file holds one graph, not {len(found)}; name one by --case", param_hint="--output")
    nvrtc = toolkit.load()
    wanted: dict[NamedSource, list[str]] = {}  # equal problems have equal sources
    failed: list[dict[str, str]] = []
    for name, graph in found.items():
        try:
            planning = planner(graph, device)
            with suppress(GraphNotSupportedError):  # reported below
                planning.create([mode])
            generated = [i for i, plan in enumerate(planning.plans) if kernels(plan)][: None if every else 1]
            if not generated:
                raise GraphNotSupportedError(planning.no_plan("no engine generates a kernel for it"))
        except GraphfuseError as error:
            failed.append({"subject": name, "why": str(error)})
            continue
        for kernel in dict.fromkeys(k for i in generated for k in kernels(planning.plans[i])):
            wanted.setdefault(kernel, []).append(name)
    before, start, size = cache.statistics(), time.monotonic(), 0
    for kernel, code in _compiled(wanted, device, Console(stderr=True)):
        if isinstance(code, bytes):
            size += len(code)
        else:
            failed.append({"subject": ", ".join(wanted[kernel]), "why": str(code)})
    after = cache.statistics()
    written = None
    if file is not None and not failed:
        write(file, *found.values(), planning, generated)
        written = str(file)
    report = {
        "subject": subject,
        "arch": device.arch,
        "nvrtc": nvrtc.version,
        "folder": str(cache.folder()),
        "graphs": len(found),
        "kernels": len(wanted),
        "compiled": after.compiled - before.compiled,
        "kept_before": after.disk_hits - before.disk_hits,
        "bytes": size,
        "seconds": round(time.monotonic() - start, 3),
        "failed": failed,
        "output": written,
    }
    if as_json:
        output.print_json(report)
    else:
        made = f"{counted(len(found), 'graph')}, {counted(len(wanted), 'kernel')} ({count(size)})"
        took = f"{report['compiled']} compiled in {report['seconds']:.1f} s, {report['kept_before']} were there"
        typer.echo(f"{made} for {device.arch}: {took}: {report['folder']}")
        if file is not None and written:
            typer.echo(f"written: {file} ({count(file.stat().st_size)})")
        for one in failed:
            typer.echo(f"{one['subject']}: {one['why']}", err=True)
    if failed:
        raise typer.Exit(exits.FAULT)


def write(file: Path, graph: pygraph, planner: Planner, plans: Sequence[int]) -> None:
    """Serialize a graph with these of its plans, the first selected. Raises BadParameter if the file cannot be
    written."""
    from graphfuse.planning import serialized_graph

    for index in reversed(plans):
        planner.build_at(index)
    content = serialized_graph.of(graph, planner.graph, planner.device, *planner.recorded())
    output.write(file, content.to_bytes(), "--output")


def kernels(plan: Plan) -> tuple[NamedSource, ...]:
    """The sources of a plan's kernels, under the names that ``kernels.prepare`` compiles them with."""
    return tuple(
        NamedSource(source, f"{part.engine.name}.cu")
        for part in plan.parts
        for source in part.engine.sources(part.facts, part.knobs)
    )


def _compiled(
    wanted: Iterable[NamedSource], device: Device, console: Console
) -> Iterator[tuple[NamedSource, bytes | KernelCompileError]]:
    """Pairs of a kernel and its cubin or error, compiled in parallel threads with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from graphfuse.base.errors import KernelCompileError
    from graphfuse.planning.kernels import compilers
    from graphfuse.runtime import cache

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, compilers(device) as pool:
        waiting = {pool.submit(cache.cubin, k.source, device.arch, k.name): k for k in wanted}
        for done in progress.track(
            as_completed(waiting), total=len(waiting), description=f"compiling for {device.arch}"
        ):
            try:
                yield waiting[done], done.result()
            except KernelCompileError as error:
                yield waiting[done], error
