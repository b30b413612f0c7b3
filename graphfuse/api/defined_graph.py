"""A graph as the user builds it: tensors and nodes, which ``validate`` freezes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from graphfuse.api import node_arguments
from graphfuse.api.checks import check_not_offered
from graphfuse.api.uids import Uids
from graphfuse.base.cudnn_names import KEYWORDS
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import tensor_reordering
from graphfuse.base.errors import GraphStateError, GraphTypeError, GraphValidationError
from graphfuse.op_graph.freeze import freeze, infer
from graphfuse.op_graph.graph_record import GraphRecord, NodeRecord
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.op_methods import OpMethods
from graphfuse.op_graph.tensor import Tensor, checked_name, checked_number, checked_type, plain_number
from graphfuse.ops import Op

if TYPE_CHECKING:
    from graphfuse.op_graph import ir

StepT = TypeVar("StepT")


class DefinedGraph(GraphRecord, OpMethods):
    """Tensors and nodes, in the order in which the user made them. Any change undoes the steps from ``validate`` on."""

    _ir: ir.FrozenGraph | None

    def _empty(self) -> None:
        self.tensors.clear()
        self.nodes.clear()
        self._node_names: set[str] = set()
        self._nodes_of: Counter[str] = Counter()
        self._uids = Uids()
        self._forget()

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: object = data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
        *,
        byte_alignment: int = 16,
    ) -> Tensor:
        """A tensor that ``execute`` gets a value for.

        dim, stride: in elements; stride defaults to row-major. uid: None, or cuDNN's -1, if the graph is to choose one.
        byte_alignment: every address given for the tensor is a multiple of it. ragged_offset,
        ragged_offset_multiplier, alignment_value: as in the setters of ``Tensor`` of these names.
        """
        with self._whole():
            t = self._new_tensor(name)
            t.set_dim(dim).set_stride(packed_stride(t.get_dim()) if stride is None else stride)
            t.set_is_virtual(is_virtual).set_is_pass_by_value(is_pass_by_value).set_data_type(data_type)
            t.set_byte_alignment(byte_alignment).set_reordering_type(reordering_type).set_alignment_value(
                alignment_value
            )
            t.set_ragged_offset(ragged_offset).set_ragged_offset_multiplier(ragged_offset_multiplier)
            return t if uid is None or (type(uid) is int and uid == -1) else t.set_uid(uid)

    def tensor_like(self, template: object, name: str = "", is_virtual: bool = False) -> Tensor:
        """A tensor with the shape and strides (in elements), data type and alignment of `template`.

        template: a graph tensor, a torch tensor, or any array with DLPack or an array interface. A one-element array
        on the CPU becomes a scalar that is passed by value.
        """
        if isinstance(template, Tensor):
            return self.tensor(
                template.get_dim(),
                template.get_stride() or None,
                template.get_data_type(),
                is_virtual,
                template.get_is_pass_by_value(),
                reordering_type=template.get_reordering_type(),
                name=name,
                byte_alignment=template.get_byte_alignment(),
            )
        from graphfuse.runtime import buffers, storage

        found = buffers.describe(template)
        if found.dim is None or found.dtype is None:  # an address, which has neither
            raise GraphTypeError(f"tensor_like: {template!r} has no shape; give a tensor or an array")
        dim, stride = storage.unpacked(found.dtype, found.dim or (1,), found.stride or (1,))
        scalar = found.device == "cpu" and all(extent == 1 for extent in dim)
        alignment = 1 << 8 if not found.address else found.address & -found.address
        return self.tensor(
            dim,
            stride,
            found.dtype,
            is_virtual,
            scalar,
            name=name,
            byte_alignment=min(16, alignment),
        )

    def tensor_scalar(self, value: float, scalar_type: object = data_type.FLOAT, name: str = "") -> Tensor:
        """A constant: a one-element tensor that is passed by value and whose number is fixed in the graph.

        Its rank is inferred from the node that reads it, unless it is set.
        """
        number: Any = plain_number(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise GraphTypeError(f"tensor_scalar: value must be an int or float, got {value!r}")
        scalar_type = checked_type(f"tensor {name!r}", scalar_type)
        number = checked_number(f"tensor {name!r}", number, scalar_type)
        t = self._new_tensor(name).set_is_virtual(False).set_is_pass_by_value(True).set_data_type(scalar_type)
        t.value = number
        return t

    def concatenate(
        self,
        axis: int,
        in_place_index: None = None,
        *,
        inputs: Sequence[Tensor],
        name: str = "",
        compute_data_type: data_type | Any = data_type.NOT_SET,
    ) -> Tensor:
        """Concatenation of `inputs` along an axis, made of ``join`` nodes of two tensors each.

        in_place_index: the input that shares memory with the output; only None is offered.
        """
        where = f"concatenate {name!r}" if name else "concatenate"
        check_not_offered(where, KEYWORDS, {"in_place_index": in_place_index})
        if not isinstance(inputs, Sequence) or len(inputs) < 2:
            raise GraphTypeError(f"{where}: inputs must be a list of two tensors or more, got {inputs!r}")
        for n, t in enumerate(inputs):  # before the first node is added
            self._check_operand(where, f"inputs[{n}]", t)
        self._check_free(where, name)
        first, *between, last = inputs
        for t in between:
            first = self.join(first, t, axis, compute_data_type)
        return self.join(first, last, axis, compute_data_type, name)

    def _new_tensor(self, name: str) -> Tensor:
        name = checked_name("tensor", name) or f"tensor_{len(self.tensors)}"
        t = Tensor(self._uids.free(), name, self._forget, self._uids.claim)
        self._uids.add(t)
        self.tensors.append(t)
        self._forget()
        return t

    def _add(
        self, op: Op, given: dict[str, object], compute_data_type: object, name: str
    ) -> Tensor | None | list[Tensor | None]:
        given_name = checked_name(f"node of {op.name}", name)
        name = given_name or self._free_name(op)
        where = f"node {name!r} ({op.name})"
        self._check_free(where, name)
        attributes = node_arguments.attributes(where, op, given)
        functions = node_arguments.functions(where, op, given)
        compute = checked_type(f"{where}: compute_data_type", compute_data_type)
        compute = self.compute_data_type if compute is data_type.NOT_SET else compute
        if functions and op.by_nodes:
            with self._whole():
                options = *(a.name for a in op.attributes if attributes[a.name] != a.default), *op.given
                given_options = [option for option in options if given.get(option) is not None]
                inputs, first = self._inputs(where, op, given, name), len(self.nodes)
                self._check_shapes(where, op, inputs, attributes)
                draw = {name: partial(self._by_function, where, name, call) for name, call in functions.items()}
                made = op.by_nodes(self, where, inputs, attributes, draw, given_options, compute, given_name)
                self.nodes[first:] = [replace(node, only_if_read=True) for node in self.nodes[first:]]
                return made
        inputs = self._inputs(where, op, given, name)
        named: dict[str, Any] = {port: given[port] for port in op.given if given.get(port) is not None}
        for port, t in named.items():
            self._check_operand(where, port, t)
        outputs = {p.name: self._new_tensor(f"{name}::{p.label or p.name}") for p in op.returned}
        for port, t in named.items():  # moved after the node's inputs, where outputs are
            self.tensors.remove(t)
            self.tensors.append(t)
            outputs[port] = t
        node = NodeRecord(name, op, inputs, outputs, attributes, compute)
        self.nodes.append(node)
        self._node_names.add(name)
        self._nodes_of[op.name] += 1
        self._forget()
        made = [None if port in node.absent else t for port, t in outputs.items() if port not in named]
        return made[0] if len(made) == 1 else made

    def _by_function(self, where: str, argument: str, function: Callable[..., object], t: Tensor) -> Tensor:
        """Tensor that a function of the user makes of a tensor of this graph."""
        made = function(self, t)
        if not isinstance(made, Tensor):
            raise GraphTypeError(f"{where}: {argument} must return a tensor of the graph it is given, got {made!r}")
        self._check_operand(where, f"what {argument} returns", made)
        return made

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Removes the tensors and nodes that its block added if it raises; ``validate`` would fail on them."""
        tensors, nodes = [*self.tensors], len(self.nodes)
        try:
            yield
        except BaseException:
            known = {id(t) for t in tensors}
            for t in (t for t in self.tensors if id(t) not in known):
                self._uids.remove(t)
            for node in self.nodes[nodes:]:
                self._node_names.remove(node.name)
                self._nodes_of[node.op.name] -= 1
            self.tensors[:] = tensors
            del self.nodes[nodes:]
            self._forget()
            raise

    def _check_shapes(self, where: str, op: Op, inputs: Mapping[str, Tensor], attributes: Mapping[str, object]) -> None:
        """Checks shapes of an op that is built of other nodes (``Op.by_nodes``), inferring them first if need be."""
        if any(not t.get_dim() and t.value is None for t in inputs.values()):
            for node in self.nodes:
                infer(self, node)
        rank = max(len(t.get_dim()) for t in inputs.values())
        try:
            op.infer({port: tuple(t.get_dim()) or (1,) * rank for port, t in inputs.items()}, attributes, {})
        except GraphValidationError as error:
            raise GraphValidationError(f"{where}: {error}") from None

    def _inputs(self, where: str, op: Op, given: Mapping[str, object], name: str) -> dict[str, Tensor]:
        """The tensor at each input port of a node. A number becomes a constant of the graph."""
        inputs = {}
        for port in op.inputs:
            value: Any = plain_number(given.get(port.name))
            if value is None and port.optional:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                kind = port.types[0] if port.numbers and port.types else data_type.FLOAT
                value = self.tensor_scalar(value, kind, f"{name}::{port.name}")
            self._check_operand(where, port.name, value, node_arguments.order(op))
            inputs[port.name] = value
        return inputs

    def _check_operand(self, where: str, port: str, value: object, order: str = "") -> None:
        if not isinstance(value, Tensor):
            raise GraphTypeError(
                f"{where}: {port} must be a tensor of this graph or a number, got {_shown(value)}{order}"
            )
        if not self._uids.has(value):
            raise GraphValidationError(f"{where}: {port} ({value.get_name()!r}) belongs to another graph")

    def _check_free(self, where: str, name: str) -> None:
        if name in self._node_names:
            raise GraphValidationError(f"{where}: another node has this name; node names must differ")

    def _free_name(self, op: Op) -> str:
        number = self._nodes_of[op.name]
        while f"{op.name}.{number}" in self._node_names:
            number += 1
        return f"{op.name}.{number}"

    def validate(self) -> None:
        """Infer what was not set and check the whole graph. Raises GraphValidationError, which says what is wrong."""
        self._ir = freeze(self)

    @property
    def frozen(self) -> ir.FrozenGraph:
        """Frozen graph that ``validate`` made."""
        return self._need(self._ir, "validate")

    def key(self) -> str:
        """A digest of the computation, which does not depend on names and the order of nodes."""
        return self.frozen.key()

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor with this uid. Raises GraphValidationError if there is none."""
        found = self._uids.find(uid)
        if found is None:
            raise GraphValidationError(
                f"graph {self.name!r} has no tensor with uid {uid!r}; it has {self._uids.sorted()}"
            )
        return found

    def find_tensor(self, name_or_uid: str | int) -> Tensor | None:
        """The tensor with this name or uid; None if there is none. Raises GraphValidationError if several have the
        name."""
        if isinstance(name_or_uid, int) and not isinstance(name_or_uid, bool):
            return self._uids.find(name_or_uid)
        if not isinstance(name_or_uid, str):
            raise GraphTypeError(f"find_tensor: give a name or a uid, got {name_or_uid!r}")
        found = [t for t in self.tensors if t.get_name() == name_or_uid]
        if len(found) > 1:
            uids = ", ".join(str(t.get_uid()) for t in found)
            raise GraphValidationError(f"{name_or_uid!r} names {len(found)} tensors; accepted: their uids {uids}")
        return found[0] if found else None

    def get_node(self, name: str) -> NodeRecord | None:
        """The node with this name; None if there is none."""
        return next((node for node in self.nodes if node.name == name), None)

    def get_inputs(self) -> list[Tensor]:
        """Tensors in memory or passed by value that no node makes: arguments of execute, and constants."""
        made = self._made()
        return [t for t in self.tensors if not t.get_is_virtual() and t not in made]

    def get_outputs(self) -> list[Tensor]:
        """Tensors that nodes make and that execute writes to memory."""
        made = self._made()
        return [t for t in self.tensors if not t.get_is_virtual() and t in made]

    def _made(self) -> set[Tensor]:
        return {t for node in self.nodes for t in node.outputs.values()}

    def _need(self, value: StepT | None, step: str) -> StepT:
        if value is None:
            raise GraphStateError(
                f"graph {self.name!r}: call {step}() first "
                "(changing the graph or a tensor undoes the steps done before)"
            )
        return value

    def _forget(self) -> None:
        """Undo the steps from ``validate`` on, as the graph has changed."""
        self._ir = None


def _shown(value: object) -> str:
    """Text of a value that was given in place of a tensor, without the elements of an array."""
    shape = getattr(value, "shape", None)
    return f"an array of shape {list(shape)}, of which tensor_like makes one" if shape else repr(value)
