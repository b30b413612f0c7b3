"""An account as a tree for the terminal, by rich."""

import io
from typing import TYPE_CHECKING

from graphfuse.explain.account import Account, count, printable
from graphfuse.traffic import Traffic

if TYPE_CHECKING:
    from rich.tree import Tree


def tree(account: Account) -> "Tree":
    """For ``rich.print``. Names stand as they are: none is taken for markup."""
    from rich.text import Text
    from rich.tree import Tree

    def line(*parts: str, style: str = "") -> Text:
        return Text("".join(parts), style)

    root = Tree(line(f"graph {account.graph!r} on {account.device} ({account.device_name})", style="bold"))
    if account.shown is not None:
        moved = f"plan {account.shown} moves {count(account.after.total)}; one kernel a node: "
        root.add(line(moved, count(account.before.total)))
    for region in account.regions:
        how = f"pattern {region.pattern}" if region.fused else "node by node"
        branch = root.add(line(region.knobs, f" ({how}), {_moved(region.traffic)}", style="cyan"))
        for i in region.nodes:
            node = account.nodes[i]
            made = ", ".join(_made(account, t) for _, t in node.writes)
            branch.add(line(printable(node.name), f" ({node.op}) -> ", made))
        if region.why:
            branch.add(line("knobs: ", region.why, style="dim"))
    for mode in account.modes:
        if mode.regions:
            root.add(line(f"mode {mode.mode}: {mode.regions}", style="dim"))
    against = [line(account.names(m.nodes), f": pattern {m.pattern}: {m.why}") for m in account.misfits]
    against += [line(f"no pattern matches {account.names((i,))}") for i in account.unmatched]
    against += [line(text) for text in account.left_out]
    for mode in account.modes:
        declined = [v for v in mode.verdicts if v.why is not None]
        against += [line(f"{account.names(v.nodes)}: {v.engine}, mode {mode.mode}: {v.why}") for v in declined]
        against += [line(f"mode {mode.mode}: nothing takes {name}") for name in mode.uncovered]
    if against:
        branch = root.add(line("declined", style="yellow"))
        for reason in against:
            branch.add(reason)
    if account.notes:
        branch = root.add(line("notes", style="dim"))
        for note in account.notes:
            branch.add(line(note, style="dim"))
    return root


def plain_tree(account: Account, width: int = 120) -> str:
    """The tree as text, without colours."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(tree(account))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())


def _made(account: Account, number: int) -> str:
    t = account.tensor(number)
    return f"{printable(t.name)} {t.dtype} {list(t.dim)}"


def _moved(t: Traffic) -> str:
    return f"{count(t.read)} read, {count(t.written)} written"
