"""An account as a self-contained SVG, without script, style sheet or font."""

import re
from html import escape as _escape

from graphfuse.explain.account import Account, NodeEntry, RegionEntry, TensorEntry, count, printable
from graphfuse.explain.layout import PADDING, Box, Layout, Line, Vertex, arrange, drawn
from graphfuse.explain.palette import GREY, Colour, colours
from graphfuse.traffic import Traffic

_LETTER, _HEAD_LETTER = 7.3, 8.5  # pixels of a letter of 12 and of 14 pixels height, of any fixed-width font
_LINE_HEIGHT, _HEAD_HEIGHT = 16, 20
_LONGEST, _MOST = 42, 4  # letters of a line, lines of a name
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _SOFT, _EDGE = "#1b1b1b", "#555555", "#8a8a8a"


def svg(account: Account) -> str:
    """Nodes in regions coloured by engine, tensors of the variant pack, bytes moved before and after fusion."""
    labels = _labels(account)
    sizes = {v: _size(label) for v, label in labels.items()}
    titles = [*map(_region_title, account.regions), _region_title(None)]
    layout = arrange(account, sizes, max(map(len, titles)) * _LETTER + 20)
    name, saved = _wrapped(_graph(account), 2 * _LONGEST), saving(account)
    width = max(layout.width, 3 * PADDING + max(len(saved) * _LETTER, *(len(line) * _HEAD_LETTER for line in name)))
    shift = (width - layout.width) / 2
    top = (len(name) + 1) * _HEAD_HEIGHT
    height = top + layout.height + 3 * PADDING
    bands = _bands(account, layout)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{_FONT}" font-size="12">',
        f"<title>{escape(_graph(account))}</title>",
        '<defs><marker id="graphfuse-arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{_EDGE}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        *(
            f'<text x="{PADDING}" y="{22 + n * _HEAD_HEIGHT}" font-size="14" font-weight="bold" fill="{_INK}">'
            f"{escape(line)}</text>"
            for n, line in enumerate(name)
        ),
        f'<text x="{PADDING}" y="{top + 2}" fill="{_SOFT}">{escape(saved)}</text>',
        f'<g transform="translate({shift:.1f},{top + PADDING + 6})">',
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


def _graph(account: Account) -> str:
    return f"graph {printable(account.graph)} on {account.device} ({account.device_name})"


Label = tuple[tuple[str, ...], tuple[str, ...]]
"""The lines of a name, and those of what it is."""


def _labels(account: Account) -> dict[Vertex, Label]:
    found: dict[Vertex, Label] = {}
    for t in account.tensors:
        if drawn(t):
            found["tensor", t.id] = (_wrapped(printable(t.name)), _wrapped(_kind(t)))
    for i, node in enumerate(account.nodes):
        made = " ".join(_kind(account.tensor(t)) for _, t in node.writes[:1])
        more = " ..." if len(node.writes) > 1 else ""
        found["node", i] = (_wrapped(printable(node.name)), _wrapped(f"{node.op} \u2192 {made}{more}"))
    return found


def _size(label: Label) -> tuple[float, float]:
    lines = [line for part in label for line in part]
    return max(map(len, lines)) * _LETTER + 20, len(lines) * _LINE_HEIGHT + 8.0


def _kind(t: TensorEntry) -> str:
    return f"{t.dtype.lower()} {'x'.join(map(str, t.dim))}"


def _wrapped(value: str, longest: int = _LONGEST) -> tuple[str, ...]:
    """Lines of at most `longest` letters, broken after a separator where one is near the end. What a few lines do not
    hold is cut off."""
    lines = []
    while len(value) > longest and len(lines) < _MOST - 1:
        at = 1 + max(value.rfind(separator, 0, longest) for separator in " ._/:,-")
        at = at if at > longest // 2 else longest
        lines.append(value[:at].rstrip())
        value = value[at:].lstrip()
    return (*lines, _cut(value, longest))


def _cut(value: str, longest: int) -> str:
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
        full = "no plan runs these nodes"
    else:
        full = f"{region.knobs}\n{region.why}" if region.why else region.knobs
    return (
        f'<text x="{box.x + 10:.1f}" y="{box.y + 18:.1f}" fill="{colour.line}" stroke="{colour.fill}" '
        f'stroke-width="4" paint-order="stroke">{escape(_region_title(region))}<title>{escape(full)}</title></text>'
    )


def _region_title(region: RegionEntry | None) -> str:
    if region is None:
        return "no plan"
    how = f"pattern {region.pattern}" if region.fused else "node by node"
    return _cut(f"{region.engine}, {how}: {moved(region.traffic)}", 3 * _LONGEST)


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


def _vertex(account: Account, v: Vertex, box: Box, label: Label) -> str:
    kind, number = v
    if kind == "node":
        round_, dash, full = 3, "", _node_title(account, account.nodes[number])
    else:
        t = account.tensor(number)
        round_, dash = 20, ' stroke-dasharray="4 3"' if t.role == "scalar" else ""
        full = f"{t.role} {printable(t.name)}: {t.dtype} {list(t.dim)}, {count(t.nbytes)}"
    name, what = label
    lines = [(f'fill="{_INK}"', line) for line in name] + [(f'fill="{_SOFT}" font-size="11"', line) for line in what]
    return (
        f"<g><title>{escape(full)}</title>"
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{round_}" '
        f'fill="#ffffff" stroke="{_INK}"{dash}/>'
        f"{''.join(_label_line(box, n, *line) for n, line in enumerate(lines))}</g>"
    )


def _label_line(box: Box, n: int, style: str, text: str) -> str:
    y = box.y + (n + 1) * _LINE_HEIGHT
    return f'<text x="{box.middle:.1f}" y="{y:.1f}" text-anchor="middle" {style}>{escape(text)}</text>'


def _node_title(account: Account, node: NodeEntry) -> str:
    alone = f"{moved(node.traffic)} as a kernel of its own"
    reads = [(port, account.tensor(t)) for port, t in node.reads]
    constants = "".join(f"\n{port} = {t.value:g}" for port, t in reads if t.value is not None)
    return f"{printable(node.name)} ({node.op}, computes in {node.compute}): {alone}{constants}"
