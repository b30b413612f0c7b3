"""Choice of the parts of a torch program that become regions. Patterns and planning choose, as for any op graph."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.enums import heur_mode
from graphfuse.base.errors import GraphValidationError
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import packed_stride
from graphfuse.op_graph.lower import lower
from graphfuse.planning import cover, plan, registry
from graphfuse.runtime import device as devices
from graphfuse.torch.analysis import inductor
from graphfuse.torch.analysis.components import connected_components
from graphfuse.torch.analysis.meaning import as_sequence, hint, is_changed, recorded_result
from graphfuse.torch.analysis.traversal import reachable
from graphfuse.torch.regions.call_translation import OwnedStep, Value
from graphfuse.torch.regions.columns import COLUMNS, NOT_ONE_DIMENSION, ColumnAxes
from graphfuse.torch.regions.groups import depends_on_whole_rows, groups
from graphfuse.torch.regions.norm_recognition import recognize_norms
from graphfuse.torch.regions.pair_turns import turn_of
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from graphfuse.torch.regions.program_tensors import ProgramTensor, SharedExtents
from graphfuse.torch.regions.traffic import traffic
from graphfuse.torch.regions.translate import TranslatedGraph


@dataclass(frozen=True, eq=False)
class TorchRegion:
    """A part of a graph that one operator computes.

    program: what is computed.
    nodes: the nodes that it replaces, in order.
    inputs: nodes of the tensors that it reads, in the program's order.
    outputs: nodes of its results.
    tensors: those of the inputs, then of the outputs. They are viewed in groups if these are the program's rows, and
    have one dimension for the columns if rows lie along several.
    orders: the dimensions of these tensors in the program's order.
    moved: bytes that it moves, in words.
    reductions: nodes that reduce, which a report names.
    columns: the dimensions that rows lie along.
    why_parts: why it only reduces parts of rows, if whole rows are reduced before or after; "" if there is no reason.
    """

    program: Program
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    tensors: tuple[torch.Tensor, ...]
    orders: tuple[tuple[int, ...], ...]
    moved: str
    reductions: tuple[Node, ...]
    columns: ColumnAxes = COLUMNS
    why_parts: str = ""


def find(
    graph: Graph, parts: Mapping[Node, int], together: bool = True, why_left: dict[Node, str] | None = None
) -> list[TorchRegion]:
    """Regions of a graph, in this order: of groups of rows, with the operations on whole rows around them; of rows
    along the last dimension; of rows along other or several dimensions.

    parts: nodes that a region may have, each with the number of its part of the graph; a region stays within one part.
    together: whether one region may reduce rows and parts of them. why_left: receives reductions that are in no region,
    and why.
    """
    left, found, why_parts = _around_reductions(graph, parts), list[TorchRegion](), dict[Node, str]()

    def regions_of(translation: TranslatedGraph, without: Container[Node] = ()) -> list[TorchRegion]:
        usable = {n: number for n, number in parts.items() if n in left and n not in without}
        return _find(graph, usable, translation)

    def take(regions: Iterable[TorchRegion]) -> None:
        found.extend(regions)
        left.difference_update(node for region in found for node in region.nodes)

    for one in groups(graph, left):
        inside = one.nodes_inside(graph)
        if together and len({node in inside for node in left if inductor.is_reduction(node) or turn_of(node)}) > 1:
            of_rows = TranslatedGraph(COLUMNS, one, inside, of_rows=True)
            take(region for region in regions_of(of_rows) if reduces_rows_and_parts(region.program.steps))
            why_parts |= {
                node: why for node, why in of_rows.why.items() if node in inside and inductor.is_reduction(node)
            }
        if one.is_flat:  # flat parts are rows as they are
            continue
        regions = regions_of(TranslatedGraph(COLUMNS, one, inside), depends_on_whole_rows(graph, inside))
        take(region for region in regions if any(one.is_split(n) or one.is_joined(n) for n in region.nodes))
    along = {COLUMNS: TranslatedGraph()}
    take(regions_of(along[COLUMNS]))
    reduced = along[COLUMNS].reduced
    for columns in sorted({*reduced.values()} - {COLUMNS}):
        along[columns] = TranslatedGraph(columns)
        take(regions_of(along[columns]))
    if why_left is not None:
        untranslated = {node for node in graph.nodes if inductor.takes_by_number(node) and node in along[COLUMNS].why}
        reductions = [n for n in graph.nodes if n in left and (inductor.is_reduction(n) or n in untranslated)]
        # Sums of all elements, such as those of losses, reduce no rows.
        reductions = [node for node in reductions if getattr(as_sequence(recorded_result(node))[0], "shape", ())]
        whys = {node: along[reduced.get(node, COLUMNS)].why_left(node) for node in reductions}
        why_left |= {node: why for node, why in whys.items() if why}
    said = ("; ".join({why_parts[node]: None for node in region.nodes if node in why_parts}) for region in found)
    return [replace(region, why_parts=why) for region, why in zip(found, said, strict=True)]


def reduces_rows_and_parts(steps: Sequence[ProgramStep]) -> bool:
    """True if steps reduce or rotate both rows and parts of rows."""
    return len({step.part for step in steps if step.op in _ANCHORS or step.op == "turn_pairs"}) > 1


def _around_reductions(graph: Graph, parts: Mapping[Node, int]) -> set[Node]:
    """Nodes that a region may have: those connected with a reduction, or with a common input. Others are not
    translated, as translation runs them, which takes long."""
    found = (n for n in graph.nodes if n in parts and inductor.is_fused(n))
    groups = connected_components((node, (node, *node.all_input_nodes)) for node in found)
    return {node for group in groups if any(map(inductor.is_reduction, group)) for node in group}


def _find(graph: Graph, parts: Mapping[Node, int], translation: TranslatedGraph) -> list[TorchRegion]:
    """Regions in a graph, whose nodes are added to a translation."""
    levels, given = dict[Node, int](), set[Node]()
    for node in graph.nodes:
        before = len(translation.steps)
        usable = node in parts and not _is_written(node, translation) and translation.add(node)
        usable = usable and not _is_elsewhere(node, translation, parts)
        read = ((t, (t, node) in translation.in_memory) for t in node.all_input_nodes if t in levels)
        below = max((levels[t] + in_memory for t, in_memory in read), default=0)
        is_free = inductor.is_free(node) or not inductor.reads(node)
        if node.op in ("placeholder", "get_attr") or is_free and given.issuperset(node.all_input_nodes):
            given.add(node)
        levels[node] = below if usable or node in given else below + 1
        if not usable:
            translation.values.pop(node, None)
            del translation.steps[before:]
    _raise_levels(graph, translation, levels)
    _drop_unread(graph, translation)
    visible = _visible(translation)
    components = _components(translation, levels, parts)
    return [region for steps in components for region in _regions(translation, visible, steps)]


def _is_written(node: Node, translation: TranslatedGraph) -> bool:
    """True if the result of a node, or a tensor that it reads, is written in place. The translation receives this as
    the reason why the node has no step."""
    written = [t for t in (node, *node.all_input_nodes) if is_changed(t)]
    if written:
        what = "its result" if written[0] is node else f"{written[0].name}, which it reads,"
        translation.why[node] = f"{what} is written in place"
    return bool(written)


def _raise_levels(graph: Graph, translation: TranslatedGraph, levels: dict[Node, int]) -> None:
    """Raises the levels of nodes to those of their readers, so that a node is computed with its first readers."""
    for node in reversed(graph.nodes):
        if node in translation.values:
            read = [u for u in node.users if u.users or not (u.op == "output" or u in translation.values)]
            from_memory = {u for u in read if u not in translation.values or (node, u) in translation.in_memory}
            levels[node] = max(levels[node], min((levels[u] - (u in from_memory) for u in read), default=0))


def _drop_unread(graph: Graph, translation: TranslatedGraph) -> None:
    """Removes steps of nodes that are not read. Otherwise their inputs would count as read."""
    unread = translation.unread
    for node in reversed(graph.nodes):
        if node in translation.values and unread.issuperset(node.users):
            unread.add(node)
            del translation.values[node]
    translation.steps = [step for step in translation.steps if step.owner not in unread]


def _is_elsewhere(node: Node, translation: TranslatedGraph, parts: Mapping[Node, int]) -> bool:
    """True for a view of a tensor that another part of the graph makes: modes such as no_grad may differ there."""
    values = translation.values[node]
    steps = (v.step for v in as_sequence(values) if isinstance(v, Value))
    return any(step is not None and parts[step.owner] != parts[node] for step in steps)


def _components(
    translation: TranslatedGraph, levels: Mapping[Node, int], parts: Mapping[Node, int]
) -> Sequence[Sequence[OwnedStep]]:
    """Steps in groups that are connected, or read the same tensor, with no other operation between them."""

    def place(step: OwnedStep) -> tuple[int, int]:
        return levels[step.owner], parts[step.owner]

    def keys(step: OwnedStep) -> Sequence[object]:
        beside = (v.step for v in step.read if v.step is not None and place(v.step) == place(step))
        shared = (step.owner, *(id(v.tensor) for v in step.read if v.step is None and v.tensor.dim() > 1))
        return (step, *beside, *((place(step), one) for one in shared))

    return connected_components((step, keys(step)) for step in translation.steps)


def _visible(translation: TranslatedGraph) -> dict[OwnedStep, Node]:
    """The first node that has the result of a step, by step."""
    found: dict[OwnedStep, Node] = {}
    for node, value in translation.values.items():
        for one in as_sequence(value):
            if isinstance(one, Value) and one.step is not None and isinstance(recorded_result(node), torch.Tensor):
                found.setdefault(one.step, node)
    return found


def _regions(
    translation: TranslatedGraph, visible: Mapping[OwnedStep, Node], steps: Sequence[OwnedStep]
) -> Iterator[TorchRegion]:
    """Regions of connected steps."""
    steps = _read_steps(steps, visible)
    assembled = _Assembled.of(steps, visible, translation) if _reduces(steps) else None
    for chosen in () if assembled is None else _kernel_groups(translation, assembled):
        found = _Assembled.of(_without_casts(chosen, visible), visible, translation)
        if found is not None and isinstance(found.region, TorchRegion):
            yield found.region
        elif found is not None:
            translation.declined |= {step.owner: found.region for step in chosen}


def _read_steps(steps: Sequence[OwnedStep], visible: Mapping[OwnedStep, Node]) -> Sequence[OwnedStep]:
    """Steps whose results are read. The mean that comes with a variance, for example, may not be."""
    found: list[OwnedStep] = []
    read: set[OwnedStep | None] = {*visible}
    for step in reversed(steps):
        if step in read:
            found.append(step)
            read.update(v.step for v in step.read)
    return found[::-1]


def _reduces(steps: Sequence[OwnedStep]) -> bool:
    return any(step.op in _ANCHORS for step in steps)


def _without_casts(steps: Sequence[OwnedStep], visible: Mapping[OwnedStep, Node]) -> Sequence[OwnedStep]:
    """Steps without final casts to a wider type that only inductor's kernels read: without the casts, these read
    less."""
    read = {v.step for step in steps for v in step.read}
    return [step for step in steps if step in read or not _is_cast_at_end(step, visible)]


def _is_cast_at_end(step: OwnedStep, visible: Mapping[OwnedStep, Node]) -> bool:
    of = step.inputs.get("input")
    if step.op != "identity" or step.dtype or not isinstance(of, Value) or not {step, of.step} <= {*visible}:
        return False
    return all(map(inductor.is_fused, visible[step].users))


def _kernel_groups(translation: TranslatedGraph, assembled: _Assembled) -> Iterator[Sequence[OwnedStep]]:
    """Groups of steps, each of which becomes a kernel."""
    owners = [*dict.fromkeys(step.owner for step in assembled.steps)]
    owned = tuple(owners.index(step.owner) for step in assembled.steps)
    given = assembled.program.text, assembled.dims, assembled.strides, owned, device_of(assembled.device)
    kernels, declined, refused = _kernels(*given)
    translation.declined |= {owners[number]: why for number, why in declined}
    for owner in owners if refused else ():
        if translation.part(owner):
            translation.why.setdefault(owner, refused)
    yield from filter(_reduces, ([assembled.steps[n] for n in numbers] for numbers in kernels))


Shapes = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def _kernels(
    text: str, dims: Shapes, strides: Shapes, owned: tuple[int, ...], device: Device
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, str], ...], str]:
    """Numbers of a program's steps in groups, each of which becomes a kernel; and why other steps are in none.

    dims, strides: of its inputs. owned: the number of each step's node; all steps of a node are in one kernel. The
    reasons are by the number of a node, for the smallest group that has it; the last is for a kernel that would reduce
    rows and parts of them.
    """
    program, refused, declined = Program.read(text), list[str](), dict[int, str]()
    try:
        frozen = lower(freeze(program.graph(dims, strides)[0]))
    except GraphValidationError:
        return (), (), ""
    known = registry.registry((), ())
    known = replace(known, patterns=tuple(pattern for pattern in known.patterns if not pattern.last))
    regions, _ = plan.matches(frozen, known)
    names = ([frozen.nodes[i].name for i in r.subgraph.node_ids] for r in regions)
    numbers = [tuple(int(name[1:]) for name in found if name.startswith("s")) for found in names]

    def taken(number: int) -> bool:
        owners, facts = {owned[n] for n in numbers[number]}, regions[number].facts
        if any(owner in owners and n not in numbers[number] for n, owner in enumerate(owned)):
            return False
        serving = (e for e in known.engines if isinstance(facts, e.facts) and heur_mode.OPENSOURCE in e.modes)
        reasons = [engine.why_not(facts, device) for engine in serving]
        if None not in reasons and reduces_rows_and_parts([program.steps[n] for n in numbers[number]]):
            refused.extend(map(str, reasons))
        if None not in reasons and reasons:
            declined.update(dict.fromkeys(owners, str(reasons[0])))
        return None in reasons

    chosen = cover.choose(frozen, [r.subgraph for r in regions], taken).chosen
    return tuple(numbers[n] for n in chosen), tuple(declined.items()), next(iter(refused), "")


_ANCHORS = frozenset({"reduction", "softmax", "log_softmax", "logsumexp", "cross_entropy", "rmsnorm", "layernorm"})
"""Ops that reduce rows. Every region has one of them."""


@dataclass(frozen=True, eq=False)
class _Assembled:
    """Steps as a program. dims, strides: of its inputs. region: the region, or why the steps are none."""

    program: Program
    steps: tuple[OwnedStep, ...]
    dims: Shapes
    strides: Shapes
    device: torch.device
    region: TorchRegion | str

    @staticmethod
    def of(
        steps: Sequence[OwnedStep], visible: Mapping[OwnedStep, Node], translation: TranslatedGraph
    ) -> _Assembled | None:
        numbers = {step: n for n, step in enumerate(steps)}
        nodes = _with_unread_views({step.owner for step in steps}, translation)
        read: dict[tuple[Node, tuple[int, ...]], Value] = {}
        placed: dict[tuple[OwnedStep, str], tuple[Node, tuple[int, ...]]] = {}
        for step, (port, value) in ((s, item) for s in steps for item in s.inputs.items()):
            if isinstance(value, Value) and value.step not in numbers:
                value = translation.undivided(value)
                node = translation.node_of.get(value.tensor) if value.step is None else visible.get(value.step)
                if node is None:
                    return None
                if value.step is not None:  # value may be a view of that; a step's tensor has its own strides
                    value = replace(translation.values[node], tensor=translation.recorded(node))
                key = node, value.aligned()
                read.setdefault(key, value)
                placed[step, port] = key
        made = {
            step: visible[step] for step in steps if step in visible and _is_used(visible[step], nodes, translation)
        }
        if not made or not read:
            return None

        def program_tensor(t: torch.Tensor, axes: Sequence[int], part: int) -> ProgramTensor | None:
            return ProgramTensor.of(t, axes, translation.columns(part), part)

        part, along = translation.part, translation.columns()
        results = [program_tensor(translation.recorded(n), translation.values[n].axes, part(n)) for n in made.values()]
        tensors = {key: program_tensor(v.tensor, key[1], translation.part_read(key[0], v)) for key, v in read.items()}
        if None in results or None in tensors.values():
            translation.declined |= {step.owner: f"tensors of its rows {NOT_ONE_DIMENSION}" for step in steps}
            return None
        largest = max(results, key=lambda one: len(one.axes))
        places = {} if translation.parts or largest.is_packed or not largest.axes else largest.places()
        results = [one.moved(places) for one in results]
        tensors = {key: one.moved(places) for key, one in tensors.items()}
        extents = SharedExtents(tensors.values(), results, translation.parts)
        whole = {key for key, one in tensors.items() if extents.is_whole(one)}
        spread = [one for one in results if extents.is_whole(one) and not one.is_packed]
        order = sorted(read, key=lambda key: (key not in whole, not all(map(tensors[key].lies_as, spread))))
        names = {key: f"in{n}" for n, key in enumerate(order)}

        def source(step: OwnedStep, port: str, value: object):
            if (step, port) in placed:
                return names[placed[step, port]]
            return f"@{numbers[value.step]}" if isinstance(value, Value) else value

        program = Program(
            tuple(RegionInput(names[key], *extents.fields(tensors[key])) for key in order),
            tuple(
                ProgramStep(
                    s.op,
                    {port: source(s, port, v) for port, v in s.inputs.items()},
                    dict(s.attributes),
                    s.dtype,
                    part(s.owner),
                )
                for s in steps
            ),
            tuple(Result(numbers[step], *extents.fields(one)) for step, one in zip(made, results, strict=True)),
            follows=bool(spread),
        )
        read_tensors = [tensors[key] for key in order]
        dims = tuple(map(extents.padded, read_tensors))
        strides = tuple(
            (*map(hint, one.stride),) if key in whole else packed_stride(dim)
            for key, one, dim in zip(order, read_tensors, dims, strict=True)
        )
        is_split = any(one.extents.is_split for one in (*program.inputs, *program.outputs))
        is_split |= any(one.part and one.axes.startswith("-") for one in (*program.inputs, *program.outputs))
        columns = read_tensors[0].shape[-1] if read_tensors[0].shape else 1
        region: TorchRegion | str = ""
        if not extents.is_one or is_split:
            region = "tensors that it computes with have no rows in common"
        elif not program.inputs[0].extents.whole:
            region = "nothing that it reads has all rows and columns"
        elif not (isinstance(columns, int) or columns.node.has_hint()):  # rows may be empty
            region = "the extent of its rows shows at run time alone"
        elif along.axes[-1] != -1 and not any(one.extents.whole for one in program.outputs):
            region = (
                "it makes a number a row, along another dimension than the last: inductor's loop moves the same bytes"
            )
        else:
            own, inputs, outputs = sorted({*nodes, *made.values()}), [node for node, _ in order], [*made.values()]
            trains = any(getattr(recorded_result(node), "requires_grad", False) for node in outputs)
            spelled = recognize_norms(program, columns if isinstance(columns, int) else None, trains)
            orders = tuple(one.order for one in (*read_tensors, *results))
            moved = traffic(own, inputs, outputs)
            held = tuple(one.tensor for one in (*read_tensors, *results))
            reductions = tuple(filter(inductor.is_reduction, own))
            region = TorchRegion(spelled, (*own,), (*inputs,), (*outputs,), held, orders, moved, reductions, along)
        device = next(iter(read.values())).tensor.device
        return _Assembled(program, tuple(steps), dims, strides if spread else (), device, region)


def _with_unread_views(nodes: set[Node], translation: TranslatedGraph) -> set[Node]:
    """Nodes, and those views of their results that nothing else reads."""
    found = {*reachable(nodes, lambda node: [user for user in node.users if _is_alias(user, translation)])}
    while left := {n for n in found - nodes if _is_used(n, found, translation)}:
        found -= left
    return found


def _is_used(node: Node, nodes: set[Node], translation: TranslatedGraph) -> bool:
    """True if something outside of a region reads a node."""
    return any(user not in nodes and user not in translation.unread for user in node.users)


def _is_alias(node: Node, translation: TranslatedGraph) -> bool:
    value = translation.values.get(node)
    return isinstance(value, Value) and value.step is not None and value.step.owner is not node


def device_of(device: torch.device) -> Device:
    """Device whose engines are considered: the emulator if there is no GPU."""
    return devices.get(str(device)) if device.type == "cuda" and torch.cuda.is_available() else EMULATOR
