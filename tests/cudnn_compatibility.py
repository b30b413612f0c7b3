"""docs/cudnn-compatibility.md: every public name of cuDNN's frontend 1.32 beside ours. Run it to write the page anew.

The names and parameters stand in cudnn_1_32.json. What is the same, where parameters differ and which are refused is
read from our own objects; only what signatures do not show is said by hand, in DIFFERS and REFUSED.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path

import graphfuse
from graphfuse.base import cudnn_names
from graphfuse.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "cudnn-compatibility.md"
NAMES = json.loads((ROOT / "tests" / "package" / "cudnn_1_32.json").read_text())
COMMAND = "python tests/cudnn_compatibility.py"

SAME, DIFFERS_, NOT_OFFERED = "same", "differs", "not offered"

DIFFERS: Mapping[str, Mapping[str, str]] = {
    "module": {
        "backend_version": "a constant: that of the backend whose graph API is followed; no cuDNN is loaded",
        "backend_version_string": "as `backend_version`",
        "engines": "a module: graphfuse's own engines",
        "ops": "a module: the table of operations",
        "tensor": "a module; in `isinstance` write `Tensor`",
        "torch": "a module: operators and modules for training",
        "wrapper": "a module: `Graph`",
    },
    "pygraph": {
        "build": "modes may be followed by a `build_plan_policy`; names and objects of patterns and engines",
        "build_operation_graph": "validates a graph that was not; may be given patterns and engines",
        "build_plans": "takes the `build_plan_policy`",
        "create_execution_plan": "knobs go by name, and engines may; returns the plan's index",
        "deserialize": "data, or a handle and data; the graph must be empty and has its tensors afterwards",
        "deselect_engines": "engines are named, and names must be whole",
        "execute": "refuses entries that tell of a mistake, see above, and other shapes than those of the graph or the "
        "overrides; overrides change extents of leading axes, and strides may be left out",
        "get_engine_and_knobs_at_index": "an engine's name and a dict of its knobs",
        "get_knobs_for_engine": "the type of a knob is its name",
        "key": "a text, which node order and names do not change; after `validate`",
        "nodes": "a list of records",
        "plans": "a list of engines' names and dicts of their knobs",
        "populate_cuda_graph": "of a plan of kernels; the graph has no nodes before",
        "reshape": "`LOGICAL` is the default, which `VIEW_ONLY` is for row-major tensors without gaps",
        "serialize": "all built plans; bytes unless `as_bytes=False`; with kernels unless `include_kernels=False`",
        "update_cuda_graph": "of a plan of kernels",
        "tensors": "a list",
    },
    "Tensor": {
        "get_dim": "what was set, else what `validate` inferred",
        "get_stride": "what was set, else what `validate` inferred",
        "set_name": "must not be empty",
        "set_vector_count_and_dimension": "1 and -1 alone, which mean none: there are no vectorized layouts",
    },
    "Graph": {
        "__init__": "without a handle it runs on the current stream, as with `auto`; arrays of any library",
        "set_io_tuples": "each tensor once",
    },
    "kernel_cache": {
        "deserialize": "a text of graphfuse's own; cuDNN's is not read",
        "revision": "0 until a graph uses the cache, where cuDNN's raises",
        "size": "as `revision`",
    },
    "device_properties": {"serialize": "a text of graphfuse's own, with other fields than cuDNN's"},
    "knob": {"type": "a text, the name of the knob"},
}
"""What a signature does not show, by section and name."""

REFUSED: Mapping[str, str] = {
    "an entry of a variant pack for a virtual tensor": "whoever gives it expects a result that nothing writes",
    "an entry for a constant of the graph": "the number would be ignored",
    "an entry under a uid or name that the graph does not have": "a result that is expected there is never written",
    "a buffer of another type, shape, strides, alignment or device than its tensor": "kernels would read and write "
    "other memory",
    "on the CPU: lengths, ragged offsets, pages and groups of rows that do not fit the tensors": "values would be "
    "wrong, or of other memory",
    "an output that overlaps an input or another output, where the plan cannot work in place": "values would be lost",
    "`execute` before `build_plans`": "a call that compiles would be taken for one that runs, or captured",
    "a name in `deselect_engines` that no engine has": "it would bar nothing",
}
"""What cuDNN's frontend lets pass and graphfuse refuses, and why."""

LET_PASS = (
    "entries under None, which stand for optional tensors that the graph was built without",
    "entries for tensors that no node uses, whatever their values",
    "a workspace that is larger than needed, and one where none is needed",
    "extents of 1 in other places than the tensor has them",
)
"""What graphfuse lets pass as cuDNN does."""

