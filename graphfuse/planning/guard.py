"""Calls of third-party patterns and engines. An exception becomes a PluginError, which names the package, the stage of
the call, and the nodes.

Results are not checked, except launches and the arguments of kernels, which could end the process or make it hang. A
result of a wrong type raises where it is used, which is within a guarded call, too.

First-party patterns and engines are called directly. Their exceptions are bugs of this package, or of the machine.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping

from graphfuse.base.device import Device
from graphfuse.base.errors import DeviceError, GraphNotSupportedError, KernelCompileError, PluginError, SerializedError
from graphfuse.contract import launch_limits, match, signature
from graphfuse.contract.engine import Engine, Frozen, FrozenCall, Kernel, Launch, No, Outline, Prepared, Site
from graphfuse.contract.match import Declined, Match, Pattern, Region
from graphfuse.op_graph.ir import FrozenGraph, Subgraph
from graphfuse.planning.registry import FIRST_PARTY, Origin, error_text, origin, safe_repr
from graphfuse.runtime.handle import current_stream
from graphfuse.runtime.torch_private import setting

_warned: set[tuple[str, str]] = set()


def call(
    item: Pattern | Engine, about: FrozenGraph | Subgraph, stage: str, function: Callable, *arguments: object
) -> object:
    """Result of calling `function` of a pattern or engine, with PluginError for any exception but those of ``PASSED``.

    about: the nodes that the call is about. stage: the name of the call in messages."""
    if origin(item) is FIRST_PARTY:
        return function(*arguments)
    try:
        return function(*arguments)
    except PASSED.get(stage, ()):
        raise
    except (Exception, SystemExit) as error:
        raise _failure(item, about, stage, f"raised {error_text(error)}") from error


def matches(pattern: Pattern, graph: FrozenGraph) -> list[Region | Declined]:
    """Every match of the pattern. Raises PluginError as ``call`` does."""
    if origin(pattern) is FIRST_PARTY:
        return list(match.find(pattern, graph))
    try:
        return list(match.find(_guarded(pattern, graph), graph))
    except PluginError as error:
        if error.stage:
            raise
        raise _failure(pattern, graph, "matching", str(error)) from None
    except Exception as error:
        raise _failure(pattern, graph, "matching", f"raised {error_text(error)}") from error


def try_out(part, device: Device) -> None:
    """Calls the functions of a part's engine that running it needs, and checks its launch.

    part: a ``plan.Part``. Raises PluginError as ``call`` does."""
    engine, about = part.engine, part.region.subgraph
    checked_outline(part, device)
    if origin(engine) is not FIRST_PARTY:
        call(engine, about, "in_place", lambda: dict(engine.in_place(part.facts, part.knobs)))
        call(engine, about, "notes", lambda: "".join(engine.notes(part.facts, part.knobs, device)))
        call(engine, about, "describing", lambda: (part.name, hash(part.knobs)))


def checked_outline(part, device: Device) -> Outline | Launch:
    """The part's outline. Raises PluginError if the device does not allow its launch, also for first-party engines."""
    engine, about = part.engine, part.region.subgraph
    outline = call(engine, about, "launch", lambda: part.outline)
    if not isinstance(outline, Outline | Launch):
        raise _failure(engine, about, "launch", f"gave {safe_repr(outline)}; accepted: a Launch")
    is_launch = isinstance(outline, Launch)
    wrong = call(engine, about, "launch", launch_limits.fault, outline, device, about) if is_launch else None
    if wrong:
        raise _failure(engine, about, "launch", f"gave a Launch whose {wrong}")
    return outline


def prepared(part, device: Device, kernel: Callable[[str, str], Kernel]) -> Prepared:
    """The part's work, ready to run. kernel: makes the device's kernel from a source and the name of its entry.

    Raises PluginError as ``call`` does, and if a kernel's parameters do not fit the arguments of the launch."""
    engine, about, outline = part.engine, part.region.subgraph, checked_outline(part, device)

    def compiled(source: str, entry: str) -> Kernel:
        wrong = signature.fault(source, entry, outline) if isinstance(outline, Launch) else None
        if wrong:
            raise _failure(engine, about, "launch", f"gave a Launch whose {wrong}")
        return kernel(source, entry)

    def made(site: Site) -> Prepared:
        found = engine.prepare(part.facts, part.knobs, device, site)

        def freeze(dependent: bool) -> Frozen:
            frozen = found.freeze(dependent)
            if not isinstance(frozen, FrozenCall):
                return frozen
            return dataclasses.replace(frozen, run=running(engine, about, frozen.run))

        return dataclasses.replace(found, freeze=freeze)

    # Called separately from prepare, so that an error of it has the stage "source".
    sources = call(engine, about, "source", engine.sources, part.facts, part.knobs)
    return call(engine, about, "prepare", made, Site(about, outline, compiled, sources, current_stream, setting))


def running(engine: Engine, about: Subgraph, run: Callable) -> Callable:
    """`run`, which does the engine's work, with PluginError for any exception that it raises."""
    return run if origin(engine) is FIRST_PARTY else functools.partial(call, engine, about, "run", run)


def left_out(item: Pattern | Engine, error: Exception, origins: Mapping[int, Origin]) -> No:
    """Why an installed pattern or engine that failed is not used; for any other plug-in, the error is raised.

    origins: of the plug-ins that the graph's caller did not pass. There is one warning for each plug-in and stage.
    """
    if origins.get(id(item), FIRST_PARTY) is FIRST_PARTY:
        raise error
    why = str(error) if isinstance(error, PluginError) else f"{_whose(item)}: {str(error).splitlines()[0]}"
    once = _whose(item), getattr(error, "stage", None) or type(error).__name__
    if once not in _warned:
        _warned.add(once)
        warnings.warn(f"a plug-in is left out: {why}", RuntimeWarning, stacklevel=2)
    return No(f"it is left out: {why}")


def _whose(item: Pattern | Engine) -> str:
    kind, where = "pattern" if isinstance(item, Pattern) else "engine", origin(item)
    return f"{kind} {item.name!r}" + ("" if where is None else f" of {where}")


def _failure(item: Pattern | Engine, about: FrozenGraph | Subgraph, stage: str, what: str) -> PluginError:
    where, nodes = origin(item), tuple(node.name for node in about.nodes)
    error = PluginError(f"{_whose(item)}: {stage} for {', '.join(nodes)} {what}")
    error.distribution = None if where is None else where.distribution
    error.plugin, error.stage, error.nodes = item.name, stage, nodes
    return error


def _guarded(pattern: Pattern, graph: FrozenGraph) -> Pattern:
    """The pattern with its functions called by ``call``."""

    def asked(stage: str, function: Callable) -> Callable:
        return lambda given: call(pattern, getattr(given, "subgraph", graph), stage, function, given)

    def facts(given: Match) -> object:
        found = pattern.facts(given)
        hash(found)  # planning looks matches up by their facts
        return found

    templates = pattern.template if isinstance(pattern.template, tuple) else (pattern.template,)
    return dataclasses.replace(
        pattern,
        template=tuple(asked("template", template) for template in templates),
        facts=asked("facts", facts),
        grow=None if pattern.grow is None else asked("grow", lambda m: tuple(pattern.grow(m))),
    )


PASSED: Mapping[str, tuple[type[Exception], ...]] = {
    "prepare": (GraphNotSupportedError, KernelCompileError, DeviceError, PluginError, SerializedError)
}
"""Exceptions that a plug-in may raise, by stage."""
