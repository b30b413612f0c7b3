"""Attention with a user's function of its scores, built from products, softmax and pointwise nodes.

The function takes the graph and the scores, [batch, heads of q, rows of q, rows of k], and returns the input of
softmax. Factors of products are rounded to q's type if it has 16 bits, as attention kernels do. Shapes and types of q,
k and v are those at the time of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphfuse.base.dtypes import FACTS, SIXTEEN_BITS, data_type
from graphfuse.base.enums import reduction_mode
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.ops.attention_options import makes_stats
from graphfuse.ops.layouts import packed_like, packed_stride
from graphfuse.ops.op import Attributes

Functions = Mapping[str, Callable[[Any], Any]]
"""Argument -> the user's function, from a tensor to a tensor."""

_READ = ("q", "k", "v", "o", "dO", "stats", "attn_scale", "bias")
_MEANT = ("is_inference", "generate_stats")
_CHANGES_NOTHING = (
    *("implementation", "unfuse_fma", "use_deterministic_algorithm"),
    *("max_total_seq_len_q", "max_total_seq_len_kv", "diagonal_alignment"),
)


@dataclass(frozen=True)
class AttentionNodes:
    """Builder of the nodes that replace one node of attention.

    where: beginning of error messages.
    inputs, attributes: those of the replaced node.
    options: names of the options that the user gave.
    compute: the type that nodes compute in.
    name: of the replaced node; the node of the first result gets it.
    """

    graph: Any
    where: str
    inputs: Mapping[str, Any]
    attributes: Attributes
    functions: Functions
    options: Sequence[str]
    compute: data_type
    name: str

    def __post_init__(self) -> None:
        others = [name for name in (*self.inputs, *self.options) if name not in (*_READ, *_MEANT, *_CHANGES_NOTHING)]
        if others:
            raise GraphNotSupportedError(
                f"{self.where}: {others[0]} is given with {' and '.join(self.functions)}; instead: nodes that the "
                "function builds, such as gen_index, cmp_ge and binary_select for a mask"
            )

    def node(self, op: str, *tensors: object, **attributes: object) -> Any:
        """Result of a new node, in the compute type, so that it is not rounded."""
        made = getattr(self.graph, op)(*tensors, compute_data_type=self.compute, **attributes)
        return made.set_data_type(self.compute)

    def product(self, a: object, b: object, name: str = "") -> Any:
        return self.graph.matmul(a, b, compute_data_type=self.compute, name=name)

    def transposed(self, t: object) -> Any:
        """A tensor with its last two axes transposed."""
        return self.graph.transpose(t, permutation=[0, 1, 3, 2]).set_data_type(self.kind(t))

    def kind(self, t: Any) -> data_type:
        """The type that a tensor has, or will have."""
        unset = self.graph.intermediate_data_type if t.get_is_virtual() else self.graph.io_data_type
        return unset if t.get_data_type() is data_type.NOT_SET else t.get_data_type()

    def factor(self, t: Any) -> Any:
        """A value rounded to q's type, if it has 16 bits, as a factor of a product."""
        kind = self.kind(self.inputs["q"])
        return self.graph.identity(t).set_data_type(kind) if kind in SIXTEEN_BITS else t

    def shared(self, port: str) -> int:
        """Number of heads of q that share a head of k or v."""
        return self.inputs["q"].get_dim()[1] // self.inputs[port].get_dim()[1]

    def repeated(self, port: str) -> Any:
        """k or v with as many heads as q, or with one head that broadcasts."""
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
        divided = self.graph.reshape(grad.set_data_type(self.compute)).set_dim([batch, heads, shared, rows, columns])
        total = self.node("reduction", divided.set_data_type(self.compute), mode=reduction_mode.ADD)
        total.set_dim([batch, heads, 1, rows, columns]).set_data_type(self.kind(t))
        return self.graph.reshape(total)

    def like(self, made: Any, port: str) -> Any:
        """A gradient with the shape and layout of its port."""
        t = self.inputs[port]
        made.set_dim(t.get_dim())
        strides = packed_like(t.get_dim(), t.get_dim(), t.get_stride()) if t.get_stride() else None
        return made.set_stride(strides) if strides else made

    def named(self, t: Any, port: str) -> Any:
        """A result with the name that the replaced node would give it, if that has a name."""
        return t.set_name(f"{self.name}::{port}") if self.name else t

    def weights(self, scores: Any, stats: Any) -> Any:
        """Softmax of scores, from their log-sum-exp; 0 in rows that are all -infinity."""
        most = FACTS[data_type.FLOAT].max
        finite = self.node("relu", stats, negative_slope=0.0, lower_clip=-most, upper_clip=most)
        return self.node("exp", self.node("sub", scores, finite))

    @property
    def scale(self) -> Any:
        """attn_scale with the rank of scores."""
        t = self.inputs["attn_scale"]
        if len(t.get_dim()) in (0, 4):
            return t
        if t.get_is_pass_by_value():
            accepted = "a number, or a tensor of dim [1, 1, 1, 1]"
            raise GraphNotSupportedError(f"{self.where}: attn_scale has dim {t.get_dim()}; accepted: {accepted}")
        return self.graph.reshape(t).set_dim([1, 1, 1, 1]).set_data_type(self.kind(t))

    def scores(self) -> Any:
        """The input of softmax."""
        made = self.product(self.inputs["q"], self.transposed(self.repeated("k"))).set_data_type(self.compute)
        made = self.node("mul", made, self.scale) if "attn_scale" in self.inputs else made
        made = self.node("add", made, self.inputs["bias"]) if "bias" in self.inputs else made
        return self.by_function("score_mod", made)

    def by_function(self, name: str, t: Any) -> Any:
        return self.functions[name](t) if name in self.functions else t


