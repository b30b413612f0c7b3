"""Patterns of subgraphs that libraries have kernels for: a product, convolution, attention or norm, with an epilogue of
pointwise nodes.

The nodes are matched as they are. The library's engine decides which of them it can translate.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.contract.match import Match, Pattern, convex, single
from graphfuse.op_graph.ir import FrozenGraph, Node, Subgraph

PRODUCTS = ("matmul", "conv_fprop", "conv_dgrad", "conv_wgrad")
"""Ops that may have an epilogue of pointwise nodes."""

ATTENTION = ("sdpa", "sdpa_backward")

NORMALIZING = (
    "rmsnorm",
    "rmsnorm_backward",
    "layernorm",
    "layernorm_backward",
    "adalayernorm",
    "adalayernorm_backward",
    "instancenorm",
    "instancenorm_backward",
    "batchnorm",
    "batchnorm_inference",
    "batchnorm_backward",
)

LONGEST = 8
"""Largest number of pointwise nodes in an epilogue. Each shorter one is a region, too, which costs a library call of
milliseconds."""


@dataclass(frozen=True)
class EpilogueFacts:
    """Facts of a match. node: name of its first node, for messages. subgraph: this node and its epilogue."""

    node: str
    subgraph: Subgraph


@dataclass(frozen=True)
class ProductFacts(EpilogueFacts):
    """Facts of a product, a convolution or attention."""


def core(nodes: Subgraph) -> Node:
    """The product, convolution or attention among some nodes."""
    return next(node for node in nodes.nodes if node.op_name in (*PRODUCTS, *ATTENTION))


def grow(match: Match) -> Iterator[frozenset[int]]:
    """A product with the longest epilogue, then with shorter ones, down to none; any other node alone.

    An epilogue consists of pointwise nodes that depend on the product, have its shape, and can run with it as one
    kernel. Transposes of operands that only the product reads are included; the region without them is tried, too.
    """
    graph, alone = match.graph, frozenset(match.subgraph.node_ids)
    if match.anchor.op_name not in PRODUCTS:
        yield alone
        return
    operands = match.anchor.inputs if match.anchor.op_name == "matmul" else ()
    made_before = {graph.producer[t] for _, t in operands if t in graph.producer}
    turned = alone | {i for i in made_before if _only_turns(graph, i, alone)}
    yield from _with_epilogues(match, turned)
    if turned != alone:
        yield from _with_epilogues(match, alone)


def _only_turns(graph: FrozenGraph, index: int, readers: frozenset[int]) -> bool:
    """True for a transpose whose result only `readers` read, without a conversion."""
    node = graph.nodes[index]
    if node.op_name != "transpose":
        return False
    (source,), (made,) = ([graph.tensors[t] for _, t in ports] for ports in (node.inputs, node.outputs))
    return made.virtual and source.dtype is made.dtype and readers.issuperset(graph.consumers[made.id])


def _with_epilogues(match: Match, inner: frozenset[int]) -> Iterator[frozenset[int]]:
    graph = match.graph
    (made,) = (t for _, t in match.anchor.outputs)
    after, shape = graph.below([made]), graph.tensors[made].dim
    fit = {i for i in after if graph.nodes[i].op.pointwise and _shape(graph, i) == shape}

    def longest(most: int) -> frozenset[int]:
        return convex(graph, inner, lambda i, inside: i in fit and len(inside) <= most)

    grown = longest(LONGEST + len(inner) - 1)
    yield grown
    for most in range(len(grown) - 2, len(inner) - 2, -1):
        yield longest(most)


def _shape(graph: FrozenGraph, index: int) -> tuple[int, ...]:
    (made,) = (t for _, t in graph.nodes[index].outputs)
    return graph.tensors[made].dim


PATTERN = Pattern(
    "epilogue",
    tuple(map(single, (*PRODUCTS, *ATTENTION))),
    lambda match: ProductFacts(match.anchor.name, match.subgraph),
    grow,
)

NORMS = Pattern("norm", tuple(map(single, NORMALIZING)), lambda match: EpilogueFacts(match.anchor.name, match.subgraph))
"""Pattern of a single norm node."""
