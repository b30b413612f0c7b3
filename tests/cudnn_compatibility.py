"""docs/cudnn-compatibility.md: every public name of cuDNN's frontend 1.32 beside ours. Run it to write the page anew.

The names and parameters stand in cudnn_1_32.json. What is the same, and where parameters differ, is read from our own
objects; only what signatures do not show is said by hand, in DIFFERS.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        "execute": "refuses entries that tell of a mistake, see below, and other shapes than those of the graph or the "
        "overrides; overrides change extents of leading axes, and strides may be left out",
        "get_engine_and_knobs_at_index": "an engine's name and a dict of its knobs",
        "get_knobs_for_engine": "the type of a knob is its name",
        "key": "a text, which node order and names do not change; after `validate`",
        "nodes": "a list of records",
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
    },
    "Graph": {
        "__init__": "without a handle it runs on the current stream, as with `auto`; arrays of any library",
        "set_io_tuples": "each tensor once",
    },
}
"""What a signature does not show, by section and name."""

ALSO: Mapping[str, str] = {"tensor_dict": "variant_pack"}
"""cuDNN's keywords for parameters of other names, beside those that methods say themselves."""

SECTIONS: Mapping[str, tuple[str, Callable[[], object], Mapping[str, str]]] = {
    "module": ("The module", lambda: graphfuse, cudnn_names.MODULE),
    "pygraph": ("`pygraph`", graphfuse.pygraph, cudnn_names.PYGRAPH),
    "Tensor": ("`Tensor`", lambda: graphfuse.pygraph().tensor([1]), cudnn_names.TENSOR),
    "Graph": ("`Graph`, the wrapper", lambda: graphfuse.Graph, {}),
}
"""By section: its title, what has the names, and what takes the place of those that are not there."""


@dataclass(frozen=True)
class Row:
    name: str
    verdict: str
    how: str = ""


def rows(section: str) -> list[Row]:
    """What becomes of each name of a section."""
    _, owner, instead = SECTIONS[section]
    having = owner()
    return [_row(section, name, theirs, having, instead) for name, theirs in NAMES[section].items()]


def _row(section: str, name: str, theirs: list[str] | None, having: object, instead: Mapping[str, str]) -> Row:
    said = DIFFERS[section].get(name, "")
    if said.startswith("a module"):
        return Row(name, DIFFERS_, said)
    if name == "__init__":
        ours = getattr(type(having) if section == "pygraph" else having, name)
    elif not hasattr(having, name):
        return Row(name, NOT_OFFERED, instead[name])
    else:
        ours = getattr(having, name)
    parameters = "" if theirs is None or not callable(ours) else compared(theirs, ours)
    how = "; ".join(filter(None, (parameters, said)))
    return Row(name, DIFFERS_ if how else SAME, how)


def compared(theirs: list[str], ours: Callable[..., object]) -> str:
    """How our parameters differ from those of cuDNN; empty if a call with them, by name or in order, means the same.
    What stands behind "*" is given by name alone."""
    found = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
    any_name = any(p.kind is p.VAR_KEYWORD for p in found)
    names = [p.name for p in found if p.kind is not p.VAR_KEYWORD]
    also = ALSO | getattr(ours, "also", {})
    theirs = [also.get(name, name) for name in theirs]
    in_order = theirs[: theirs.index("*")] if "*" in theirs else theirs
    missing = [f"`{name}`" for name in theirs if name not in (*names, "*") and not any_name]
    if not missing and (any_name or names[: len(in_order)] == in_order):
        return ""
    without = f"without {', '.join(missing)}; " if missing else ""
    return f"{without}takes ({', '.join(names)})"


def members(name: str) -> Row:
    """What becomes of the members of an enumeration."""
    ours = set(getattr(graphfuse, name).__members__)
    missing = [m for m in NAMES["enums"][name] if m not in ours]
    instead = "; ".join(f"`{m}`: {cudnn_names.MEMBERS[name][m]}" for m in missing)
    return Row(name, DIFFERS_, f"instead of {instead}") if missing else Row(name, SAME)


def render() -> str:
    """The page."""
    lines = [
        "# cuDNN compatibility",
        "",
        f"The tables have every public name of the graph API of cuDNN's frontend {NAMES['version']}. They say how",
        "graphfuse offers it under `import graphfuse as cudnn`. cuDNN's ready-made kernels for single models are not",
        "part of that API, and are left out. `examples/cudnn_samples` has scripts and notebooks in its names.",
        "",
        "Arguments may be given under cuDNN's names: `set_output(value=True)` means `set_output(is_output=True)`. One",
        "that asks for what is not here, such as `ctx=` or `alignment_value=`, raises `GraphNotSupportedError`, which",
        "says what to use instead.",
        "",
        "| | means |",
        "|---|---|",
        "| same | a call with cuDNN's arguments, by name or in order, means the same |",
        "| differs | the name exists, with the stated difference |",
        "| not offered | the name raises `NotOfferedError`, an `AttributeError` that says what to use instead |",
        "",
        f"`{COMMAND}` writes this page from our signatures and a list of cuDNN's names. A test",
        "compares it with them.",
    ]
    for section, (title, _, _) in SECTIONS.items():
        found = rows(section)
        if section == "pygraph":
            lines += _table("`pygraph`: steps, plans, queries", [r for r in found if not _is_operation(r.name)])
            lines += _table("`pygraph`: operations", [r for r in found if _is_operation(r.name)])
        else:
            lines += _table(title, found)
    lines += _table("Members of enumerations", [members(name) for name in NAMES["enums"]])
    return "\n".join(lines) + "\n"


def _is_operation(name: str) -> object:
    taken = NAMES["pygraph"][name]
    return name in OPS or (name != "__init__" and {"compute_data_type", "reshape_mode", "axis"}.intersection(taken))


def _table(title: str, found: list[Row]) -> list[str]:
    count = {verdict: sum(r.verdict == verdict for r in found) for verdict in (SAME, DIFFERS_, NOT_OFFERED)}
    summary = ", ".join(f"{n} {verdict}" for verdict, n in count.items() if n)
    cells = [f"| `{r.name}` | {r.verdict} | {r.how} |" for r in found]
    return ["", f"## {title}", "", f"{summary}.", "", "| name | | how, or instead |", "|---|---|---|", *cells]


if __name__ == "__main__":
    PATH.write_text(render())
