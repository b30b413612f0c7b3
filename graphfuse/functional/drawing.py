"""The graph of a call while it is drawn. Arguments, by name, become its tensors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from graphfuse.api import pygraph
from graphfuse.base.enums import norm_forward_phase, reduction_mode, tensor_reordering
from graphfuse.functional.layout import Layout
from graphfuse.functional.tensor_parameter import Shape
from graphfuse.op_graph.tensor import Tensor
from graphfuse.runtime import storage


class DrawnGraph:
    """A graph, and which parameter each tensor of its variant pack is.

    layouts: of the arguments that are used; tensors of lower rank than the first get leading extents of 1.
    options: values of those that the graph is drawn by.
    """

    def __init__(self, graph: pygraph, layouts: Mapping[str, Layout], options: Mapping[str, object]):
        self.graph, self.options = graph, options
        self.layouts = layouts
        self.rank = len(next(iter(layouts.values())).shape)
        self.pack: dict[str, str] = {}
        """Name of the tensor in the graph -> name of the parameter. Of one that is read and written there are two."""
        self._read: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def __getitem__(self, name: str) -> Tensor:
        """The argument `name` as an input."""
        return self._given(name, self.layouts[name])

    def of_rows(self, name: str) -> Tensor:
        """The argument `name`, which has a value a row and no last dimension, as an input with one of extent 1."""
        return self._given(name, _with_columns(self.layouts[name]))

    def of_tokens(self, name: str) -> Tensor:
        """The argument `name`, which has a value for each token and no dimensions for heads and columns, as an input
        with two of extent 1."""
        return self._given(name, _with_columns(_with_columns(self.layouts[name])))

    def table(self, name: str) -> Tensor:
        """The argument `name`, rows that are chosen by number, as an input that has them along its first axis and their
        columns along its last."""
        t = self.layouts[name]
        (rows, columns), (row, column) = t.shape, t.stride
        between = self.rank - 2
        shape, stride = (rows, *(1,) * between, columns), (row, *(row,) * between, column)
        return self._given(name, replace(t, shape=shape, stride=stride))

    def for_heads(self, name: str, heads: int) -> Tensor:
        """The argument `name`, which has a value for each column, or for each head and column, as an input with all
        heads."""
        t = self.layouts[name]
        if len(t.shape) == 1:
            t = replace(t, shape=(heads, *t.shape), stride=(0, *t.stride))
        return self._given(name, t)

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Context in which tensors have this rank at least, in the place of the first argument's."""
        before, self.rank = self.rank, rank
        yield
        self.rank = before

    def _given(self, name: str, t: Layout) -> Tensor:
        if name not in self._read:
            self._read[name] = self.graph.tensor(
                *self._padded(t.shape, t.stride), t.stored, name=name, byte_alignment=t.alignment
            )
            self.pack[name] = name
        return self._read[name]

    def like(self, name: str, t: Tensor) -> Tensor:
        """The argument `name` as an input that has the axes of `t`, a tensor of another graph of these layouts."""
        if name not in self._read:
            made = self._read[name] = self.graph.tensor_like(t, name).set_is_virtual(False)
            layout = self.layouts[name]
            for _ in range(max(1, self.rank - len(layout.shape) + 1)):
                dim, stride = self._padded(layout.shape, layout.stride)
                if list(dim) == t.get_dim():
                    made.set_stride(stride)
                    break
                layout = _with_columns(layout)
            made.set_data_type(layout.stored).set_byte_alignment(layout.alignment)
            self.pack[name] = name
        return self._read[name]

    def number(self, name: str) -> Tensor:
        """The number `name` that each call gives."""
        if name not in self._read:
            dtype = self.graph.compute_data_type
            self._read[name] = self.graph.tensor([1] * self.rank, data_type=dtype, is_pass_by_value=True, name=name)
            self.pack[name] = name
        return self._read[name]

    def rounded(self, t: Tensor, name: str) -> Tensor:
        """`t`, which whoever reads it gets rounded to the type of the argument `name`."""
        return t.set_data_type(self.layouts[name].stored)

    def get(self, name: str) -> Tensor | None:
        """The argument `name` as an input; None where it is left out."""
        return self[name] if name in self else None

    def weight(self, name: str = "weight", zero_centred: bool = False) -> Tensor | None:
        """The argument `name`, or it + 1; None where it is left out."""
        return self.graph.add(self[name], 1.0) if zero_centred and name in self else self.get(name)

    def norm(
        self,
        x: Tensor,
        weight: str | None = "weight",
        *,
        centred: bool = False,
        zero_centred: bool = False,
        rounded: str | None = None,
        statistics: Sequence[str] = (),
    ) -> Tensor:
        """RMSNorm of x, or layer norm where it is centred, times the argument `weight` or it + 1, plus the argument
        "bias", where these are given.

        weight: its name; None for 1 and no bias. rounded: the argument to whose type the norm is rounded before it is
        multiplied. statistics: the arguments that get the numbers of each row, which the training phase makes, where
        there are such arguments.
        """
        scale, bias = (None, None) if weight is None else (self.weight(weight, zero_centred), self.get("bias"))
        # A norm along the axes that a weight of heads varies along would take heads together.
        apart = scale is not None and (rounded or len(self.layouts[weight].shape) > 1)
        training = any(name in self for name in statistics)
        y, *made = self._norm(x, *(None, None) if apart else (scale, bias), centred, training)
        for name, t in zip(statistics, made, strict=True) if training else ():
            self.store(name, t)
        return self.scaled(y, scale, bias, rounded) if apart else y

    def scaled(self, normal: Tensor, scale: Tensor | None, bias: Tensor | None, rounded: str | None) -> Tensor:
        """A norm, rounded to the type of the argument `rounded`, times scale, plus bias, where these are given."""
        if scale is not None:
            normal = self.graph.mul(self.rounded(normal, rounded) if rounded else normal, scale)
        return normal if bias is None else self.graph.add(normal, bias)

    def training_norm(self, x: Tensor) -> list[Tensor]:
        """RMSNorm of x, and the inverse RMS of each row."""
        return self._norm(x, None, None, False, True)

    def _norm(self, x: Tensor, scale: Tensor | None, bias: Tensor | None, centred: bool, training: bool):
        op = self.graph.layernorm if centred else self.graph.rmsnorm
        phase = norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE
        return op(x, scale=scale, epsilon=self.number("eps"), bias=bias, norm_forward_phase=phase)

    def by_rows(self, values: Tensor, mode: reduction_mode = reduction_mode.ADD) -> Tensor:
        """A number for each row of the first argument."""
        return self.graph.reduction(values, mode=mode).set_dim((*next(iter(self.layouts.values())).shape[:-1], 1))

    def store_read(self, name: str, tensor: Tensor) -> Tensor:
        """Write to the argument `name` a tensor that is also read, unrounded: an output that is read would be read as
        stored. Returns it."""
        self.store(name, self.graph.identity(tensor))
        return tensor

    def scatter(self, name: str, tensor: Tensor, numbers: Tensor) -> None:
        """Write rows of `tensor` to the argument `name`, pages of them or rows, where `numbers` says."""
        t = self.layouts[name]
        *_, heads, columns = t.shape
        rows, apart = math.prod(t.shape[:-2]), t.stride[-3]
        between = (1,) * (self.rank - 3), (apart,) * (self.rank - 3)
        made = self.graph.scatter_rows(tensor, numbers)
        made.set_output().set_name(name).set_data_type(t.stored).set_byte_alignment(t.alignment)
        made.set_dim((rows, *between[0], heads, columns)).set_stride((apart, *between[1], *t.stride[-2:]))
        self.pack[name] = name

    def store(self, name: str, tensor: Tensor, swizzled: bool = False, of_rows: bool = False) -> None:
        """Write `tensor` to the argument `name`, which by then has been read if it ever is. of_rows: as above."""
        t = _with_columns(self.layouts[name]) if of_rows else self.layouts[name]
        own = f"{name}, in place" if name in self._read else name
        tensor.set_output().set_name(own).set_data_type(t.stored).set_byte_alignment(t.alignment)
        if swizzled:
            tensor.set_reordering_type(tensor_reordering.F8_128x4)
        else:
            dim, stride = self._padded(*storage.unpacked(t.stored, t.shape, t.stride))
            tensor.set_dim(dim).set_stride(stride)
        self.pack[own] = name

    def _padded(self, dim: Shape, stride: Shape) -> tuple[Shape, Shape]:
        more = self.rank - len(dim)
        outer = dim[0] * stride[0] if dim and stride else 1
        return (*(1,) * more, *dim), (*(outer,) * more, *stride)


def _with_columns(t: Layout) -> Layout:
    return replace(t, shape=(*t.shape, 1), stride=(*t.stride, 1))
