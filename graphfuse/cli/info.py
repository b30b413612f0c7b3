"""``graphfuse info``: what is installed and found, for bug reports."""

import dataclasses
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphfuse.cli import cache, output
from graphfuse.cli.kept import kinds, summary
from graphfuse.cli.output import Json


def info(as_json: Json = False) -> None:
    """Print versions, devices, compilers, caches, plug-ins and settings."""
    found = gather()
    if as_json:
        output.print_json(found)
        return
    lines = [("graphfuse", f"{found['graphfuse']}, {found['location']}"), ("python", found["python"])]
    lines += [(name, version or "not installed") for name, version in found["versions"].items()]
    lines += [("device", _words(device)) for device in found["devices"]] or [("device", "no CUDA device")]
    lines.append(("planned for", _found(found["planned_for"], "name")))
    lines.append(("NVRTC", _found(found["nvrtc"], "version", "path", "origin")))
    lines.append(("C++ compiler", _found(found["compiler"], "version", "path")))
    lines += [(name, " ".join(map(str, rest)).strip()) for name, *rest in map(cache.row, found["kept"])]
    lines += [
        ("plug-in", f"{o['kind']} {o['name']} of {o['distribution']} {o['version']}: {o['error'] or o['state']}")
        for o in found["plugins"]
    ] or [("plug-ins", "none")]
    lines += [("setting", f"{name}={value}") for name, value in found["settings"].items()] or [("settings", "none")]
    output.print_rows(lines)


def gather() -> dict[str, Any]:
    """Everything, as JSON values. What is not there or cannot be told is {"error": why}."""
    import graphfuse
    from graphfuse import plugins, record, settings
    from graphfuse.emulator import compiler
    from graphfuse.runtime import device, toolkit

    def nvrtc() -> dict[str, Any]:
        kit = toolkit.find()
        return {"version": kit.version, "path": str(kit.nvrtc), "origin": kit.origin}

    def host_compiler() -> dict[str, Any]:
        found = compiler.find()
        return {"version": found.version.splitlines()[0], "path": found.path}

    return {
        "graphfuse": graphfuse.__version__,
        "location": str(Path(graphfuse.__file__).parent),
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
        "versions": {name: record.version(name) for name in (*record.DISTRIBUTIONS, "rich", "typer")},
        "devices": [dataclasses.asdict(device.get(n)) for n in range(device.count())],
        "planned_for": _or_error(lambda: {"name": str(device.get())}),
        "nvrtc": _or_error(nvrtc),
        "compiler": _or_error(host_compiler),
        "kept": [summary(kind) for kind in kinds().values()],
        "plugins": [dataclasses.asdict(one) for one in plugins.listed()],
        "settings": settings.given(),
    }


def _or_error(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from graphfuse.errors import GraphfuseError

    try:
        return ask()
    except GraphfuseError as error:
        return {"error": str(error)}


def _found(value: dict[str, Any], *names: str) -> str:
    if "error" in value:
        return str(value["error"]).splitlines()[0]
    return ", ".join(value[name] for name in names if value[name])


def _words(device: dict[str, Any]) -> str:
    major, minor = device["compute_capability"]
    return f"cuda:{device['ordinal']} {device['name']}, SM{major}{minor}, {device['sm_count']} SMs"
