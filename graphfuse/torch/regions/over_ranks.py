"""``graphfuse::region_over_ranks(Tensor[] inputs, str graph, int summed, str group) -> Tensor[]``

The operator is a region with one input that is summed over the ranks of a group. It has no gradients. One kernel does
both if the input lies in symmetric memory, or may be copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.fx import Node

from graphfuse.base.errors import SerializedError, VariantPackTypeError
from graphfuse.functional import symmetric
from graphfuse.functional.declaration import Function, Variant
from graphfuse.functional.function import entry
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.operator import LIBRARY
from graphfuse.functional.rank_functions import PEERS
from graphfuse.op_graph.freeze import infer
from graphfuse.runtime import torch_private
from graphfuse.torch.analysis.meaning import value
from graphfuse.torch.regions.graphs import RegionGraphs, read_input
from graphfuse.torch.regions.operator import RegionOperator, without_values
from graphfuse.torch.regions.program import Program, ProgramStep, Result, Source


@dataclass(frozen=True, eq=False)
class SummedRegion:
    """A program, and the number of its input that is a sum over ranks."""

    graphs: RegionGraphs
    summed: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(text: str, summed: int) -> SummedRegion:
        graphs = RegionGraphs.of(text)
        inputs = graphs.program.inputs
        if summed not in range(len(inputs)) or not can_be_summed(graphs.program, summed):
            raise SerializedError(
                f"input {summed} of a region is a sum over ranks; accepted: one that has all rows and columns, of "
                f"{len(inputs)}"
            )
        return SummedRegion(graphs, summed)

    @cached_property
    def one_kernel(self) -> Callable[..., Any]:
        """Function of the inputs, a table of peers and the rank, which computes the sum and the program."""
        results = self.graphs.results
        arguments = (*self.graphs.tensors, PEERS, *results)
        names = (*(a.name for a in self.graphs.tensors), PEERS.name, "rank")
        made = tuple(a.name for a in results)
        variant = Variant(arguments, self._draw)
        return entry(Function("region_over_ranks", names, {}, ("rank",), variant, made), _refused)

    def _draw(self, d: GraphBuilder) -> None:
        program = self.graphs.program
        given = {one.name: read_input(d, one) for one in program.inputs}
        name = program.inputs[self.summed].name
        given[name] = d.graph.all_reduce(given[name], d[PEERS.name], **d.options)
        infer(d.graph, d.graph.nodes[-1])
        made = program.draw(d.graph, given)
        for one in program.outputs:
            d.store(one.name, made[one.step], of_rows=one.extents.without_columns)


def can_be_summed(program: Program, number: int) -> bool:
    """True if an input of a program may be a sum over ranks."""
    return not program.joined and program.inputs[number].extents.whole


def partial_of_sum(t: Node) -> Node | None:
    """Node of the partial values whose sum over ranks `t` is; None if `t` is no such sum."""
    if _method(t) != "to_local" or len(t.args) != 1 or t.kwargs:
        return None
    whole = t.args[0]
    if _method(whole) != "redistribute" or [*whole.users] != [t]:
        return None
    partial = whole.args[0]
    before, after = value(partial), value(whole)
    if not all(hasattr(one, "placements") for one in (before, after)) or before.device_mesh.ndim != 1:
        return None
    if not isinstance(before, torch.Tensor) or before.requires_grad or before.dtype is not after.dtype:
        return None
    (placement,), (made,) = before.placements, after.placements
    return partial if placement.is_partial("sum") and made.is_replicate() else None


def _method(node: Node) -> str:
    """Method of a DTensor that a node calls. Before 2.13, torch wraps the method and its arguments in a function."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix("prim_") if name.startswith("prim_") else ""


def with_sum_before(program: Program) -> Program:
    """Program of two tensors, whose sum takes the place of the first input. It returns the sum, rounded to its type,
    and the results of the original program."""
    first = program.inputs[0]
    total = ProgramStep("add", {"a": "in0", "b": "in1"}, {}, "" if first.dtype == "FLOAT" else first.dtype)
    new: dict[Source, Source] = {f"@{n}": f"@{n + 1}" for n in range(len(program.steps))}
    new |= {one.name: f"in{n + 1}" for n, one in enumerate(program.inputs)} | {first.name: "@0"}
    return Program(
        (first, *(replace(one, name=f"in{n + 1}") for n, one in enumerate(program.inputs))),
        (total, *(step.reading(new) for step in program.steps)),
        (Result(0, first.axes, first.dtype), *(replace(one, step=one.step + 1) for one in program.outputs)),
        program.follows,
    )


def run(
    inputs: Sequence[torch.Tensor], graph: str, summed: int, group: distributed.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Results of the region that a text describes, with one input summed over ranks."""
    x = inputs[summed]
    peers = symmetric.peers(x, group)
    if peers is None and (shared := symmetric.scratch(group, "copies", x.shape, x.dtype, x.device)) is not None:
        inputs, x = [*inputs[:summed], shared.copy_(x), *inputs[summed + 1 :]], shared
        peers = symmetric.peers(x, group)
    if peers is not None:
        kernel = SummedRegion.of(graph, summed).one_kernel
        made = peers.call(_NAME, kernel, *inputs, peers.numbers, peers.rank)
    else:
        total = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        given = [*inputs[:summed], total, *inputs[summed + 1 :]]
        made = RegionOperator.of(graph).inference.function(*given)
    return made if isinstance(made, tuple) else (made,)


def _refused(*values: object) -> NoReturn:
    raise VariantPackTypeError("region_over_ranks is given tensors of a class of their own; accepted: plain tensors")


def _run(inputs: Sequence[torch.Tensor], graph: str, summed: int, group: str) -> list[torch.Tensor]:
    return list(run(inputs, graph, summed, torch_private.process_group(group)))


def _fake(inputs: Sequence[torch.Tensor], graph: str, summed: int, group: str) -> list[torch.Tensor]:
    return without_values(RegionOperator.of(graph).inference.declaration, inputs)


_NAME = "region_over_ranks"
LIBRARY.define(f"{_NAME}(Tensor[] inputs, str graph, int summed, str group) -> Tensor[]")
LIBRARY.impl(_NAME, _run, "CompositeExplicitAutograd")
LIBRARY.impl(_NAME, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake(f"graphfuse::{_NAME}", _fake, lib=LIBRARY)
region_over_ranks = getattr(torch.ops.graphfuse, _NAME).default
