"""Two regions of one program that read a tensor together, as queries and keys do that are rotated: one operator."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch.fx import Graph, Node

from graphfuse.torch.fusion.meaning import hint, same, told
from graphfuse.torch.regions.choose import TorchRegion, device_of
from graphfuse.torch.regions.graphs import RegionGraphs, has_kernels
from graphfuse.torch.regions.joined import JoinedGraphs, JoinedProgram
from graphfuse.torch.regions.program import Program
from graphfuse.torch.regions.replace import fits
from graphfuse.torch.regions.traffic import traffic


def joined(graph: Graph, regions: Sequence[TorchRegion], left: Container[Node]) -> list[TorchRegion]:
    """Regions, of which two are one, in the place of the first, where one kernel computes them. left: first outputs of
    those that are not replaced."""
    found, waiting = [], dict[tuple[object, ...], int]()
    for region in regions:
        key = _read_together(region) if region.outputs[0] not in left else ()
        place = waiting.pop(key, None) if key else None
        one = None if place is None else _joined(graph, found[place], region)
        if one is not None:
            found[place] = one
            continue
        if key:
            waiting[key] = len(found)
        found.append(region)
    return found


def _read_together(region: TorchRegion) -> tuple[object, ...]:
    """The program, and the nodes that another region of it may read as well; () for a region that is none of two."""
    program, pairs = region.program, [*zip(region.inputs, region.program.inputs, strict=True)]
    shared = [node for node, one in pairs if _is_shared(program, one.name)]
    each = [(told(node), one) for node, one in pairs if node not in shared]
    if not shared or program.follows or len(program.inputs[0].axes) < 3 or not _is_known(program):
        return ()
    if any(told(node).requires_grad for node in shared) or any(t.dim() > 1 and not one.extents.whole for t, one in each):
        return ()
    return program.text, *shared


def _is_shared(program: Program, name: str) -> bool:
    """True for what is the same along the axis before the columns, and not along all others."""
    axes = next(one.axes for one in program.inputs if one.name == name)
    return axes[-2] in "1-" and "n" in axes[:-2]


def _is_known(program: Program) -> bool:
    """True if all that is computed has the rows, and norms can do without a bias."""
    steps = (step for step in program.steps if step.op in ("layernorm", "rmsnorm"))
    plain = all(step.op == "rmsnorm" and "bias" not in step.inputs for step in steps)
    graphs = RegionGraphs.of(program.text)
    is_one = graphs.first == program.inputs[0].name and not graphs.shared and not graphs.as_given
    return plain and is_one and all(one.extents.whole for one in program.outputs)


def _joined(graph: Graph, one: TorchRegion, other: TorchRegion) -> TorchRegion | None:
    """Both as one region; None where no kernel computes them, or nowhere in the graph."""
    (a, b), program = (_rows(each) for each in (one, other)), one.program
    heads = a[-2], b[-2]
    is_known = all(isinstance(n, int) for n in heads) and all(map(same, a[:-2], b[:-2])) and same(a[-1], b[-1])
    if not is_known or type(one.tensors[0]).__name__ == "DTensor":
        return None
    shared = tuple(each.name for each in program.inputs if _is_shared(program, each.name))
    own = [n for n, each in enumerate(program.inputs) if each.name not in shared]
    count, made = len(one.inputs), range(len(one.inputs), len(one.tensors))
    nodes = sorted({*one.nodes, *other.nodes})
    inputs, outputs = (*one.inputs, *(other.inputs[n] for n in own)), one.outputs + other.outputs

    def both(of: str) -> tuple:
        mine, theirs = getattr(one, of), getattr(other, of)
        return *mine[:count], *(theirs[n] for n in own), *mine[count:], *(theirs[n] for n in made)

    joint = JoinedProgram(program, heads, shared)
    moved = traffic(nodes, inputs, outputs)
    region = TorchRegion(joint, tuple(nodes), inputs, outputs, both("tensors"), both("orders"), moved)
    graphs, rows = JoinedGraphs.of(joint), tuple(map(hint, a))
    trains = any(told(node).requires_grad for node in outputs)
    variants = (graphs.training, graphs.backward) if trains else (graphs.inference,)
    device = str(device_of(one.tensors[0].device))
    has_all = all(has_kernels(each, each.arguments, rows, (), device) for each in variants)
    return region if has_all and fits(graph, region, inputs)[1] else None


def _rows(region: TorchRegion) -> tuple[object, ...]:
    return tuple(region.tensors[0].shape[d] for d in region.orders[0])
