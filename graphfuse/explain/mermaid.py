"""An account as a Mermaid flowchart, which many Markdown viewers draw."""

import re

from graphfuse.explain import chart
from graphfuse.explain.account import Account


def mermaid(account: Account) -> str:
    """Mermaid source with a subgraph for each region, coloured by engine; nodes as boxes, tensors of the variant pack
    as rounded boxes."""
    lines = ["flowchart TD"]
    lines += [f'  {box}(["{_text(label)}"])' for box, label in chart.tensors(account)]
    for n, region in enumerate(account.regions):
        lines += [f'  subgraph r{n}["{_text(chart.title(region))}"]', *_boxes(account, region.nodes), "  end"]
    lines += _boxes(account, chart.alone(account))
    for start, port, end in chart.arrows(account):
        lines.append(f'  {start} -- "{_text(port)}" --> {end}' if port else f"  {start} --> {end}")
    by_engine = chart.colours(account)
    for n, region in enumerate(account.regions):
        colour = by_engine[region.engine]
        lines.append(f"  style r{n} fill:{colour.fill},stroke:{colour.line}")
    return "\n".join(lines)


def _boxes(account: Account, nodes: tuple[int, ...]) -> list[str]:
    return [f'    {box}["{_text(label)}"]' for box, label in chart.nodes(account, nodes)]


def _text(value: str) -> str:
    """`value` escaped for Mermaid: special characters as character codes."""
    return re.sub(r"[^\w .,:()\[\]-]", lambda m: "<br/>" if m[0] == "\n" else f"#{ord(m[0])};", value)
