"""The graph of a call while it is built. It has tensors for the arguments, by name."""

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


class GraphBuilder:
    """A graph, and the parameter of each tensor in its variant pack. layouts: of the arguments in use; tensors of lower
    rank than the first get leading extents of 1. options: names and values of the options that the graph depends on."""

    def __init__(self, graph: pygraph, layouts: Mapping[str, Layout], options: Mapping[str, object]):
        self.graph, self.options = graph, options
        self.layouts = layouts
        self.rank = len(next(iter(layouts.values())).shape)
        self.pack: dict[str, str] = {}
        """Names of parameters by names of the graph's tensors. A parameter that is read and written has two tensors."""
        self._read: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def __getitem__(self, name: str) -> Tensor:
        """The argument `name` as an input."""
        return self._given(name, self.layouts[name])

    def of_rows(self, name: str) -> Tensor:
        """The argument `name`, with one value per row and no last dimension, as an input with a last dimension of
        extent 1."""
        return self._given(name, _with_columns(self.layouts[name]))

    def of_tokens(self, name: str) -> Tensor:
        """The argument `name`, with one value per token and no dimensions for heads and columns, as an input with these
        of extent 1."""
        return self._given(name, _with_columns(_with_columns(self.layouts[name])))

    def table(self, name: str) -> Tensor:
        """The argument `name`, a table of rows chosen by number, as an input with rows along its first axis and columns
        along its last."""
        t = self.layouts[name]
        (rows, columns), (row, column) = t.shape, t.stride
        between = self.rank - 2
        shape, stride = (rows, *(1,) * between, columns), (row, *(row,) * between, column)
        return self._given(name, replace(t, shape=shape, stride=stride))

    def for_heads(self, name: str, heads: int) -> Tensor:
        """The argument `name`, with one value per column, or per head and column, as an input with all heads."""
        t = self.layouts[name]
        if len(t.shape) == 1:
            t = replace(t, shape=(heads, *t.shape), stride=(0, *t.stride))
        return self._given(name, t)

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Context in which tensors have at least this rank instead of the first argument's."""
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
        """The argument `name` as an input with the axes of `t`, a tensor of another graph with these layouts."""
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
        """The scalar `name`, which is given at each call."""
        if name not in self._read:
            dtype = self.graph.compute_data_type
            self._read[name] = self.graph.tensor([1] * self.rank, data_type=dtype, is_pass_by_value=True, name=name)
            self.pack[name] = name
        return self._read[name]

    def rounded(self, t: Tensor, name: str) -> Tensor:
        """`t`, rounded for its readers to the type of the argument `name`."""
        return t.set_data_type(self.layouts[name].stored)

    def get(self, name: str) -> Tensor | None:
        """The argument `name` as an input; None if it is omitted."""
        return self[name] if name in self else None

    def weight(self, name: str = "weight", zero_centred: bool = False) -> Tensor | None:
        """The argument `name`, plus 1 if zero_centred; None if it is omitted."""
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
        """RMSNorm of x, or layer norm if centred, times a weight, plus the argument "bias" if given.

        weight: name of the argument; None for 1 and no bias. zero_centred: multiplies by weight + 1. rounded: argument
        to whose type the norm is rounded before the multiplication. statistics: arguments, if they exist, that receive
        the statistics of each row, which the training phase computes.
        """
        scale, bias = (None, None) if weight is None else (self.weight(weight, zero_centred), self.get("bias"))
        # With a weight per head, the norm would be computed along all axes of the weight, over several heads.
        is_separate = scale is not None and (rounded or len(self.layouts[weight].shape) > 1)
        training = any(name in self for name in statistics)
        y, *made = self._norm(x, *(None, None) if is_separate else (scale, bias), centred, training)
        for name, t in zip(statistics, made, strict=True) if training else ():
            self.store(name, t)
        return self.scaled(y, scale, bias, rounded) if is_separate else y

    def scaled(self, normal: Tensor, scale: Tensor | None, bias: Tensor | None, rounded: str | None) -> Tensor:
        """A norm, rounded to the type of the argument `rounded`, times scale, plus bias; each if given."""
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
        """A reduction to one number per row of the first argument."""
        return self.graph.reduction(values, mode=mode).set_dim((*next(iter(self.layouts.values())).shape[:-1], 1))

    def store_read(self, name: str, tensor: Tensor) -> Tensor:
        """Write a tensor to the argument `name` that others read, too, unrounded, and return it. Readers of an output
        itself would read it as stored."""
        self.store(name, self.graph.identity(tensor))
        return tensor

    def scatter(self, name: str, tensor: Tensor, numbers: Tensor) -> None:
        """Write rows of `tensor` to rows of the argument `name`, which may be in pages, at the indices `numbers`."""
        t = self.layouts[name]
        *_, heads, columns = t.shape
        rows, row_stride = math.prod(t.shape[:-2]), t.stride[-3]
        between = (1,) * (self.rank - 3), (row_stride,) * (self.rank - 3)
        made = self.graph.scatter_rows(tensor, numbers)
        made.set_output().set_name(name).set_data_type(t.stored).set_byte_alignment(t.alignment)
        made.set_dim((rows, *between[0], heads, columns)).set_stride((row_stride, *between[1], *t.stride[-2:]))
        self.pack[name] = name

    def store(self, name: str, tensor: Tensor, swizzled: bool = False, of_rows: bool = False) -> None:
        """Write `tensor` to the argument `name`, whose reads must come before. of_rows: see the method `of_rows`."""
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
