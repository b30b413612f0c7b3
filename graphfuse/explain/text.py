"""An account as plain text: what matched, which engines declined and why, what was chosen and why."""

from graphfuse.explain.account import Account, MatchEntry, PlanEntry, RegionEntry, VerdictEntry
from graphfuse.traffic import Traffic


def text(account: Account) -> str:
    """Several lines, without one at the end."""
    lines = [
        f"graph {account.graph!r} on {account.device} ({account.device_name}), {len(account.nodes)} nodes",
        "patterns",
        *(f"  {m.pattern} matches {account.names(m.nodes)}" for m in account.matches),
        *(f"  {_misfit(account, m)}" for m in account.misfits),
        *(f"  {line}" for line in account.left_out),
        *(f"  no pattern matches {account.names((i,))}" for i in account.unmatched),
    ]
    for mode in account.modes:
        lines.append(f"engines, mode {mode.mode}")
        lines += [f"  {_verdict(account, v)}" for v in mode.verdicts] or ["  none is asked in this mode"]
        if mode.regions:
            lines.append(f"  {mode.regions}")
        if mode.uncovered:
            lines.append(f"  nothing takes {', '.join(mode.uncovered)}")
    lines.append(f"plans ({len(account.plans)})")
    lines += [f"  {_plan(p)}" for p in account.plans] or ["  none"]
    if account.selected is not None:
        lines += _chosen(account, account.selected)
    if account.shown is not None:
        lines += [
            f"bytes moved by plan {account.shown}",
            f"  {_moved(account.after)}; one kernel a node: {_moved(account.before)}",
        ]
    return "\n".join(lines)


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
    lines = ["chosen", *(f"  {_region(account, region)}" for region in account.regions)]
    place = f"the {index} before it are barred or were passed over" if index else "it ranks first"
    order = f"rank goes by mode as given, then engine: {account.rank}; then tuned knobs before its own order of knobs"
    lines.append(f"  because {place}; {order}")
    return lines + [f"  note: {note}" for note in account.notes]


def _region(account: Account, r: RegionEntry) -> str:
    saved = sum(account.nodes[i].traffic.total for i in r.nodes) - r.traffic.total
    how = f"fused, pattern {r.pattern}, saves {saved} bytes" if r.fused else "node by node"
    return f"{r.knobs} runs {account.names(r.nodes)} ({how})" + (f"; knobs: {r.why}" if r.why else "")


def _moved(t: Traffic) -> str:
    return f"{t.read} read, {t.written} written"
