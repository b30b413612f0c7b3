"""The graph of one call while it is drawn: arguments by name become its tensors."""

from collections.abc import Mapping

from graphfuse.dtypes import data_type
from graphfuse.enums import norm_forward_phase, tensor_reordering
from graphfuse.functional.layout import Layout
from graphfuse.graph import pygraph
from graphfuse.runtime import storage
from graphfuse.tensor import Tensor


class Drawing:
    """A graph, and which argument each tensor of its variant pack is.

    layouts: of the arguments that are used; tensors of lower rank than the first get leading extents of 1.
    """

    def __init__(self, graph: pygraph, layouts: Mapping[str, Layout]):
        self.graph = graph
        self.layouts = layouts
        self.rank = len(next(iter(layouts.values())).shape)
        self.pack: dict[str, str] = {}
        """Name of the tensor in the graph -> name of the argument. Of one that is read and written there are two."""
        self._read: dict[str, Tensor] = {}
        self._epsilon = graph.tensor([1] * self.rank, data_type=data_type.FLOAT, is_pass_by_value=True, name="eps")

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def __getitem__(self, name: str) -> Tensor:
        """The argument `name` as an input."""
        if name not in self._read:
            t = self.layouts[name]
            more = self.rank - len(t.shape)
            outer = t.shape[0] * t.stride[0] if t.shape else 1
            self._read[name] = self.graph.tensor(
                (*(1,) * more, *t.shape),
                (*(outer,) * more, *t.stride),
                t.stored,
                name=name,
                byte_alignment=t.alignment,
            )
            self.pack[name] = name
        return self._read[name]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.graph.rmsnorm(x, weight, self._epsilon, norm_forward_phase=norm_forward_phase.INFERENCE)[0]

    def store(self, name: str, tensor: Tensor, swizzled: bool = False) -> None:
        """Write `tensor` to the argument `name`, which by then has been read if it ever is."""
        t = self.layouts[name]
        own = f"{name}, in place" if name in self._read else name
        tensor.set_output().set_name(own).set_data_type(t.stored).set_byte_alignment(t.alignment)
        if swizzled:
            tensor.set_reordering_type(tensor_reordering.F8_128x4)
        else:
            dim, stride = storage.unpacked(t.stored, t.shape, t.stride)
            tensor.set_dim(dim).set_stride(stride)
        self.pack[own] = name
