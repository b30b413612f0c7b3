"""Patterns: small graphs of the same operations, found in a frozen graph by structure alone.

    def template(g):
        y, inverse_rms = g.rmsnorm(g.capture("input"), g.capture("scale"), g.capture("epsilon"))
        return {"output": g.swish(y), "inverse_rms": inverse_rms}

    PATTERN = Pattern("my_norm", template, facts=lambda match: MyFacts(...))

Names and the order of nodes do not matter. The operands of a commutative op may be swapped. An attribute that the
template omits matches any value. An input port that it omits must be absent, except for ragged offsets, which become
inputs of the match if tensors have them. A tensor inside a match must be virtual and read only inside the match, unless
the template returns it under a name.

A pattern that grows also matches nodes around its template. `grow` chooses them, and the facts then describe every
output of the subgraph. `convex` helps to choose nodes that can run as one kernel.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

from graphfuse.base.errors import PluginError
from graphfuse.contract.engine import No
from graphfuse.op_graph import vocabulary
from graphfuse.op_graph.ir import FrozenGraph, Node, Subgraph, TensorId
from graphfuse.ops import OPS, Op


@dataclass(frozen=True, eq=False)
class Capture:
    """Placeholder for any tensor, reported as `name`; an optional one may be absent. One object matches one tensor."""

    name: str
    optional: bool = False


@dataclass(frozen=True, eq=False)
class NodeTemplate:
    op: Op
    inputs: Mapping[str, "Symbol"]
    attributes: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class NodeOutput:
    """An output port of a template node."""

    node: NodeTemplate
    port: str


Symbol = Capture | NodeOutput


def _add_template(graph: "PatternGraph", op: Op, given: dict[str, object]):
    ports = {p.name for p in op.inputs}
    inputs = {k: v for k, v in given.items() if k in ports and v is not None}
    for port, symbol in inputs.items():
        if not isinstance(symbol, Capture | NodeOutput):
            raise TypeError(
                f"pattern node {op.name}: {port} must be a capture or another node's output, got {symbol!r}"
            )
    node = NodeTemplate(op, inputs, {k: v for k, v in given.items() if k not in {*ports, *op.given}})
    made = [NodeOutput(node, p.name) for p in op.returned]
    return made[0] if len(made) == 1 else made


@vocabulary.methods(_add_template, {})
class PatternGraph:
    """Graph in which a template builds its nodes: the op methods of ``pygraph``, and `capture`."""

    def capture(self, name: str, optional: bool = False) -> Capture:
        return Capture(name, optional)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no op is named {name!r}; there are: {', '.join(OPS)}")


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits.

    subgraph: the matched nodes. tensors: captures and named outputs, without absent optional captures and unused
    outputs. anchor: the template's node that depends on all others.
    """

    subgraph: Subgraph
    tensors: Mapping[str, TensorId]
    anchor: Node

    @property
    def graph(self) -> FrozenGraph:
        return self.subgraph.graph

    def node(self, op_name: str) -> Node:
        """The first node of this op in the match."""
        return next(node for node in self.subgraph.nodes if node.op_name == op_name)


Template = Callable[[PatternGraph], Mapping[str, NodeOutput]]


def single(op_name: str) -> Template:
    """The template of one node of an op, with any inputs, attributes and outputs."""

    def template(g: PatternGraph) -> Mapping[str, NodeOutput]:
        op = OPS[op_name]
        made = getattr(g, op_name)(**{p.name: g.capture(p.name, p.optional) for p in op.inputs})
        made = made if len(op.returned) > 1 else [made]
        return {port.name: symbol for port, symbol in zip(op.returned, made, strict=True)}

    return template


@dataclass(frozen=True)
class Pattern:
    """A named template, and the function that turns a match into frozen facts, or returns No.

    template: one template, or several alternatives. facts: called with each Match. grow: returns sets of nodes (by
    index) around a match of a template; each is tried in turn. apart: returns, for explanations, why a region of this
    pattern does not include some other nodes; None if unknown. last: whether its regions are only for nodes that no
    region of another pattern includes; the bytes that they save count after those of other patterns.
    """

    name: str
    template: Template | tuple[Template, ...]
    facts: Callable[[Match], object]
    grow: Callable[[Match], Iterable[frozenset[int]]] | None = None
    apart: "Callable[[Region, frozenset[int]], str | None] | None" = None
    last: bool = False


