"""An account as a Mermaid flowchart, which many Markdown viewers draw."""

import re

from graphfuse.explain.account import Account, TensorEntry, count, printable
from graphfuse.explain.layout import drawn
from graphfuse.explain.palette import colours


def mermaid(account: Account) -> str:
    """A subgraph for each region, coloured by engine; nodes as boxes, tensors of the variant pack as rounded ones."""
    lines = ["flowchart TD"]
    made_by = {t: i for i, node in enumerate(account.nodes) for _, t in node.writes}
    for t in account.tensors:
        if drawn(t):
            lines.append(f'  t{t.id}(["{_text(_tensor(t))}"])')
    placed = {i for region in account.regions for i in region.nodes}
    for n, region in enumerate(account.regions):
        moved = f"{count(region.traffic.read)} read, {count(region.traffic.written)} written"
        lines.append(f'  subgraph r{n}["{_text(f"{region.engine}: {moved}")}"]')
        lines += [f"    {_box(account, i)}" for i in region.nodes]
        lines.append("  end")
    lines += [f"  {_box(account, i)}" for i in range(len(account.nodes)) if i not in placed]
    for i, node in enumerate(account.nodes):
        for port, t in node.reads:
            if not drawn(account.tensor(t)) and t not in made_by:
                continue  # a constant
            start = f"t{t}" if drawn(account.tensor(t)) else f"n{made_by[t]}"
            lines.append(f'  {start} -- "{_text(port)}" --> n{i}')
        lines += [f"  n{i} --> t{t}" for _, t in node.writes if drawn(account.tensor(t))]
    by_engine = colours(account)
    for n, region in enumerate(account.regions):
        colour = by_engine[region.engine]
        lines.append(f"  style r{n} fill:{colour.fill},stroke:{colour.line}")
    return "\n".join(lines)


def _box(account: Account, i: int) -> str:
    node = account.nodes[i]
    return f'n{i}["{_text(printable(node.name))}<br/>{_text(node.op)}"]'


def _tensor(t: TensorEntry) -> str:
    return f"{printable(t.name)} {t.dtype} {list(t.dim)}"


def _text(value: str) -> str:
    """`value` so that Mermaid shows it and reads nothing into it: by number what is no letter, digit or plain mark."""
    return re.sub(r"[^\w .,:()\[\]-]", lambda m: f"#{ord(m[0])};", value)