ALSO: Mapping[str, str] = {"tensor_dict": "variant_pack"}
"""cuDNN's keywords for parameters of other names, beside those that methods say themselves."""

SECTIONS: Mapping[str, tuple[str, Callable[[], object], Mapping[str, str]]] = {
    "module": ("The module", lambda: graphfuse, cudnn_names.MODULE),
    "pygraph": ("`pygraph`", graphfuse.pygraph, cudnn_names.PYGRAPH),
    "Tensor": ("`Tensor`", lambda: graphfuse.pygraph().tensor([1]), cudnn_names.TENSOR),
    "Graph": ("`Graph`, the wrapper", lambda: graphfuse.Graph, {}),
    "kernel_cache": ("What `create_kernel_cache` returns", graphfuse.create_kernel_cache, {}),
    "device_properties": (
        "What `create_device_properties` returns",
        lambda: graphfuse.create_device_properties("sm_90a"),
        {},
    ),
    "knob": ("`knob`", lambda: graphfuse.knob("threads", 32, 64, 32), {}),
}
"""By section: its title, what has the names, and what takes the place of those that are not there."""


@dataclass(frozen=True)
class Row:
    """A name of cuDNN's. takes: of its arguments, by name, whether they may be given (True), may be given as what asks
    for nothing (False), or cannot be given, as the name is not offered (None)."""

    name: str
    verdict: str
    how: str = ""
    takes: Mapping[str, bool | None] = field(default_factory=dict)


def rows(section: str) -> list[Row]:
    """What becomes of each name of a section."""
    _, owner, instead = SECTIONS[section]
    having = owner()
    return [_row(section, name, theirs, having, instead) for name, theirs in NAMES[section].items()]


def _row(section: str, name: str, theirs: list[str] | None, having: object, instead: Mapping[str, str]) -> Row:
    said, arguments = DIFFERS[section].get(name, ""), [a for a in theirs or () if a != "*"]
    if said.startswith("a module"):
        return Row(name, DIFFERS_, said)
    if name == "__init__":
        ours = getattr(type(having) if section == "pygraph" else having, name)
    elif not hasattr(having, name):
        return Row(name, NOT_OFFERED, instead[name], dict.fromkeys(arguments))
    else:
        ours = getattr(having, name)
    parameters = "" if theirs is None or not callable(ours) else compared(theirs, ours)
    unmet = refused(name, arguments)
    how = "; ".join(filter(None, (parameters, *_refusals(unmet), said)))
    takes = {argument: argument not in unmet and argument not in _missing(theirs, ours) for argument in arguments}
    return Row(name, DIFFERS_ if how else SAME, how, takes)


def refused(name: str, arguments: Sequence[str]) -> dict[str, str]:
    """The arguments of cuDNN's that a method takes only where they ask for nothing, and what to use instead."""
    options = OPS[name].not_offered if name in OPS else cudnn_names.KEYWORDS
    return {argument: options[argument][1] for argument in arguments if argument in options}


def _refusals(unmet: Mapping[str, str]) -> Iterable[str]:
    for instead, of_it in groupby(unmet, key=unmet.__getitem__):
        yield f"refuses {', '.join(f'`{argument}`' for argument in of_it)} (instead: {instead})"


