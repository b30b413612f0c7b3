"""Joining of two regions of one program that read a tensor together, such as rotated queries and keys, into one
operator."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from torch.fx import Graph

from graphfuse.torch.analysis.meaning import recorded_result, same
from graphfuse.torch.regions.choose import TorchRegion
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.program import Program
from graphfuse.torch.regions.replace import fits
from graphfuse.torch.regions.traffic import traffic


def join_pairs(graph: Graph, regions: Sequence[TorchRegion], left: Container[object]) -> list[TorchRegion]:
    """Regions, with two rotations that read a tensor together joined into one, in the place of the first. left: first
    outputs of regions that are not replaced."""
    found, waiting = list[TorchRegion](), dict[tuple[object, ...], int]()
    for region in regions:
        key = _key(region) if region.outputs[0] not in left else ()
        place = waiting.pop(key, None) if key else None
        one = None if place is None else _join(graph, found[place], region)
        if one is not None:
            found[place] = one
            continue
        if key:
            waiting[key] = len(found)
        found.append(region)
    return found


def _key(region: TorchRegion) -> tuple[object, ...]:
    """Key that two regions share if they can be joined: the program, and the nodes that both read. () if a region
    cannot be joined."""
    program = region.program
    if program.follows or len(program.inputs[0].axes) < 3 or not _is_joinable(program):
        return ()
    pairs = [*zip(region.inputs, program.inputs, strict=True)]
    shared = [node for node, one in pairs if one.extents.is_of_tokens]
    given = [recorded_result(node) for node, one in pairs if not one.extents.is_of_tokens and not one.extents.whole]
    fits = not any(recorded_result(node).requires_grad for node in shared) and all(t.dim() == 1 for t in given)
    return (program.text, *shared) if shared and fits else ()


def _is_joinable(program: Program) -> bool:
    """True for a rotation whose outputs all have the shape of the rows, and whose norms can be computed without a
    scale."""
    norms = (step for step in program.steps if step.op in ("layernorm", "rmsnorm"))
    graphs = RegionGraphs.of(program.text)
    return (
        any(step.op == "turn_pairs" for step in program.steps)
        and all(step.op == "rmsnorm" and "bias" not in step.inputs for step in norms)
        and all(one.extents.whole for one in program.outputs)
        and graphs.first == program.inputs[0].name
        and not graphs.as_given
    )


def _join(graph: Graph, one: TorchRegion, other: TorchRegion) -> TorchRegion | None:
    """Both as one region; None if that has no place in the graph."""
    a, b = ([region.tensors[0].shape[d] for d in region.orders[0]] for region in (one, other))
    *rows, heads, columns = a
    is_alike = all(map(same, (*rows, columns), (*b[:-2], b[-1]))) and isinstance(heads, int) and isinstance(b[-2], int)
    if not is_alike or type(one.tensors[0]).__name__ == "DTensor":
        return None
    program = one.program
    shared = [each.extents.is_of_tokens for each in program.inputs]

    def both(mine: Sequence, theirs: Sequence, is_shared: Sequence[bool]) -> tuple:
        each = zip(mine, theirs, is_shared, strict=True)
        return tuple(made for x, y, once in each for made in ((x,) if once else (x, y)))

    made = [False] * len(one.outputs)
    inputs, outputs = both(one.inputs, other.inputs, shared), both(one.outputs, other.outputs, made)
    region = TorchRegion(
        replace(program, joined=(heads, b[-2])),
        tuple(sorted({*one.nodes, *other.nodes})),
        inputs,
        outputs,
        both(one.tensors, other.tensors, shared + made),
        both(one.orders, other.orders, shared + made),
        traffic([*one.nodes, *other.nodes], inputs, outputs),
        tuple(sorted({*one.reductions, *other.reductions})),
    )
    return region if fits(graph, region, inputs)[1] else None
