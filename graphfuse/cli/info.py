"""``graphfuse info``: what is installed and found, for bug reports."""

import dataclasses
import platform
import sys
from pathlib import Path

import typer

from graphfuse.base.wording import in_columns
from graphfuse.cli import cache, output
from graphfuse.cli.cache_kinds import kinds, summary
from graphfuse.cli.faults import findings
from graphfuse.cli.output import Json


def info(as_json: Json = False) -> None:
    """Print versions, caches, plug-ins and settings, then what doctor finds."""
    import graphfuse
    from graphfuse.base import settings
    from graphfuse.planning import registry as plugins
    from graphfuse.runtime import device, record

    found = {
        "graphfuse": graphfuse.__version__,
        "location": str(Path(graphfuse.__file__).parent),
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
        "versions": {name: record.version(name) for name in (*record.DISTRIBUTIONS, "rich", "typer")},
        "devices": [dataclasses.asdict(device.get(n)) for n in range(device.count())],
        "kept": [summary(kind) for kind in kinds().values()],
        "plugins": [dataclasses.asdict(one) for one in plugins.listed()],
        "settings": settings.given(),
        "checks": [dataclasses.asdict(finding) for finding in findings()],
    }
    if as_json:
        output.print_json(found)
        return
    lines = [(name, found[name]) for name in ("graphfuse", "location", "python", "platform")]
    lines += [(name, version or "not installed") for name, version in found["versions"].items()]
    lines += [(name, " ".join(map(str, rest)).strip()) for name, *rest in map(cache.row, found["kept"])]
    lines += [
        ("plug-in", f"{o['kind']} {o['name']} of {o['distribution']} {o['version']}: {o['error'] or o['state']}")
        for o in found["plugins"]
    ]
    lines += [("setting", f"{name}={value}") for name, value in found["settings"].items()]
    typer.echo("\n".join(in_columns(lines)))
    for one in found["checks"]:
        typer.echo(f"{one['check']}, {one['level']}: {one['what']}")
