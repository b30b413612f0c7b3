"""``Account``: a graph and its plans as plain data. Every format is a function of it."""

from dataclasses import dataclass

from graphfuse.planning.separations import Separation
from graphfuse.planning.traffic import Traffic


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that a node reads or writes.

    role: "input", "output", "virtual", or "scalar" for a constant or a tensor passed by value.
    dtype: for a virtual tensor the type that its readers get.
    nbytes: of its elements, each counted once, even if a stride of 0 repeats it; 0 for a scalar.
    value: a constant's.
    """

    id: int
    name: str
    dtype: str
    dim: tuple[int, ...]
    role: str
    nbytes: int
    value: float | None = None


@dataclass(frozen=True)
class NodeEntry:
    """A node. reads, writes: tensors by port. traffic: of a kernel that runs this node alone."""

    name: str
    op: str
    compute: str
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]
    traffic: Traffic


@dataclass(frozen=True)
class RegionEntry:
    """Nodes that one engine runs, by number.

    engine: its name.
    knobs: engine and knobs as plans name them.
    pattern: that found them; empty if none did.
    fused: whether they run as one kernel or call; otherwise they run one by one.
    why: the source of the knobs.
    traffic: bytes that the region moves.
    """

    engine: str
    knobs: str
    pattern: str
    nodes: tuple[int, ...]
    fused: bool
    why: str
    traffic: Traffic


@dataclass(frozen=True)
class MatchEntry:
    """Nodes that a pattern matches. why: the reason why its facts cannot describe them; None if they can."""

    pattern: str
    nodes: tuple[int, ...]
    why: str | None = None


@dataclass(frozen=True)
class VerdictEntry:
    """Decision of an engine about some nodes. why: its reason to decline; None if it can run them."""

    engine: str
    nodes: tuple[int, ...]
    why: str | None


@dataclass(frozen=True)
class ModeEntry:
    """Result of one heuristic mode. uncovered: nodes that no engine accepts. regions: what decided which matches are
    fused; empty if no pattern matches."""

    mode: str
    verdicts: tuple[VerdictEntry, ...]
    uncovered: tuple[str, ...]
    regions: str = ""


@dataclass(frozen=True)
class PlanEntry:
    """A plan. state: "selected", "available" or "barred". reason: the reason why it is barred."""

    index: int
    name: str
    workspace_bytes: int
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Account:
    """Account of the planning of a graph.

    device: as ``Device`` prints, or the architecture of a device that is not present.
    matches, misfits: of patterns whose facts describe their match, and of others.
    unmatched: nodes that no pattern matches.
    shown: index of the plan that `regions` and `notes` describe: the selected one, otherwise the first usable one; None
    if there is none.
    regions: in the order in which they run.
    apart: reasons why regions are separate, for each two that share a tensor.
    rank: what decided between engines for these regions.
    left_out: reasons why installed plug-ins are not used, a line each.
    """

    graph: str
    device: str
    device_name: str
    tensors: tuple[TensorEntry, ...]
    nodes: tuple[NodeEntry, ...]
    matches: tuple[MatchEntry, ...]
    misfits: tuple[MatchEntry, ...]
    unmatched: tuple[int, ...]
    modes: tuple[ModeEntry, ...]
    plans: tuple[PlanEntry, ...]
    shown: int | None
    regions: tuple[RegionEntry, ...]
    apart: tuple[Separation, ...]
    rank: str
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def before(self) -> Traffic:
        """Bytes that one kernel for each node would move."""
        return sum((node.traffic for node in self.nodes), Traffic(0, 0))

    @property
    def after(self) -> Traffic:
        """Bytes that the plan shown moves."""
        return sum((region.traffic for region in self.regions), Traffic(0, 0))

    @property
    def selected(self) -> int | None:
        """Index of the plan that execute runs."""
        return next((plan.index for plan in self.plans if plan.state == "selected"), None)

    def tensor(self, number: int) -> TensorEntry:
        return next(t for t in self.tensors if t.id == number)

    def names(self, nodes: tuple[int, ...]) -> str:
        """The names of nodes, in printable form."""
        return ", ".join(printable(self.nodes[i].name) for i in nodes)


def printable(name: str) -> str:
    """A user's name without characters that a terminal or a document would interpret."""
    return name if name.isprintable() else repr(name)


def count(n: int) -> str:
    """Bytes in short form, such as 1.5 MiB."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"
