"""Places the boxes of a picture: in layers from top to bottom, with a band of layers for each region.

A layer is ordered by the mean place of its neighbours (Sugiyama's method). A line that crosses layers has a place in
each, so it runs beside boxes and not through them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphfuse.explain.account import Account, TensorEntry

GAP, ROW_GAP, PADDING, TITLE = 18, 34, 16, 24
PASSING = 10
"""Width of a place at which a line passes a layer."""

_SWEEPS, _STRAIGHTENING = 8, 24
_LINE_WEIGHT = 4.0

Vertex = tuple[str, int]
"""("node", its number) or ("tensor", its id); ("line", a number) for a place at which a line passes."""


@dataclass(frozen=True)
class Box:
    """Left, top, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True)
class Band:
    """The ground of a region: its number, or None for nodes that no plan runs."""

    region: int | None
    box: Box


@dataclass(frozen=True)
class Line:
    """From a tensor or node to the next, through points."""

    start: Vertex
    end: Vertex
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    width: float
    height: float
    boxes: Mapping[Vertex, Box]
    bands: tuple[Band, ...]
    lines: tuple[Line, ...]


def drawn(t: TensorEntry) -> bool:
    """Whether a tensor has a box of its own: what execute gets a value for."""
    return t.role != "virtual" and t.value is None


def arrange(account: Account, sizes: Mapping[Vertex, tuple[float, float]], least: float = 0.0) -> Layout:
    """Places for the nodes and for the tensors that are ``drawn``. sizes: width and height of each. least: the width
    of a region's ground, at least."""
    layers, bands = _layers(account)
    edges = _edges(account)
    layer_of = {v: n for n, layer in enumerate(layers) for v in layer}
    widths = {v: size[0] for v, size in sizes.items()}
    chains: list[list[Vertex]] = []
    for start, end in edges:
        chain = [start]
        for n in range(layer_of[start] + 1, layer_of[end]):
            place = ("line", len(widths))
            widths[place] = PASSING
            layers[n].append(place)
            chain.append(place)
        chains.append([*chain, end])
    above: dict[Vertex, list[Vertex]] = {v: [] for layer in layers for v in layer}
    below: dict[Vertex, list[Vertex]] = {v: [] for layer in layers for v in layer}
    for chain in chains:
        for a, b in zip(chain, chain[1:], strict=False):
            above[b].append(a)
            below[a].append(b)
    middles = _ordered(layers, above, below, widths)
    left = min((middles[v] - widths[v] / 2 for v in middles), default=0.0)
    right = max((middles[v] + widths[v] / 2 for v in middles), default=0.0)
    spare = max(least - (right - left + 2 * PADDING), 0.0)
    shift = PADDING * 2 + spare / 2 - left
    width = right - left + spare + 4 * PADDING
    return _placed(layers, bands, chains, sizes, {v: m + shift for v, m in middles.items()}, width)


def _edges(account: Account) -> list[tuple[Vertex, Vertex]]:
    made_by = {t: i for i, node in enumerate(account.nodes) for _, t in node.writes}
    region_of = {i: n for n, region in enumerate(account.regions) for i in region.nodes}
    seen = {t.id for t in account.tensors if drawn(t)}
    edges: dict[tuple[Vertex, Vertex], None] = {}
    for i, node in enumerate(account.nodes):
        for _, t in node.reads:
            # What a region writes for callers stands below all of its nodes, those that read it too.
            inside = t in made_by and region_of.get(made_by[t]) == region_of.get(i)
            if t in seen and not inside:
                edges[("tensor", t), ("node", i)] = None
            elif t in made_by:
                edges[("node", made_by[t]), ("node", i)] = None
        for _, t in node.writes:
            if t in seen:
                edges[("node", i), ("tensor", t)] = None
    return list(edges)


def _layers(account: Account) -> tuple[list[list[Vertex]], list[tuple[int | None, range]]]:
    """Vertices by layer, and the layers of each region's nodes. What a region is the first to read stands above its
    nodes, what it writes for callers below them."""
    placed = {i for region in account.regions for i in region.nodes}
    rest = tuple(i for i in range(len(account.nodes)) if i not in placed)
    groups: list[tuple[int | None, Sequence[int]]] = [(n, r.nodes) for n, r in enumerate(account.regions)]
    groups += [(None, rest)] if rest else []
    tensors = {t.id for t in account.tensors if drawn(t)}
    made = {t for node in account.nodes for _, t in node.writes}
    made_by = {t: i for i, node in enumerate(account.nodes) for _, t in node.writes}
    layers: list[list[Vertex]] = []
    bands = []
    shown: set[int] = set()
    for number, nodes in groups:
        reads = dict.fromkeys(t for i in nodes for _, t in account.nodes[i].reads)
        first = [t for t in reads if t in tensors and t not in made and t not in shown]
        shown.update(first)
        if first:
            layers.append([("tensor", t) for t in first])
        depth: dict[int, int] = {}
        for i in nodes:
            needed = [made_by[t] for _, t in account.nodes[i].reads if t in made_by and made_by[t] in depth]
            depth[i] = 1 + max((depth[j] for j in needed), default=-1)
        deepest = max(depth.values(), default=-1)
        bands.append((number, range(len(layers), len(layers) + deepest + 1)))
        layers += [[("node", i) for i in nodes if depth[i] == d] for d in range(deepest + 1)]
        written = [t for i in nodes for _, t in account.nodes[i].writes if t in tensors]
        if written:
            layers.append([("tensor", t) for t in written])
    return layers, bands


