"""Attention with a function of its scores, drawn as the nodes that it is made of.

The function takes the graph and the scores, [batch, heads of q, rows of q, rows of k], and returns what softmax is of.
Factors of products are rounded to q's type where that has 16 bits, as kernels of attention round them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphfuse.base.dtypes import SIXTEEN_BITS, data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.ops.attention_options import makes_stats
from graphfuse.ops.op import Attributes

Functions = Mapping[str, Callable[[Any, Any], Any]]
"""By argument what it was given: a function of a graph and one of its tensors, which returns another one."""

_READ = ("q", "k", "v", "o", "dO", "stats", "attn_scale", "bias")
_MEANT = ("is_inference", "generate_stats")
_OF_KERNELS = ("implementation", "unfuse_fma", "use_deterministic_algorithm")  # which nodes are not


@dataclass(frozen=True)
class AttentionNodes:
    """Nodes in the place of one.

    where: what errors begin with.
    inputs, attributes: the one node's.
    asked: names of the options that it has.
    compute: the type that nodes compute in.
    name: of the node whose result is the first.
    """

    graph: Any
    where: str
    inputs: Mapping[str, Any]
    attributes: Attributes
    functions: Functions
    asked: Sequence[str]
    compute: data_type
    name: str

    def __post_init__(self) -> None:
        others = [name for name in (*self.inputs, *self.asked) if name not in (*_READ, *_MEANT, *_OF_KERNELS)]
        if others:
            raise GraphNotSupportedError(
                f"{self.where}: {others[0]} is given beside {' and '.join(self.functions)}; instead: nodes that the "
                "function draws, as of gen_index, cmp_ge and binary_select for a mask"
            )

    def node(self, op: str, *tensors: object, **attributes: object) -> Any:
        """A value between nodes, which is not rounded."""
        made = getattr(self.graph, op)(*tensors, compute_data_type=self.compute, **attributes)
        return made.set_data_type(self.compute)

    def product(self, a: object, b: object, name: str = "") -> Any:
        return self.graph.matmul(a, b, compute_data_type=self.compute, name=name)

    def turned(self, t: object) -> Any:
        """A tensor with its last two axes in the other order."""
        return self.graph.transpose(t, permutation=[0, 1, 3, 2]).set_data_type(self.kind(t))

    def kind(self, t: Any) -> data_type:
        """The type that a tensor has, or will have."""
        unset = self.graph.intermediate_data_type if t.get_is_virtual() else self.graph.io_data_type
        return unset if t.get_data_type() is data_type.NOT_SET else t.get_data_type()

    def factor(self, t: Any) -> Any:
        """A value as a product reads it."""
        kind = self.kind(self.inputs["q"])
        return self.graph.identity(t).set_data_type(kind) if kind in SIXTEEN_BITS else t

    def shared(self, port: str) -> int:
        """Heads of q that one of another tensor serves."""
        heads, those_of_q = (
            t.get_dim()[1] if len(t.get_dim()) == 4 else 1 for t in (self.inputs[port], self.inputs["q"])
        )
        return those_of_q // heads if heads and those_of_q % heads == 0 else 1

    def repeated(self, port: str) -> Any:
        """k or v with a head for each of q's, or with one."""
        t, shared = self.inputs[port], self.shared(port)
        if shared == 1 or t.get_dim()[1] == 1:
            return t
        batch, heads, rows, columns = t.get_dim()
        for op, dim in (
            ("reshape", [batch, heads, 1, rows, columns]),
            ("expand", [batch, heads, shared, rows, columns]),
            ("reshape", [batch, heads * shared, rows, columns]),
        ):
            t = getattr(self.graph, op)(t).set_dim(dim).set_data_type(self.kind(self.inputs[port]))
        return t

    def summed(self, grad: Any, port: str) -> Any:
        """The gradient of k or v, from that of each head of q."""
        t, shared = self.inputs[port], self.shared(port)
        if shared == 1:
            return grad
        batch, heads, rows, columns = t.get_dim()
        apart = self.graph.reshape(grad.set_data_type(self.compute)).set_dim([batch, heads, shared, rows, columns])
        total = self.node("reduction", apart.set_data_type(self.compute), mode=reduction_mode.ADD)
        total.set_dim([batch, heads, 1, rows, columns]).set_data_type(self.kind(t))
        return self.graph.reshape(total).set_dim([batch, heads, rows, columns])

    def scores(self) -> Any:
        """Scores that softmax is of."""
        made = self.product(self.inputs["q"], self.turned(self.repeated("k"))).set_data_type(self.compute)
        for port, op in (("attn_scale", "mul"), ("bias", "add")):
            made = self.node(op, made, self.inputs[port]) if port in self.inputs else made
        return self.by_function("score_mod", made)

    def by_function(self, name: str, t: Any) -> Any:
        if name not in self.functions:
            return t
        made = self.functions[name](self.graph, t)
        self.graph._check_operand(self.where, f"what {name} returns", made)
        return made


def forward(*given: Any) -> list[Any]:
    """[O, Stats]; the second is None unless it is asked for. given: as ``AttentionNodes`` has it."""
    nodes = AttentionNodes(*given)
    scores = nodes.scores()
    stats = nodes.node("logsumexp", scores, axis=3) if makes_stats(nodes.attributes) else None
    weights = nodes.factor(nodes.node("softmax", scores, axis=3))
    return [nodes.product(weights, nodes.repeated("v"), nodes.name), stats]


def backward(*given: Any) -> list[Any]:
    """[dQ, dK, dV]. given: as ``AttentionNodes`` has it."""
    nodes = AttentionNodes(*given)
    if len(nodes.functions) < 2:
        raise GraphNotSupportedError(
            f"{nodes.where}: {', '.join(nodes.functions)} is given alone; accepted: score_mod and score_mod_bprop, of "
            "which the second returns the gradient of what the first is given"
        )
    q, loss = nodes.inputs["q"], nodes.inputs["dO"]
    weights = nodes.node("exp", nodes.node("sub", nodes.scores(), nodes.inputs["stats"]))
    of_weights = nodes.product(loss, nodes.turned(nodes.repeated("v"))).set_data_type(nodes.compute)
    of_scores = nodes.by_function("score_mod_bprop", nodes.node("softmax_backward", of_weights, weights, axis=3))
    if "attn_scale" in nodes.inputs:
        of_scores = nodes.node("mul", of_scores, nodes.inputs["attn_scale"])
    of_scores, weights = nodes.factor(of_scores), nodes.factor(weights)
    return [
        nodes.product(of_scores, nodes.repeated("k"), nodes.name),
        nodes.summed(nodes.product(nodes.turned(of_scores), q), "k"),
        nodes.summed(nodes.product(nodes.turned(weights), loss), "v"),
    ]