@dataclass(frozen=True)
class Region:
    """A match of a pattern with its facts, which engines accept or decline. last: as in ``Pattern``."""

    pattern: str
    subgraph: Subgraph
    facts: object
    last: bool = False


@dataclass(frozen=True)
class Declined:
    """A match for which the pattern's `facts` returned No."""

    pattern: str
    subgraph: Subgraph
    why: No


def find(pattern: Pattern, graph: FrozenGraph) -> Iterator[Region | Declined]:
    """Every place where `pattern` fits, in node order."""
    templates = pattern.template if isinstance(pattern.template, tuple) else (pattern.template,)
    read = _by_op(pattern.name, templates)
    seen: set[tuple[int, ...]] = set()
    for index, node in enumerate(graph.nodes):
        for outputs, anchor in read.get(node.op_name, ()):
            for found in _match_node(graph, anchor, index, _Assignment({}, {})):
                match = _complete(graph, outputs, found, index, grows=pattern.grow is not None)
                if match is not None:
                    for m in _grown(pattern, match):
                        if m.subgraph.node_ids not in seen:  # two anchors may grow to the same nodes
                            seen.add(m.subgraph.node_ids)
                            yield _described(pattern, m)
                    break


def _grown(pattern: Pattern, match: Match) -> Iterator[Match]:
    if pattern.grow is None:
        yield match
        return
    for nodes in dict.fromkeys(pattern.grow(match)):
        if not nodes or not nodes <= set(range(len(match.graph.nodes))):
            raise PluginError(f"pattern {pattern.name!r}: grow must return sets of numbers of nodes, got {nodes!r}")
        yield replace(match, subgraph=Subgraph(match.graph, tuple(sorted(nodes))))


def _described(pattern: Pattern, match: Match) -> Region | Declined:
    facts = pattern.facts(match)
    if type(facts).__hash__ is None:
        raise PluginError(f"pattern {pattern.name!r}: facts must be a frozen dataclass, got {facts!r}")
    if isinstance(facts, No):
        return Declined(pattern.name, match.subgraph, facts)
    return Region(pattern.name, match.subgraph, facts, pattern.last)


def convex(
    graph: FrozenGraph,
    inside: Iterable[int],
    may_join: Callable[[int, frozenset[int]], bool],
    joins_readers: Callable[[TensorId], bool] = lambda t: False,
) -> frozenset[int]:
    """The set `inside`, grown by neighbours that may join, their neighbours and so on.

    A node joins only if no path leaves the set and returns to it by this node, so that the set can run as one kernel.
    may_join(index, set so far) decides, and is called again after a neighbour of the node has joined. Two nodes are
    neighbours if one reads an output of the other, or if both read a tensor for which joins_readers(tensor) is True.
    """
    grown = frozenset(inside)
    near, bits, refused = neighbours(graph, grown, joins_readers), sum(1 << i for i in grown), set[int]()
    while True:
        for index in sorted(near - refused):
            if _has_detour(graph, index, bits):
                continue
            if may_join(index, grown):
                beside = neighbours(graph, {index}, joins_readers)
                grown, bits = grown | {index}, bits | 1 << index
                near, refused = (near | beside) - grown, refused - beside
                break
            refused.add(index)
        else:
            return grown


def neighbours(
    graph: FrozenGraph, nodes: Collection[int], joins_readers: Callable[[TensorId], bool] = lambda t: False
) -> set[int]:
    """The neighbours of `nodes`, as in ``convex``."""
    read = {t for index in nodes for _, t in graph.nodes[index].inputs}
    shared = {t for t in read if joins_readers(t)} | {t for index in nodes for _, t in graph.nodes[index].outputs}
    found = {graph.producer[t] for t in read if t in graph.producer}
    return (found | {reader for t in shared for reader in graph.consumers.get(t, ())}).difference(nodes)


def _has_detour(graph: FrozenGraph, index: int, nodes: int) -> bool:
    """True if a path between a node and one of `nodes` contains other nodes. nodes: as bits."""
    node = graph.nodes[index]
    before = (graph.producer[t] for _, t in node.inputs if t in graph.producer)
    after = (reader for _, t in node.outputs for reader in graph.consumers.get(t, ()))
    return any(graph.ancestors[i] & nodes for i in before if not nodes >> i & 1) or any(
        graph.descendants[i] & nodes for i in after if not nodes >> i & 1
    )


