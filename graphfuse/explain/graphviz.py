"""An account in DOT, the language of graphviz, and as the SVG that graphviz renders."""

import shutil
import subprocess

from graphfuse.base.errors import GraphvizError
from graphfuse.explain import chart
from graphfuse.explain.account import Account, count, printable


def dot(account: Account) -> str:
    """DOT source with a cluster for each region, coloured by engine; nodes as boxes, tensors of the variant pack as
    ellipses."""
    title = f"graph {printable(account.graph)} on {account.device} ({account.device_name})"
    if account.shown is not None:
        moved = f"{count(account.after.total)}; one kernel a node: {count(account.before.total)}"
        title = f"{title}\nplan {account.shown} moves {moved}"
    lines = [
        "digraph {",
        f"  graph [label={_text(title)}, labelloc=t, fontname=monospace, fontsize=12]",
        "  node [shape=box, style=filled, fillcolor=white, fontname=monospace, fontsize=12]",
        "  edge [fontname=monospace, fontsize=10]",
    ]
    lines += [f"  {box} [shape=ellipse, label={_text(label)}]" for box, label in chart.tensors(account)]
    by_engine = chart.colours(account)
    for n, region in enumerate(account.regions):
        colour = by_engine[region.engine]
        lines.append(f"  subgraph cluster{n} {{")
        lines.append(f'    label={_text(chart.title(region))}; style=filled; fillcolor="{colour.fill}"')
        lines += [f'    color="{colour.line}"', *_boxes(account, region.nodes), "  }"]
    lines += _boxes(account, chart.alone(account))
    lines += [f"  {start} -> {end} [label={_text(port)}]" for start, port, end in chart.arrows(account)]
    return "\n".join([*lines, "}"])


def svg(account: Account) -> str:
    """The SVG that graphviz's program `dot` renders. Raises GraphvizError if it is not installed, or fails."""
    program = shutil.which("dot")
    if program is None:
        raise GraphvizError(
            'explain: the format "svg" is drawn by graphviz, and its program dot is not on the PATH; install graphviz '
            '(apt-get install graphviz, brew install graphviz), or take the format "mermaid", "dot" or "html"'
        )
    done = subprocess.run([program, "-Tsvg"], input=dot(account), capture_output=True, encoding="utf-8")
    if done.returncode:
        raise GraphvizError(f"explain: {program} draws no picture: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _boxes(account: Account, nodes: tuple[int, ...]) -> list[str]:
    return [f"    {box} [label={_text(label)}]" for box, label in chart.nodes(account, nodes)]


def _text(value: str) -> str:
    """`value` in quotation marks, escaped for graphviz."""
    for plain, written in (("&", "&amp;"), ("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        value = value.replace(plain, written)
    return f'"{value}"'