def compared(theirs: list[str], ours: Callable[..., object]) -> str:
    """How our parameters differ from those of cuDNN; empty if a call with them, by name or in order, means the same.
    What stands behind "*" is given by name alone."""
    missing = _missing(theirs, ours)
    if missing:
        return f"without {', '.join(f'`{name}`' for name in missing)}"
    if _any_name(ours):
        return ""
    named = _translated(theirs, ours)
    in_order = named[: named.index("*")] if "*" in named else named
    found = [p.name for p in _parameters(ours) if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, (name, here) in enumerate(zip_longest(in_order, found[: len(in_order)]), 1):
        if name != here:
            return (
                f"by position the {_ORDINALS.get(place, f'{place}th')} is {f'`{here}`' if here else 'none'}: give names"
            )
    return ""


_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def _parameters(ours: Callable[..., object]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]


def _any_name(ours: Callable[..., object]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(ours))


def _translated(theirs: Sequence[str], ours: Callable[..., object]) -> list[str]:
    also = ALSO | getattr(ours, "also", {})
    return [also.get(name, name) for name in theirs]


def _missing(theirs: Sequence[str], ours: object) -> list[str]:
    """cuDNN's parameters that ours has not."""
    if not callable(ours) or _any_name(ours):
        return []
    known = {"*", *(p.name for p in _parameters(ours))}
    return [name for name, here in zip(theirs, _translated(theirs, ours), strict=True) if here not in known]


def members(name: str) -> Row:
    """What becomes of the members of an enumeration."""
    ours = set(getattr(graphfuse, name).__members__)
    missing = [m for m in NAMES["enums"][name] if m not in ours]
    instead = "; ".join(f"`{m}`: {cudnn_names.MEMBERS[name][m]}" for m in missing)
    return Row(name, DIFFERS_, f"instead of {instead}") if missing else Row(name, SAME)


def render() -> str:
    """The page."""
    parts = dict(_parts())
    members_ = [members(name) for name in NAMES["enums"]]
    lines = [
        "# cuDNN compatibility",
        "",
        f"The tables have every public name of the graph API of cuDNN's frontend {NAMES['version']}. They say how",
        "graphfuse offers it under `import graphfuse as cudnn`. cuDNN's ready-made kernels for single models are not",
        "part of that API, and are left out. `examples/cudnn_samples` has scripts and notebooks in its names.",
        "",
        "Arguments may be given under cuDNN's names: `set_output(value=True)` means `set_output(is_output=True)`. One",
        "that asks for what is not here, such as `ctx=` or `sm_count=`, raises `GraphNotSupportedError`, which",
        "says what to use instead.",
        "",
        "| | means |",
        "|---|---|",
        "| same | a call with cuDNN's arguments, by name or in order, means the same |",
        "| differs | the name exists, with the stated difference. `refuses` an argument: it may be given as what it is "
        "by default, and nothing else |",
        "| not offered | the name raises `NotOfferedError`, an `AttributeError` that says what to use instead |",
        "",
        f"`{COMMAND}` writes this page from our signatures and a list of cuDNN's names. A test",
        "compares it with them.",
        "",
        "## How much is the same",
        "",
        *_totals({**parts, "Members of enumerations": members_}),
        "",
        *_arguments([row for found in parts.values() for row in found]),
        "",
        "## Where cuDNN is looser",
        "",
        "Let pass as well:",
        "",
        *(f"- {what};" for what in LET_PASS[:-1]),
        f"- {LET_PASS[-1]}.",
        "",
        "Refused here, because it hides a mistake:",
        "",
        "| what | why |",
        "|---|---|",
        *(f"| {what} | {why} |" for what, why in REFUSED.items()),
    ]
    for title, found in parts.items():
        lines += _table(title, found)
    lines += _table("Members of enumerations", members_)
    return "\n".join(lines) + "\n"


def _parts() -> Iterable[tuple[str, list[Row]]]:
    """Tables by title."""
    for section, (title, _, _) in SECTIONS.items():
        found = rows(section)
        if section == "pygraph":
            yield "`pygraph`: steps, plans, queries", [r for r in found if not _is_operation(r.name)]
            yield "`pygraph`: operations", [r for r in found if _is_operation(r.name)]
        else:
            yield title, found


def _totals(parts: Mapping[str, Sequence[Row]]) -> list[str]:
    lines = ["| names | all | same | differs | not offered |", "|---|--:|--:|--:|--:|"]
    counts = {title: [len(found), *_counted(found).values()] for title, found in parts.items()}
    counts["all of them"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return lines + [f"| {title} | {' | '.join(map(str, count))} |" for title, count in counts.items()]


def _counted(found: Sequence[Row]) -> dict[str, int]:
    return {verdict: sum(r.verdict == verdict for r in found) for verdict in (SAME, DIFFERS_, NOT_OFFERED)}


def _arguments(found: Sequence[Row]) -> list[str]:
    """Sentences that count cuDNN's named arguments."""
    taken = [takes for row in found for takes in row.takes.values()]
    offered = [takes for takes in taken if takes is not None]
    return [
        f"Those that are methods or functions have {len(taken)} named arguments. {sum(offered)} may be given by their",
        f"names, with their meaning: {_percent(sum(offered), len(taken))} of all, and "
        f"{_percent(sum(offered), len(offered))} of the {len(offered)} of names that are offered.",
        f"The other {len(offered) - sum(offered)} of these are refused, unless they ask for nothing.",
    ]


def _percent(some: int, every: int) -> str:
    return f"{100 * some // every} %"


def _is_operation(name: str) -> object:
    taken = NAMES["pygraph"][name]
    return name in OPS or (name != "__init__" and {"compute_data_type", "reshape_mode", "axis"}.intersection(taken))


def _table(title: str, found: Sequence[Row]) -> list[str]:
    summary = ", ".join(f"{n} {verdict}" for verdict, n in _counted(found).items() if n)
    cells = [f"| `{r.name}` | {r.verdict} | {r.how} |" for r in found]
    return ["", f"## {title}", "", f"{summary}.", "", "| name | | how, or instead |", "|---|---|---|", *cells]


if __name__ == "__main__":
    PATH.write_text(render())