def forward(*given: Any) -> list[Any]:
    """[O, Stats]; Stats is None unless requested. given: arguments of ``AttentionNodes``."""
    nodes = AttentionNodes(*given)
    scores = nodes.scores()
    stats = nodes.node("logsumexp", scores, axis=3)
    weights = nodes.factor(nodes.weights(scores, stats))
    made = nodes.named(nodes.product(weights, nodes.repeated("v"), nodes.name), "O")
    if not makes_stats(nodes.attributes):
        return [made, None]
    dim = [*nodes.inputs["q"].get_dim()[:3], 1]
    return [made, nodes.named(stats, "Stats").set_dim(dim).set_stride(packed_stride(dim))]


def backward(*given: Any) -> list[Any]:
    """[dQ, dK, dV]. given: arguments of ``AttentionNodes``."""
    nodes = AttentionNodes(*given)
    if len(nodes.functions) < 2:
        raise GraphNotSupportedError(
            f"{nodes.where}: {', '.join(nodes.functions)} is given alone; accepted: score_mod and score_mod_bprop, of "
            "which the second returns the gradient of what the first is given"
        )
    q, loss = nodes.inputs["q"], nodes.inputs["dO"]
    weights = nodes.weights(nodes.scores(), nodes.inputs["stats"])
    of_weights = nodes.product(loss, nodes.transposed(nodes.repeated("v"))).set_data_type(nodes.compute)
    of_scores = nodes.by_function("score_mod_bprop", nodes.node("softmax_backward", of_weights, weights, axis=3))
    of_scores = nodes.node("mul", of_scores, nodes.scale) if "attn_scale" in nodes.inputs else of_scores
    of_scores, weights = nodes.factor(of_scores), nodes.factor(weights)
    made = {
        "q": nodes.product(of_scores, nodes.repeated("k"), nodes.name),
        "k": nodes.summed(nodes.product(nodes.transposed(of_scores), q), "k"),
        "v": nodes.summed(nodes.product(nodes.transposed(weights), loss), "v"),
    }
    return [nodes.named(nodes.like(grad, port), f"d{port.upper()}") for port, grad in made.items()]