def _ordered(
    layers: list[list[Vertex]],
    above: Mapping[Vertex, list[Vertex]],
    below: Mapping[Vertex, list[Vertex]],
    widths: Mapping[Vertex, float],
) -> dict[Vertex, float]:
    """Middles from left to right; sorts each layer."""
    middles: dict[Vertex, float] = {}
    for layer in layers:
        middles |= _spread(layer, dict.fromkeys(layer, 0.0), widths)
    for sweep in range(_SWEEPS):
        near, order = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
        for layer in order:
            wanted = {v: _mean(near[v], middles, middles[v]) for v in layer}
            layer.sort(key=lambda v: wanted[v])
            middles |= _spread(layer, wanted, widths)
    for _ in range(_STRAIGHTENING):
        for layer in layers:
            wanted = {v: _mean([*above[v], *below[v]], middles, middles[v]) for v in layer}
            middles |= _spread(layer, wanted, widths)
    return middles


def _mean(near: Sequence[Vertex], middles: Mapping[Vertex, float], alone: float) -> float:
    return sum(middles[v] for v in near) / len(near) if near else alone


def _spread(
    layer: Sequence[Vertex], wanted: Mapping[Vertex, float], widths: Mapping[Vertex, float]
) -> dict[Vertex, float]:
    """Middles in the order of the layer, as near to those wanted as widths allow: of the weighted squares of how far
    they are off, the sum is least (pool adjacent violators). Lines weigh more, so that they are straight."""
    offset, offsets = 0.0, []
    for n, v in enumerate(layer):
        offset += (widths[layer[n - 1]] + widths[v]) / 2 + GAP if n else 0.0
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for v, offset in zip(layer, offsets, strict=True):
        mean, weight, many = wanted[v] - offset, _LINE_WEIGHT if v[0] == "line" else 1.0, 1
        while pools and pools[-1][0] > mean:
            other, its, more = pools.pop()
            mean, weight, many = (mean * weight + other * its) / (weight + its), weight + its, many + more
        pools.append((mean, weight, many))
    means = [mean for mean, _, many in pools for _ in range(many)]
    return {v: mean + offset for v, mean, offset in zip(layer, means, offsets, strict=True)}


def _placed(
    layers: Sequence[Sequence[Vertex]],
    bands: Sequence[tuple[int | None, range]],
    chains: Sequence[Sequence[Vertex]],
    sizes: Mapping[Vertex, tuple[float, float]],
    middles: Mapping[Vertex, float],
    width: float,
) -> Layout:
    first = {inside[0]: n for n, (_, inside) in enumerate(bands) if inside}
    last = {inside[-1] for _, inside in bands if inside}
    spans: list[tuple[float, float]] = []
    tops: dict[int, float] = {}
    y = 0.0
    for n, layer in enumerate(layers):
        if n in first:
            tops[first[n]] = y
            y += TITLE + PADDING / 2
        height = max((sizes[v][1] for v in layer if v in sizes), default=0.0)
        spans.append((y, y + height))
        y += height
        y += ROW_GAP + (PADDING if n in last else 0)
    boxes = {
        v: Box(middles[v] - sizes[v][0] / 2, spans[n][0], *sizes[v])
        for n, layer in enumerate(layers)
        for v in layer
        if v in sizes
    }
    grounds = tuple(
        Band(number, Box(PADDING, tops[n], width - 2 * PADDING, spans[inside[-1]][1] + PADDING - tops[n]))
        for n, (number, inside) in enumerate(bands)
        if inside
    )
    layer_of = {v: n for n, layer in enumerate(layers) for v in layer}
    lines = tuple(Line(chain[0], chain[-1], _points(chain, boxes, middles, spans, layer_of)) for chain in chains)
    return Layout(width, max(y - ROW_GAP, 0.0), boxes, grounds, lines)


def _points(
    chain: Sequence[Vertex],
    boxes: Mapping[Vertex, Box],
    middles: Mapping[Vertex, float],
    spans: Sequence[tuple[float, float]],
    layer_of: Mapping[Vertex, int],
) -> tuple[tuple[float, float], ...]:
    start, end = boxes[chain[0]], boxes[chain[-1]]
    points = [(start.middle, start.y + start.height)]
    for v in chain[1:-1]:
        low, high = spans[layer_of[v]]
        points += [(middles[v], low), (middles[v], high)]
    return (*points, (end.middle, end.y))
