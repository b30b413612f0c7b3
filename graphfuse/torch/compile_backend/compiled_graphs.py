"""Replacement of nodes by operators in graphs that torch.compile compiles, and reports on the last of these graphs."""

import copy
import inspect
import itertools
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Group
from torch.fx import GraphModule, Node

from graphfuse.torch.analysis import inductor, surroundings
from graphfuse.torch.analysis.meaning import has_gradient
from graphfuse.torch.analysis.new_nodes import replace_nodes
from graphfuse.torch.analysis.out_of_place import write_out_of_place
from graphfuse.torch.analysis.report import Entry, FuseReport
from graphfuse.torch.attention import mask_pass as attention
from graphfuse.torch.attention import sinks_pass as sinks
from graphfuse.torch.compile_backend import group_norms, over_ranks
from graphfuse.torch.compile_backend.dropout import KeyedDropouts
from graphfuse.torch.compile_backend.losses import RowLosses
from graphfuse.torch.regions import selection
from graphfuse.torch.regions.choose import TorchRegion

_TORCH = str(Path(inspect.getfile(torch)).parent)

_NOWHERE = "a graph"
"""Stands for the class or line of a node in reports, if the graph records neither."""

KEPT = 64
"""Number of graphs that ``compile_report`` describes."""


@dataclass(frozen=True)
class CompileReport:
    """Report on graphs that were compiled: each site is a place that an operator replaced or could replace. graphs: the
    oldest first."""

    graphs: tuple[FuseReport, ...]

    @property
    def replaced(self) -> tuple[Entry, ...]:
        return tuple(e for graph in self.graphs for e in graph.replaced)

    @property
    def left(self) -> tuple[Entry, ...]:
        return tuple(e for graph in self.graphs for e in graph.left)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs)) or "no graph was compiled"

    def __rich__(self) -> Group:
        return Group(*self.graphs) if self.graphs else Group(str(self))


def compile_report() -> CompileReport:
    """Report on what ``torch.compile(backend="graphfuse")`` and ``inductor_pass`` replaced in the last 64 graphs.

    torch compiles a function when it is first called, and again for other shapes. Each compilation is a graph of the
    report, and so is each part between graph breaks. With ``inductor_pass``, forward and backward are separate graphs.
    ``torch.compiler.reset()`` clears the report along with the compiled functions.
    """
    return _reports.last()


class _Reports:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[FuseReport] = deque(maxlen=KEPT)
        self._numbers = itertools.count()

    def add(self, title: str, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._kept.append(FuseReport(f"graph {next(self._numbers)}{title}", tuple(entries)))

    def last(self) -> CompileReport:
        with self._lock:
            return CompileReport(tuple(self._kept))

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._numbers = itertools.count()


_reports = _Reports()
add_report, clear_reports = _reports.add, _reports.clear


def replace_in(module: GraphModule, declines: bool, own_random: bool = False) -> list[Entry]:
    """Replaces the sites of a graph and of its subgraphs (checkpoints, branches, loops). Returns a report entry for
    each site. declines: whether sites that inductor computes as fast are not replaced. own_random: whether random
    numbers may differ from those of eager mode."""
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    return [entry for part in parts for entry in _replace_or_leave(part, declines, own_random)]


def _replace_or_leave(module: GraphModule, declines: bool, own_random: bool) -> list[Entry]:
    """Replaces the sites of one graph. If none is replaced, restores the original nodes."""
    before = copy.deepcopy(module.graph)
    entries = _replace_in(module, declines, own_random)
    if not any(entry.is_replaced for entry in entries):
        replace_nodes(module.graph, before)
        module.recompile()
    return entries


def _replace_in(module: GraphModule, declines: bool, own_random: bool) -> list[Entry]:
    write_out_of_place(module.graph)  # here, too, as attention is looked for before regions
    attention_entries = sinks.replace(module, _place)
    around = surroundings.graph_parts(module.graph)
    attention_entries += attention.rewrite(module, around, _place)
    rewritten: list[RowLosses | KeyedDropouts] = [RowLosses(module)]
    if own_random:
        rewritten.append(KeyedDropouts(module))
    verdicts, left = selection.replace_in(module, declines)
    with_sums = [*over_ranks.replace(module)]
    sum_entries = [Entry(*_place(n), "region_over_ranks", "with the sum over ranks before it") for n in with_sums]
    group_norm_nodes = [*group_norms.replace(module)] if declines else []
    group_norm_entries = [Entry(*_place(node), "channel_moments") for node in group_norm_nodes]
    left_entries = [
        Entry(*_place(n), why=f"{inductor.title(n)}: {why}") for n, why in left.items() if n not in group_norm_nodes
    ]
    for one in rewritten:
        one.restore()
    module.recompile()
    return [
        *(entry for found in verdicts for entry in _entries_of_region(*found)),
        *left_entries,
        *attention_entries,
        *sum_entries,
        *group_norm_entries,
    ]


def _entries_of_region(region: TorchRegion, why: str) -> Iterator[Entry]:
    """Report entries of a region: one for each module that has a reduction of it."""
    operations = region.program.operations
    first, *others = dict.fromkeys(map(_place, region.reductions or region.outputs))
    others = [other for other in others if other[1] != _NOWHERE]
    if why:
        yield Entry(*first, why=f"{operations}: {why}")
        return
    yield Entry(*first, "region", operations, region.moved)
    own_name = first[0].rpartition(".")[2]  # the same in all layers
    yield from (Entry(*other, "region", f"with {own_name}") for other in others)


def _place(node: Node) -> tuple[str, str]:
    """Name of the module that a node belongs to, and of the module's class. In code without modules, its function and
    line."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if stack:
        path, cls = list(stack.values())[-1]
        # A wrapper of a model's forward gets the model as its first argument.
        name = re.sub(r"^L\['args'\]\[0\]\.|^L\['\w+'\]\.?", "", str(path))
        name = re.sub(r"_modules\['(\w+)'\]|\['?(\w+)'?\]", lambda m: f".{m[1] or m[2]}", name).replace("..", ".")
        name = name.replace("__dict__._modules.", "")  # how a wrapped forward reads modules
        return name.strip("."), getattr(cls, "__name__", str(cls).rpartition(".")[2])
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    lines = [line for line in lines if not line[0].startswith(_TORCH)]
    if not lines:
        return node.name, _NOWHERE
    path, line, function = lines[-1]
    return function, f"{Path(path).name}:{line}"


def is_for_training(module: GraphModule) -> bool:
    """True if an output of Dynamo's graph has a gradient."""
    return any(map(has_gradient, module.graph.output_node().all_input_nodes))