@lru_cache(maxsize=64)
def _by_op(
    name: str, templates: tuple[Template, ...]
) -> Mapping[str, list[tuple[Mapping[str, NodeOutput], NodeTemplate]]]:
    """Results of ``_read`` for the templates, in their order, by the op that matching starts from."""
    found: dict[str, list[tuple[Mapping[str, NodeOutput], NodeTemplate]]] = {}
    for outputs, anchor in (_read(name, template) for template in templates):
        found.setdefault(anchor.op.name, []).append((outputs, anchor))
    return found


def _read(name: str, template: Template) -> tuple[Mapping[str, NodeOutput], NodeTemplate]:
    """Result of the template, and the node that matching starts from. Raises PluginError for an invalid template."""
    outputs = template(PatternGraph())
    valid = isinstance(outputs, Mapping) and outputs and all(isinstance(s, NodeOutput) for s in outputs.values())
    if not valid:
        raise PluginError(f"pattern {name!r}: the template must return node outputs by name, got {outputs!r}")
    ends = [made.node for made in outputs.values()]
    for anchor in ends:
        if all(end in above(anchor) for end in ends):
            return outputs, anchor
    raise PluginError(f"pattern {name!r}: one returned node must depend on all others; {list(outputs)} do not")


def above(node: NodeTemplate) -> set[NodeTemplate]:
    """`node` and all node templates that it depends on."""
    seen, waiting = {node}, [node]
    while waiting:
        found = {s.node for s in waiting.pop().inputs.values() if isinstance(s, NodeOutput)} - seen
        seen |= found
        waiting += found
    return seen


@dataclass(frozen=True)
class _Assignment:
    """A partial assignment of nodes and captures of a template to nodes and tensors of a graph."""

    nodes: Mapping[NodeTemplate, int]
    tensors: Mapping[Capture, TensorId]


def _match_node(graph: FrozenGraph, template: NodeTemplate, index: int, found: _Assignment) -> Iterator[_Assignment]:
    node = graph.nodes[index]
    if template in found.nodes:
        if found.nodes[template] == index:
            yield found
        return
    if node.op is not template.op or index in found.nodes.values():
        return
    given = dict(node.attributes)
    if any(given[name] != value for name, value in template.attributes.items()):
        return
    start = _Assignment({**found.nodes, template: index}, found.tensors)
    wanted = list(template.inputs.items())
    in_order = [port for port, _ in wanted]
    may_swap = node.op.commutative and len({node.input(port) for port in in_order}) == 2
    for ports in (in_order, in_order[::-1]) if may_swap else (in_order,):
        actual = [(symbol, node.input(port)) for port, (_, symbol) in zip(ports, wanted, strict=True)]
        extra = {port for port, _ in node.inputs} - set(ports) - node.op.offsets
        if not extra:
            yield from _match_inputs(graph, actual, start)


def _match_inputs(
    graph: FrozenGraph, wanted: list[tuple[Symbol, TensorId | None]], found: _Assignment
) -> Iterator[_Assignment]:
    if not wanted:
        yield found
        return
    (symbol, tensor), rest = wanted[0], wanted[1:]
    for extended in _match_tensor(graph, symbol, tensor, found):
        yield from _match_inputs(graph, rest, extended)


def _match_tensor(
    graph: FrozenGraph, symbol: Symbol, tensor: TensorId | None, found: _Assignment
) -> Iterator[_Assignment]:
    if isinstance(symbol, Capture):
        if tensor is None:
            if symbol.optional:
                yield found
        elif found.tensors.get(symbol, tensor) == tensor:
            yield _Assignment(found.nodes, {**found.tensors, symbol: tensor})
        return
    made_by = graph.producer.get(tensor)
    if made_by is not None and graph.nodes[made_by].output(symbol.port) == tensor:
        yield from _match_node(graph, symbol.node, made_by, found)


def _complete(
    graph: FrozenGraph, outputs: Mapping[str, NodeOutput], found: _Assignment, anchor: int, grows: bool
) -> Match | None:
    """The Match of an assignment; None if an output has no name. grows: facts then describe all outputs anyway."""
    tensors = {capture.name: t for capture, t in found.tensors.items()}
    for name, made in outputs.items():
        t = graph.nodes[found.nodes[made.node]].output(made.port)
        if t is not None and (not graph.tensors[t].virtual or t in graph.consumers):
            tensors[name] = t
    subgraph = Subgraph(graph, tuple(sorted(found.nodes.values())))
    if not grows and any(t not in tensors.values() for t in subgraph.outputs):
        return None
    return Match(subgraph, tensors, graph.nodes[anchor])
