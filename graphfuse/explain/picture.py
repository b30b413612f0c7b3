"""An account as a self-contained SVG, without script, style sheet or font."""

import re
from html import escape as _escape

from graphfuse.explain.account import Account, NodeEntry, RegionEntry, TensorEntry, count, printable
from graphfuse.explain.layout import PADDING, Box, Layout, Line, Vertex, arrange, drawn
from graphfuse.explain.palette import GREY, Colour, colours
from graphfuse.traffic import Traffic

_LETTER = 7.3  # pixels of a letter of 12 pixels height, of any fixed-width font
_HEIGHT = 40
_HEADER = 62
_LONGEST = 42
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _SOFT, _EDGE = "#1b1b1b", "#555555", "#8a8a8a"


def svg(account: Account) -> str:
    """Nodes in regions coloured by engine, tensors of the variant pack, bytes moved before and after fusion."""
    labels = _labels(account)
    sizes = {v: (max(map(len, lines)) * _LETTER + 20, float(_HEIGHT)) for v, lines in labels.items()}
    layout = arrange(account, sizes)
    head = _header(account)
    width = max(layout.width, max(len(line) for line in head) * _LETTER + 3 * PADDING)
    shift = (width - layout.width) / 2
    height = layout.height + _HEADER + PADDING
    bands = _bands(account, layout)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{_FONT}" font-size="12">',
        f"<title>{escape(head[0])}</title>",
        '<defs><marker id="graphfuse-arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{_EDGE}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{PADDING}" y="22" font-size="14" font-weight="bold" fill="{_INK}">{escape(head[0])}</text>',
        f'<text x="{PADDING}" y="42" fill="{_SOFT}">{escape(head[1])}</text>',
        f'<g transform="translate({shift:.1f},{_HEADER})">',
        *(_ground(box, colour) for _, box, colour in bands),
        *(_line(line) for line in layout.lines),
        *(_title(region, box, colour) for region, box, colour in bands),
        *(_vertex(account, v, box, labels[v]) for v, box in layout.boxes.items()),
        "</g></svg>",
    ]
    return "\n".join(parts)


def escape(value: str) -> str:
    """`value` as XML shows it, in text or between quotation marks. XML has no place for control characters at all."""
    return _escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))


def moved(t: Traffic) -> str:
    return f"{count(t.read)} read, {count(t.written)} written"


def saving(account: Account) -> str:
    """How many bytes the plan shown moves, beside one kernel a node."""
    if account.shown is None:
        return f"no plan runs it; one kernel a node would move {count(account.before.total)}"
    before, after = account.before.total, account.after.total
    times = f", {before / after:.2f} times as many" if after and before != after else ""
    return f"plan {account.shown} moves {count(after)}; one kernel a node would move {count(before)}{times}"


def _header(account: Account) -> tuple[str, str]:
    name = f"graph {printable(account.graph)} on {account.device} ({account.device_name})"
    return _cut(name, 2 * _LONGEST), saving(account)


def _labels(account: Account) -> dict[Vertex, tuple[str, str]]:
    found: dict[Vertex, tuple[str, str]] = {}
    for t in account.tensors:
        if drawn(t):
            found["tensor", t.id] = (_cut(printable(t.name)), _kind(t))
    for i, node in enumerate(account.nodes):
        made = " ".join(_kind(account.tensor(t)) for _, t in node.writes[:1])
        more = " ..." if len(node.writes) > 1 else ""
        found["node", i] = (_cut(printable(node.name)), _cut(f"{node.op} \u2192 {made}{more}"))
    return found


def _kind(t: TensorEntry) -> str:
    return f"{t.dtype.lower()} {'x'.join(map(str, t.dim))}"


def _cut(value: str, longest: int = _LONGEST) -> str:
    return value if len(value) <= longest else value[: longest - 1] + "\u2026"


def _bands(account: Account, layout: Layout) -> list[tuple[RegionEntry | None, Box, Colour]]:
    by_engine = colours(account)
    regions = [(None if band.region is None else account.regions[band.region], band.box) for band in layout.bands]
    return [(region, box, GREY if region is None else by_engine[region.engine]) for region, box in regions]


def _ground(box: Box, colour: Colour) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" '
        f'fill="{colour.fill}" stroke="{colour.line}"/>'
    )


def _title(region: RegionEntry | None, box: Box, colour: Colour) -> str:
    """Over the lines that pass it, with an edge of the ground's colour."""
    if region is None:
        title, full = "no plan", "no plan runs these nodes"
    else:
        how = f"pattern {region.pattern}" if region.fused else "node by node"
        title = f"{region.engine}, {how}: {moved(region.traffic)}"
        full = f"{region.knobs}\n{region.why}" if region.why else region.knobs
    room = int((box.width - 2 * PADDING) / _LETTER)
    return (
        f'<text x="{box.x + 10:.1f}" y="{box.y + 18:.1f}" fill="{colour.line}" stroke="{colour.fill}" '
        f'stroke-width="4" paint-order="stroke">{escape(_cut(title, room))}<title>{escape(full)}</title></text>'
    )


def _line(line: Line) -> str:
    (x, y), *rest = line.points
    path = [f"M{x:.1f},{y:.1f}"]
    for n, (to_x, to_y) in enumerate(rest):
        if n % 2 == 0:  # between layers
            bend = (to_y - y) / 2
            path.append(f"C{x:.1f},{y + bend:.1f} {to_x:.1f},{to_y - bend:.1f} {to_x:.1f},{to_y:.1f}")
        else:  # past a layer
            path.append(f"L{to_x:.1f},{to_y:.1f}")
        x, y = to_x, to_y
    return f'<path d="{" ".join(path)}" fill="none" stroke="{_EDGE}" marker-end="url(#graphfuse-arrow)"/>'


def _vertex(account: Account, v: Vertex, box: Box, labels: tuple[str, str]) -> str:
    kind, number = v
    if kind == "node":
        round_, dash, full = 3, "", _node_title(account, account.nodes[number])
    else:
        t = account.tensor(number)
        round_, dash = _HEIGHT // 2, ' stroke-dasharray="4 3"' if t.role == "scalar" else ""
        full = f"{t.role} {printable(t.name)}: {t.dtype} {list(t.dim)}, {count(t.nbytes)}"
    return (
        f"<g><title>{escape(full)}</title>"
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{round_}" '
        f'fill="#ffffff" stroke="{_INK}"{dash}/>'
        f'<text x="{box.middle:.1f}" y="{box.y + 16:.1f}" text-anchor="middle" fill="{_INK}">{escape(labels[0])}</text>'
        f'<text x="{box.middle:.1f}" y="{box.y + 32:.1f}" text-anchor="middle" fill="{_SOFT}" font-size="11">'
        f"{escape(labels[1])}</text></g>"
    )


def _node_title(account: Account, node: NodeEntry) -> str:
    alone = f"{moved(node.traffic)} as a kernel of its own"
    reads = [(port, account.tensor(t)) for port, t in node.reads]
    constants = "".join(f"\n{port} = {t.value:g}" for port, t in reads if t.value is not None)
    return f"{printable(node.name)} ({node.op}, computes in {node.compute}): {alone}{constants}"
