"""Calls of a region in place of traced calls: which of their arguments the region's program reads, which of its results
they return, and as which views."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.meaning import called_name, is_item, is_op, permutation, recorded_result, value
from graphfuse.torch.analysis.trace import Trace
from graphfuse.torch.regions.choose import TorchRegion
from graphfuse.torch.regions.operator import RegionOperator
from graphfuse.torch.regions.program import Program

_Dims = tuple[int | None, ...]
"""The dimension of a tensor for each dimension of a view of it; None for a new one."""


@dataclass(frozen=True)
class ArgumentView:
    """The view of a tensor that a program reads, like ``replace.Arrangement`` for graphs.

    groups: number and columns of the parts that a row is viewed as; empty if it is not. order: order of the dimensions
    after that. index: then the index that adds dimensions; empty if it adds none. is_packed: whether results are
    contiguous whatever the strides of the tensor, so that kernels need contiguous columns."""

    groups: tuple[int, ...]
    order: tuple[int, ...]
    index: tuple[slice | None, ...]
    is_packed: bool

    @staticmethod
    def made(groups: tuple[int, ...], dims: _Dims, is_packed: bool) -> "ArgumentView":
        order = tuple(d for d in dims if d is not None)
        index = tuple(None if d is None else slice(None) for d in dims) if None in dims else ()
        return ArgumentView(groups, order, index, is_packed)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        t = (t.unflatten(-1, self.groups) if self.groups else t).permute(self.order)
        t = t[self.index] if self.index else t
        return t.contiguous() if self.is_packed and t.stride(-1) != 1 else t


@dataclass(frozen=True)
class ResultView:
    """A result that is returned. number: its index among a program's results. order: the dimension of that for each
    that is returned. is_joined: whether the last two, parts of a row and their columns, are then one."""

    number: int
    order: tuple[int, ...]
    is_joined: bool

    @property
    def is_unchanged(self) -> bool:
        return [*self.order] == sorted(self.order) and not self.is_joined

    def of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        t = results[self.number].permute(self.order)
        return t.flatten(-2) if self.is_joined else t


@dataclass(frozen=True)
class RegionCall:
    """read: indices of the arguments that the program reads, and the views of them, None for an argument itself.
    returned: the results."""

    read: tuple[tuple[int, ArgumentView | None], ...]
    returned: tuple[ResultView, ...]

    @property
    def is_arranged(self) -> bool:
        """True if views are read or returned."""
        return any(view is not None for _, view in self.read) or not all(one.is_unchanged for one in self.returned)

    @property
    def is_permuted(self) -> bool:
        """True if arguments are read with their dimensions in another order."""
        return any(view is not None and [*view.order] != sorted(view.order) for _, view in self.read)

    def run(self, program: Program, count: int) -> Callable[..., object]:
        """Function of `count` arguments, which returns the result, or a list of several."""
        run, read = RegionOperator.of(program.text).run, self.read
        returned = [(one.number, None if one.is_unchanged else one) for one in self.returned]
        if not self.is_arranged and len(returned) == 1:
            places = [place for place, _ in read]
            return run if places == [*range(count)] else lambda *given: run(*[given[place] for place in places])

        def arranged(*given):
            results = run(*[given[n] if view is None else view.of(given[n]) for n, view in read])
            results = results if isinstance(results, tuple) else (results,)
            found = [results[n] if view is None else view.of(results) for n, view in returned]
            return found if len(found) > 1 else found[0]

        return arranged


def region_call(trace: Trace, region: TorchRegion, activations: int) -> RegionCall | str:
    """The call of the region that contains a whole trace, or the reason why there is none. activations: number of
    arguments before the parameters."""
    sources, count = [*trace.sources], len(region.inputs)
    layouts = [*zip(region.tensors, region.orders, strict=True)]
    read: list[tuple[int, ArgumentView | None]] = []
    for node, (tensor, order) in zip(region.inputs, layouts[:count], strict=True):
        source, dims = _shown(node, trace.sources)
        if source not in trace.sources:
            source, dims = _whole(_origin(node))
        if source not in trace.sources:
            return "it reads more than its input and its parameters"
        shape = [1 if d is None else recorded_result(source).shape[d] for d in dims]
        if (groups := _groups(shape, tensor)) is None or groups and not _is_whole(source, dims):
            return "it reshapes its rows to more than parts of them"
        place, view = sources.index(source), tuple(order) if groups else tuple(dims[d] for d in order)
        is_packed = place < activations and not region.program.follows
        unchanged = not groups and _is_whole(source, view)
        read.append((place, None if unchanged else ArgumentView.made(groups, view, is_packed)))
    returned: list[ResultView] = []
    for node in trace.graph.output_node().args[0]:
        while node not in region.outputs and _is_same(node):
            node = node.args[0]
        source, dims = _shown(node, region.outputs)
        if source not in region.outputs or None in dims:
            return "it returns a view"
        number = region.outputs.index(source)
        tensor, order = layouts[count + number]
        back, groups = tuple(map(order.index, range(len(order)))), _groups(recorded_result(source).shape, tensor)
        if groups is None or groups and not _is_whole(source, dims):
            return "it returns a view"
        returned.append(ResultView(number, back if groups else tuple(back[d] for d in dims), bool(groups)))
    return RegionCall(tuple(read), tuple(returned))


def needs_contiguous(node: Node) -> bool:
    """True for a view that not every tensor of its shape has, even with contiguous columns."""
    if is_op(node, "view") is None or called_name(node) == "unsqueeze" or is_item(node):
        return False
    source = value(node.args[0])
    return source is None or not _splits_columns(source, recorded_result(node)) and not needs_columns(node)


def needs_columns(node: Node) -> bool:
    """True for a view that joins parts of rows again, where a new tensor has these. Its columns are contiguous if those
    of the inputs are."""
    source = value(node.args[0]) if is_op(node, "view") and not is_item(node) else None
    if source is None or not _splits_columns(recorded_result(node), source):
        return False
    root = node.args[0]
    while is_op(root, "view", "permute") and isinstance(root.args[0], Node):
        root = root.args[0]
    return root.op == "call_function"


def _splits_columns(whole: torch.Tensor, parts: torch.Tensor) -> bool:
    return parts.dim() == whole.dim() + 1 and parts.shape[:-2] == whole.shape[:-1]


def _groups(shape: Sequence[int], tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Number and columns of the parts that a program reads the last dimension of a shape as; () if it reads the shape
    unchanged, None if it reads another."""
    if [*tensor.shape] == [*shape]:
        return ()
    return tuple(tensor.shape[-2:]) if [*tensor.shape[:-2]] == [*shape[:-1]] else None


