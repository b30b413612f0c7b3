"""Calls of third-party patterns and engines. An exception or an invalid answer becomes a PluginError, which names the
package, what the plug-in was asked, and the nodes.

First-party patterns and engines are called directly. Their exceptions are bugs of this package, or of the machine.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from graphfuse import launch_limits, match, signature
from graphfuse.device import Device
from graphfuse.engine import Engine, Frozen, FrozenCall, Kernel, Launch, No, Outline, Prepared, Site
from graphfuse.errors import DeviceError, GraphNotSupportedError, KernelCompileError, PluginError, SerializedError
from graphfuse.ir import Graph, Subgraph
from graphfuse.match import Declined, Made, Match, Pattern, Region
from graphfuse.plugins import FIRST_PARTY, Origin, origin, said, shown

_warned: set[tuple[str, str]] = set()


def call(item: Pattern | Engine, about: Graph | Subgraph, stage: str, function: Callable, *arguments: object) -> object:
    """What `function`, of a pattern or engine, answers. about: what it is asked about. stage: what it is asked; a key
    of ``ANSWERS`` has the answer looked at. PluginError for a wrong answer and for whatever it raises."""
    if origin(item) is FIRST_PARTY:
        return function(*arguments)
    try:
        answer = function(*arguments)
        accepted = ANSWERS[stage](item, answer) if stage in ANSWERS else None
    except PASSED.get(stage, ()):
        raise
    except (Exception, SystemExit) as error:
        raise _failure(item, about, stage, f"raised {said(error)}") from error
    if accepted:
        raise _failure(item, about, stage, f"gave {shown(answer)}; accepted: {accepted}")
    return answer


def matches(pattern: Pattern, graph: Graph) -> list[Region | Declined]:
    """Every place where the pattern fits; PluginError as of ``call``."""
    if origin(pattern) is FIRST_PARTY:
        return list(match.find(pattern, graph))
    try:
        return list(match.find(_guarded(pattern, graph), graph))
    except PluginError as error:
        if error.stage:
            raise
        raise _failure(pattern, graph, "template", str(error)) from None
    except Exception as error:
        raise _failure(pattern, graph, "template", f"gave what cannot be matched: {said(error)}") from error


def try_out(part, device: Device) -> None:
    """Asks the engine of a part (``plan.Part``) what will be asked when it runs, and looks at its launch. PluginError
    as of ``call``."""
    engine, about = part.engine, part.region.subgraph
    checked_outline(part, device)
    if origin(engine) is not FIRST_PARTY:
        call(engine, about, "in_place", engine.in_place, part.facts, part.knobs)
        call(engine, about, "notes", engine.notes, part.facts, part.knobs, device)
        call(engine, about, "describing", lambda: (part.name, hash(part.knobs)))


def checked_outline(part, device: Device) -> Outline | Launch:
    """The part's outline; PluginError where the device does not allow a launch, whoever made it."""
    engine, about = part.engine, part.region.subgraph
    outline = call(engine, about, "launch", lambda: part.outline)
    wrong = launch_limits.fault(outline, device, about) if isinstance(outline, Launch) else None
    if wrong:
        raise _failure(engine, about, "launch", f"gave a Launch whose {wrong}")
    return outline


def prepared(part, device: Device, kernel: Callable[[str, str], Kernel]) -> Prepared:
    """The part's work, ready to run. kernel: makes the device's kernel of a source and the name of its entry.
    PluginError as of ``call``, and where a kernel does not take what the launch passes."""
    engine, about, outline = part.engine, part.region.subgraph, checked_outline(part, device)

    def compiled(source: str, entry: str) -> Kernel:
        if not isinstance(entry, str):
            raise _failure(engine, about, "entry", f"gave {shown(entry)}; accepted: the name of a kernel")
        wrong = signature.fault(source, entry, outline) if isinstance(outline, Launch) else None
        if wrong:
            raise _failure(engine, about, "launch", f"gave a Launch whose {wrong}")
        return kernel(source, entry)

    # Apart from prepare, so that an error says what in the words of who writes kernels.
    sources = call(engine, about, "source", engine.sources, part.facts, part.knobs)
    site = Site(about, outline, compiled, sources)
    made = call(engine, about, "prepare", engine.prepare, part.facts, part.knobs, device, site)
    return dataclasses.replace(made, freeze=lambda dependent: _guarded_frozen(engine, about, made.freeze(dependent)))


def _guarded_frozen(engine: Engine, about: Subgraph, frozen: Frozen) -> Frozen:
    if not isinstance(frozen, FrozenCall):
        return frozen
    return dataclasses.replace(frozen, run=running(engine, about, frozen.run))


