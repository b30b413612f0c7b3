"""An account as text: matches, engines that declined and why, the chosen plan and why."""

from collections.abc import Iterator

from graphfuse.base.wording import counted
from graphfuse.explain.account import Account, MatchEntry, PlanEntry, RegionEntry, VerdictEntry
from graphfuse.planning.separations import Separation
from graphfuse.planning.traffic import Traffic


def text(account: Account) -> str:
    """The account as text of several lines, without a line break at the end."""
    lines = [title(account)]
    for heading, about in sections(account):
        lines += [heading, *(f"  {line}" for line in about)]
    return "\n".join(lines)


def title(account: Account) -> str:
    """The first line of the text."""
    return f"graph {account.graph!r} on {account.device} ({account.device_name}), {counted(len(account.nodes), 'node')}"


def sections(account: Account) -> Iterator[tuple[str, list[str]]]:
    """Pairs (heading, lines) of each section."""
    found = [f"{m.pattern} matches {account.names(m.nodes)}" for m in account.matches]
    found += [_misfit(account, m) for m in account.misfits]
    yield (
        "patterns",
        [*found, *account.left_out, *(f"no pattern matches {account.names((i,))}" for i in account.unmatched)],
    )
    for mode in account.modes:
        found = [_verdict(account, v) for v in mode.verdicts] or ["none is asked in this mode"]
        found += [mode.regions] if mode.regions else []
        found += [f"nothing takes {', '.join(mode.uncovered)}"] if mode.uncovered else []
        yield f"engines, mode {mode.mode}", found
    yield f"plans ({len(account.plans)})", [_plan(p) for p in account.plans] or ["none"]
    if account.selected is not None:
        yield "chosen", _chosen(account, account.selected)
    if account.apart:
        yield f"why plan {account.shown} has {len(account.regions)} parts", [_apart(account, a) for a in account.apart]
    if account.shown is not None:
        moved = f"{_moved(account.after)}; one kernel a node: {_moved(account.before)}"
        yield f"bytes moved by plan {account.shown}", [moved]


def _misfit(account: Account, m: MatchEntry) -> str:
    return (
        f"{m.pattern} fits {account.names(m.nodes)}, but {m.why}" if m.nodes else f"{m.pattern} is not matched: {m.why}"
    )


def _verdict(account: Account, v: VerdictEntry) -> str:
    if v.why is None:
        return f"{v.engine} can run {account.names(v.nodes)}"
    return f"{v.engine} declines {account.names(v.nodes)}: {v.why}"


def _plan(p: PlanEntry) -> str:
    state = f"barred: {p.reason}" if p.reason else p.state
    return f"{p.index}: {p.name}, {p.workspace_bytes} bytes of workspace ({state})"


def _chosen(account: Account, index: int) -> list[str]:
    place = f"the {index} before it are barred or were passed over" if index else "it ranks first"
    order = f"rank goes by mode as given, then engine: {account.rank}; then tuned knobs before its own order of knobs"
    notes = (f"note: {note}" for note in account.notes)
    return [*(_region(account, r) for r in account.regions), f"because {place}; {order}", *notes]


def _region(account: Account, r: RegionEntry) -> str:
    saved = sum(account.nodes[i].traffic.total for i in r.nodes) - r.traffic.total
    how = f"fused, pattern {r.pattern}, saves {saved} bytes" if r.fused else "node by node"
    return f"{r.knobs} runs {account.names(r.nodes)} ({how})" + (f"; knobs: {r.why}" if r.why else "")


def _apart(account: Account, a: Separation) -> str:
    one, other = (account.names(account.regions[n].nodes) for n in (a.part, a.other))
    return f"{one} without {other}: {a.why}"


def _moved(t: Traffic) -> str:
    return f"{t.read} read, {t.written} written"