def _is_same(node: Node) -> bool:
    return inductor.is_free(node) and recorded_result(node).shape == recorded_result(node.args[0]).shape


def _whole(node: Node) -> tuple[Node, _Dims]:
    return node, tuple(range(recorded_result(node).dim()))


def _is_whole(node: Node, dims: _Dims) -> bool:
    return dims == _whole(node)[1]


def _shown(node: Node, ends: Container[Node]) -> tuple[Node, _Dims]:
    """The node among `ends` that a node shows with its dimensions in another order, and their order. If there is none,
    the first node that such views show."""
    dims = _whole(node)[1]
    while node not in ends:
        rank = recorded_result(node).dim()
        if found := is_op(node, "permute"):
            of = permutation(found, rank)
        elif called_name(node) == "unsqueeze":
            new = node.args[1] % rank
            of = (*range(new), None, *range(new, rank - 1))
        else:
            break
        if of is None:
            break
        node, dims = node.args[0], tuple(None if d is None else of[d] for d in dims)
    return node, dims


def _origin(node: Node) -> Node:
    """The node whose rows this node views as groups; the node itself if it is no such view."""
    found = is_op(node, "view")
    source = found.args[0] if found else None
    is_split = value(source) is not None and value(source).shape[:-1] == recorded_result(node).shape[:-2]
    return source if isinstance(source, Node) and is_split else node
