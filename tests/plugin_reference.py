"""docs/plugin-reference.md: what a plug-in may use, from the sources. Run it to write the page anew.

Python: classes, their fields and functions, with their docstrings. C++: what the headers declare for kernels, with the
comments above it.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docstrings import listed
from graphfuse import plugin
from graphfuse.ops import OPS, SPELLINGS

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "plugin-reference.md"
HEADERS = ROOT / "graphfuse" / "codegen" / "headers"
COMMAND = "python tests/plugin_reference.py"

PYTHON = {
    "Patterns": ("Pattern", "PatternGraph", "Match", "convex"),
    "The frozen graph": ("FrozenTensor", "Node", "Subgraph", "FrozenGraph"),
    "Engines": (
        "KernelEngine",
        "HostEngine",
        "Engine",
        "Served",
        "No",
        "NoKnobs",
        "Launch",
        "Address",
        "HostScalar",
        "Constant",
        "Scratch",
        "RowCount",
        "ByRows",
        "ProblemClass",
        "Prepared",
        "Site",
        "FrozenCall",
        "Device",
    ),
    "Kernel text": ("render", "template"),
    "Facts that are a row program": (
        "RowFacts",
        "row_facts",
        "RowProgram",
        "Store",
        "Emitter",
        "Chain",
        "Number",
        "renamed",
    ),
    "Checking": ("check", "listed"),
}
"""Names of graphfuse.plugin by subject, in the order in which an author meets them."""

ELSEWHERE = {"data_type", "heur_mode", "Buffers", "EVERYTHING"}
"""Names of users' graphs, and names of values that the others' texts say."""

VOCABULARY = {*OPS, *SPELLINGS}
"""Op methods, which ``pygraph`` documents."""

FIRST = ("platform", "types", "convert", "math", "simt", "reduce")
"""Headers that every author meets; the others follow by name."""
ONE_SIDED = ("fetch", "put", "GF_GPU_OR_CPU")
"""Declared for one compiler alone."""
OURS = ("host", "c_functions", "across", "along", "ranks", "rows")
"""Headers of the emulator and of the row engine, which promise nothing to others."""

_DECLARED = re.compile(r"GF_DEVICE\b|struct \w|enum class|using \w+ =|constexpr \w|#define GF_\w+\(")
_HIDDEN = re.compile(r"namespace (software|host|detail)\b")


@dataclass(frozen=True)
class Declaration:
    """What a header declares. text: on one line, without its body. comment: what stands above it, without slashes."""

    text: str
    comment: str


def declarations(header: str) -> list[Declaration]:
    """Those of a header's text, once each, in order: of what has one form for each compiler, the first."""
    found: dict[str, Declaration] = {}
    comment: list[str] = []
    hidden = depth = 0
    before = ""
    lines = iter(header.splitlines())
    for line in lines:
        if hidden:
            hidden = "}  // namespace" not in line
            continue
        if _HIDDEN.match(line):
            hidden = True
        outside = depth == 0
        depth = max(0, depth + _open(line))
        if not outside:
            comment = []
        elif line.startswith("///"):
            comment.append(line.removeprefix("///").strip())
        elif line.startswith("template"):
            before = line.strip()
        elif _DECLARED.match(line):
            while not re.search(r"[{;]|\\$|^#", line):
                more = next(lines)
                depth = max(0, depth + _open(more))
                line += " " + more.strip()
            text = _signature(line, before)
            if before != "template <>" and text not in found:
                found[text] = Declaration(text, " ".join(comment))
            comment, before = [], ""
        elif not line.strip().startswith(("#", "//")):
            comment = comment if line.startswith("///") else []
    kept = [d for d in found.values() if "GF_FROM" not in d.text and "Site site" not in d.text]
    return [d for d in kept if not re.search(rf"\b({'|'.join(ONE_SIDED)})\(", d.text)]


def _open(line: str) -> int:
    return 0 if line.startswith(("namespace", "}  // namespace", "extern")) else line.count("{") - line.count("}")


def _signature(line: str, template: str) -> str:
    macro = re.match(r"#define (GF_\w+\([^)]*\))", line)
    if macro:
        return macro[1]
    kept = line if line.startswith(("enum", "using", "constexpr")) else re.split(r"\s*\{", line, maxsplit=1)[0]
    kept = re.sub(r"GF_DEVICE |\s*\bGF_SITE_ONLY\b|\s*\bGF_SITE\b", "", kept)
    return " ".join(f"{template} {kept.rstrip(';')}".split())


def overview(header: str) -> str:
    """The comment that a header begins with."""
    lines = []
    for line in header.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return " ".join(lines).strip()


def render() -> str:
    """The page."""
    lines = [
        "# Plug-in reference",
        "",
        "This page has what plug-ins use: the names of `graphfuse.plugin`, then the headers of kernels.",
        "[Writing a plug-in](extending.md) says how they fit together.",
        "",
        f"`{COMMAND}` writes this page from the sources. A test compares it with them.",
    ]
    for subject, names in PYTHON.items():
        lines += ["", f"## {subject}"]
        for name in names:
            lines += ["", *_python(getattr(plugin, name), name)]
    lines += [
        "",
        "# Headers",
        "",
        'A kernel includes `"graphfuse/NAME.cuh"`, and so may its generated prelude. All names are in `namespace gf`.',
        "NVRTC compiles the text for a GPU, and a plain C++ compiler compiles it for the emulator. Functions without a",
        "comment do what their name says.",
    ]
    for name in (*FIRST, *sorted(_others())):
        text = (HEADERS / f"{name}.cuh").read_text()
        lines += ["", f"## `graphfuse/{name}.cuh`", "", overview(text), ""]
        for declaration in declarations(text):
            said = f": {declaration.comment}" if declaration.comment else ""
            lines.append(f"- `{declaration.text}`{said}")
    return "\n".join(lines) + "\n"


def _others() -> set[str]:
    return {path.stem for path in HEADERS.glob("*.cuh")} - set(FIRST) - set(OURS)


def _python(thing: object, name: str) -> Iterator[str]:
    doc = inspect.cleandoc(thing.__doc__ or "")
    if not inspect.isclass(thing):
        yield f"### `{name}{_parameters(thing)}`"
    elif dataclasses.is_dataclass(thing):
        yield f"### `{name}({', '.join(f.name for f in dataclasses.fields(thing))})`"
    else:
        yield f"### `{name}`"
    yield ""
    yield listed(doc, _names(thing)) if doc and not doc.startswith(f"{name}(") else "A record of these fields."
    members = vars(thing).items() if inspect.isclass(thing) else ()
    said = [line for member, value in members if member not in VOCABULARY for line in _member(member, value)]
    yield from ["", "It has:", "", *said] if said else []


def _names(thing: object) -> set[str]:
    """Of what a docstring may tell: parameters, fields, class attributes."""
    if not inspect.isclass(thing):
        return set(inspect.signature(thing).parameters)
    fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    return fields | set(inspect.get_annotations(thing))


def _member(name: str, value: object) -> Iterator[str]:
    of = getattr(value, "fget", None) or getattr(value, "func", None) or value
    if name.startswith("_") or not inspect.isfunction(of):
        return
    doc = " ".join(inspect.cleandoc(of.__doc__ or "").split())
    shown = f"`{name}`" if of is not value else f"`{name}{_parameters(of)}`"
    yield f"- {shown}: {doc}" if doc else f"- {shown}"


def _parameters(function: object) -> str:
    names = [str(p).partition(":")[0] for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return f"({', '.join(names)})"


if __name__ == "__main__":
    PATH.write_text(render())