def running(engine: Engine, about: Subgraph, run: Callable) -> Callable:
    """`run`, which does the engine's work, with PluginError for whatever it raises."""
    if origin(engine) is FIRST_PARTY:
        return run

    def guarded(*arguments: object) -> object:
        try:
            return run(*arguments)
        except (Exception, SystemExit) as error:
            raise _failure(engine, about, "run", f"raised {said(error)}") from error

    return guarded


def left_out(item: Pattern | Engine, error: Exception, origins: Mapping[int, Origin]) -> No:
    """Why an installed pattern or engine is not used; of any other the error is raised.

    origins: of what the graph's caller did not pass. Each plug-in is warned of once for each thing that it is asked.
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


def _failure(item: Pattern | Engine, about: Graph | Subgraph, stage: str, what: str) -> PluginError:
    where, nodes = origin(item), tuple(node.name for node in about.nodes)
    error = PluginError(f"{_whose(item)}: {stage} for {', '.join(nodes)} {what}")
    error.distribution = None if where is None else where.distribution
    error.plugin, error.stage, error.nodes = item.name, stage, nodes
    return error


def _guarded(pattern: Pattern, graph: Graph) -> Pattern:
    """The pattern with its functions called by ``call``."""

    def template(given: match.Template) -> match.Template:
        return lambda g: call(pattern, graph, "template", given, g)

    def facts(m: Match) -> object:
        return call(pattern, m.subgraph, "facts", pattern.facts, m)

    def grow(m: Match) -> Iterable[frozenset[int]]:
        return call(pattern, m.subgraph, "grow", lambda: _grown(pattern.grow(m), graph))

    given = pattern.template if isinstance(pattern.template, tuple) else (pattern.template,)
    return dataclasses.replace(
        pattern, template=tuple(map(template, given)), facts=facts, grow=None if pattern.grow is None else grow
    )


def _grown(found: Iterable, graph: Graph) -> list:
    """Sets of nodes; what is none stays, for the answer to be refused."""
    return [s if isinstance(s, frozenset) and s <= frozenset(range(len(graph.nodes))) else None for s in found]


def _is_no(item: Engine, answer: object) -> str | None:
    return None if isinstance(answer, No | None) else "a No, or None"


def _knobs(item: Engine, answer: object) -> str | None:
    kinds = item.knobs if isinstance(item.knobs, tuple) else (item.knobs,)
    if not isinstance(answer, Sequence) or not all(isinstance(knobs, kinds) for knobs in answer):
        return f"a sequence of its knobs, {' or '.join(kind.__name__ for kind in kinds)}"
    for knobs in answer:
        hash(knobs)
    return None if answer else "at least one of its knobs, for what it can run"


def _template(item: Pattern, answer: object) -> str | None:
    valid = isinstance(answer, Mapping) and answer and all(isinstance(made, Made) for made in answer.values())
    return None if valid else "outputs of its nodes by name"


def _facts(item: Pattern, answer: object) -> str | None:
    if isinstance(answer, No):
        return None
    if isinstance(answer, type) or not dataclasses.is_dataclass(answer) or type(answer).__hash__ is None:
        return "a frozen dataclass, or a No"
    hash(answer)
    return None


def _sets(item: Pattern, answer: Sequence[object]) -> str | None:
    return None if all(answer) else "frozensets of numbers of the graph's nodes"


def _pairs(item: Engine, answer: object) -> str | None:
    pairs = isinstance(answer, Sequence) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(t) is int for t in pair) for pair in answer
    )
    return None if pairs else "pairs of ids of an input and an output"


def _notes(item: Engine, answer: object) -> str | None:
    texts = isinstance(answer, Sequence) and not isinstance(answer, str) and all(isinstance(n, str) for n in answer)
    return None if texts else "a tuple of texts"


def _outline(item: Engine, answer: object) -> str | None:
    return None if isinstance(answer, Outline | Launch) else "a Launch"


def _texts(item: Engine, answer: object) -> str | None:
    valid = isinstance(answer, tuple) and all(isinstance(text, str) for text in answer)
    return None if valid else "the text of a kernel"


def _prepared(item: Engine, answer: object) -> str | None:
    return None if isinstance(answer, Prepared) else "a Prepared"


ANSWERS: Mapping[str, Callable[..., str | None]] = {
    "template": _template,
    "grow": _sets,
    "facts": _facts,
    "why_not": _is_no,
    "illegal": _is_no,
    "propose": _knobs,
    "launch": _outline,
    "in_place": _pairs,
    "notes": _notes,
    "source": _texts,
    "prepare": _prepared,
}
"""By what is asked: what is accepted, where an answer is not; None where it is."""

PASSED: Mapping[str, tuple[type[Exception], ...]] = {
    "prepare": (GraphNotSupportedError, KernelCompileError, DeviceError, PluginError, SerializedError)
}
"""By what is asked: what may be raised."""
