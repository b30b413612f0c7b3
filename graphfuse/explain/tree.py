"""An account as a tree of rich, for the terminal."""

import io
from typing import TYPE_CHECKING

from graphfuse.explain.account import Account, count, printable
from graphfuse.explain.text import sections, title

if TYPE_CHECKING:
    from rich.tree import Tree


def tree(account: Account) -> "Tree":
    """The regions with their nodes, then the sections of the text, for ``rich.print``. Names are never interpreted as
    markup."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(title(account), "bold"))
    for region in account.regions:
        moved = f"{count(region.traffic.read)} read, {count(region.traffic.written)} written"
        branch = root.add(Text(f"{region.knobs}, {moved}", "cyan"))
        for node in (account.nodes[i] for i in region.nodes):
            made = (account.tensor(t) for _, t in node.writes)
            shown = ", ".join(f"{printable(t.name)} {t.dtype} {list(t.dim)}" for t in made)
            branch.add(Text(f"{printable(node.name)} ({node.op}) -> {shown}"))
    for heading, lines in sections(account):
        branch = root.add(Text(heading, "yellow"))
        for line in lines:
            branch.add(Text(line))
    return root


def plain_tree(account: Account, width: int = 120) -> str:
    """The tree as text, without colours."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(tree(account))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())
