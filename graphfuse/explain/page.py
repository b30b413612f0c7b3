"""An account as one self-contained HTML page: picture, regions, reasons, plans."""

from collections.abc import Iterable, Sequence

from graphfuse.explain.account import Account, count, printable
from graphfuse.explain.palette import colours
from graphfuse.explain.picture import escape, moved, svg

_PLANS = 50
"""Plans that are listed; there may be hundreds, which differ in knobs."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #ffffff; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #dddddd;
  overflow-wrap: anywhere; }
th { white-space: nowrap; } td + td { min-width: 5em; }
tr.selected { font-weight: bold; } tr.barred { color: #777777; }
"""


def html(account: Account) -> str:
    """The page, as well-formed XML too. It has no script and refers to nothing outside of itself."""
    title = f"graph {printable(account.graph)} on {account.device} ({account.device_name})"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<figure>{svg(account)}</figure>",
        *_regions(account),
        *_nodes(account),
        *_declined(account),
        *_plans(account),
        *_notes(account),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _regions(account: Account) -> Iterable[str]:
    if account.regions:
        by_engine = colours(account)
        rows = []
        for n, r in enumerate(account.regions):
            colour = by_engine[r.engine]
            mark = f'<td style="background:{colour.fill};color:{colour.line}">{escape(r.engine)}</td>'
            how = f"fused, pattern {r.pattern}" if r.fused else "node by node"
            cells = (account.names(r.nodes), how, r.knobs, r.why, moved(r.traffic))
            rows.append(f"<tr><td>{n}</td>{mark}{''.join(map(_cell, cells))}</tr>")
        yield "<h2>Regions, in the order in which they run</h2>"
        yield _table(("", "engine", "nodes", "how", "plan", "knobs", "bytes"), rows)
    yield from (f"<p>Mode {mode.mode}: {escape(mode.regions)}.</p>" for mode in account.modes if mode.regions)


def _nodes(account: Account) -> Iterable[str]:
    rows = []
    for node in account.nodes:
        made = ", ".join(_tensor(account, t) for _, t in node.writes)
        cells = (printable(node.name), node.op, node.compute, made, moved(node.traffic))
        rows.append(f"<tr>{''.join(map(_cell, cells))}</tr>")
    yield "<h2>Nodes</h2>"
    yield _table(("node", "op", "computes in", "makes", "bytes, as a kernel of its own"), rows)


def _declined(account: Account) -> Iterable[str]:
    found = [(account.names(m.nodes), f"pattern {m.pattern}", m.why or "") for m in account.misfits]
    found += [(account.names((i,)), "", f"no pattern matches {account.names((i,))}") for i in account.unmatched]
    found += [("", "plug-ins", line) for line in account.left_out]
    for mode in account.modes:
        asked = f"mode {mode.mode}"
        found += [(account.names(v.nodes), f"{v.engine}, {asked}", v.why) for v in mode.verdicts if v.why is not None]
        found += [(name, asked, "no engine takes it") for name in mode.uncovered]
    if found:
        yield "<h2>What declined, and why</h2>"
        rows = [f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in found]
        yield _table(("nodes", "who", "reason"), rows)


def _plans(account: Account) -> Iterable[str]:
    yield f"<h2>Plans ({len(account.plans)})</h2>"
    if account.plans:
        rows = []
        for p in account.plans[:_PLANS]:
            cells = (str(p.index), p.name, count(p.workspace_bytes), p.reason or p.state)
            rows.append(f'<tr class="{p.state}">{"".join(map(_cell, cells))}</tr>')
        yield _table(("", "plan", "workspace", "state"), rows)
    if len(account.plans) > _PLANS:
        yield f"<p>and {len(account.plans) - _PLANS} more.</p>"


def _notes(account: Account) -> Iterable[str]:
    if account.notes:
        yield "<h2>Numerical notes</h2>"
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in account.notes) + "</ul>"


def _tensor(account: Account, number: int) -> str:
    t = account.tensor(number)
    return f"{printable(t.name)} {t.dtype} {list(t.dim)}"


def _cell(value: str) -> str:
    return f"<td>{escape(value)}</td>"


def _table(head: Sequence[str], rows: Iterable[str]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>"
