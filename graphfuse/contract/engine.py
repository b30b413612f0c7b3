"""The interface of an engine, and the records that it exchanges with planning.

An engine serves one class of facts. It declines or accepts them (`why_not`), proposes knobs, describes the work before
it is compiled (`outline`), and makes it ready to run (`prepare`). All but `prepare` are pure and quick. `prepare` is
called once, when a plan is built, and may compile. It returns a `Prepared`: the workspace, and how the work is
launched. Planning treats all engines alike.

Most engines are simpler. A `KernelEngine` gives the source and the launch of one CUDA C++ kernel, a `HostEngine` a
Python function. No engine depends on other engines.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Generic, Protocol, TypeVar

from graphfuse.base.device import Device
from graphfuse.base.enums import behavior_note, heur_mode, numerical_note
from graphfuse.base.errors import GraphValidationError
from graphfuse.contract.served import Served
from graphfuse.op_graph.ir import Subgraph, TensorId

FactsT = TypeVar("FactsT")
KnobsT = TypeVar("KnobsT")


@dataclass(frozen=True)
class No:
    """Why an engine declines. None in its place means that it accepts. Like any object, a No is true."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class NoKnobs:
    """The knobs of an engine that has none."""


@dataclass(frozen=True)
class Address:
    """Kernel argument: the address of a tensor (of the variant pack or the workspace)."""

    tensor: TensorId


@dataclass(frozen=True)
class HostScalar:
    """Kernel argument: a by-value tensor's number, as float32."""

    tensor: TensorId


@dataclass(frozen=True)
class Scratch:
    """Kernel argument: an address in the launch's own part of the workspace."""

    offset: int = 0


@dataclass(frozen=True)
class Constant:
    """Kernel argument known when planning. ctype: "pointer", "int32", "int64" or "float32"."""

    ctype: str
    value: float | int


@dataclass(frozen=True)
class RowCount:
    """Kernel argument: how many rows this start of the kernel has, as int64 (see ``ByRows``)."""


Argument = Address | HostScalar | Scratch | Constant | RowCount


@dataclass(frozen=True)
class ByRows:
    """Rule by which the grid of a launch follows the number of rows.

    Such a launch can be started for any number of rows up to `rows`. Only the grid and the ``RowCount`` arguments
    depend on that number. Everything else, scratch memory included, is enough for fewer rows.

    rows: the number that the launch was planned for. together: rows that one cluster takes at a time. cluster: CTAs
    per cluster; 1 without clusters, and a cluster is then a CTA.
    most: the largest number of clusters, None for no limit. If more were needed, each cluster takes several rounds of
    rows. The grid then has the fewest clusters for that number of rounds, so that all end together.
    least: clusters that start even for no rows. outermost: extent of the first of several axes of rows, of which alone
    there may be fewer; 0 where rows are one axis.
    """

    rows: int
    together: int
    cluster: int = 1
    most: int | None = None
    least: int = 0
    outermost: int = 0

    def grid(self, rows: int) -> int:
        """CTAs for this number of rows."""
        clusters = -(-rows // self.together)
        if self.most is not None and clusters > self.most:
            clusters = -(-clusters // -(-clusters // self.most))
        return max(clusters, self.least) * self.cluster

    @property
    def clusters(self) -> int:
        """Clusters at most, for any number of rows up to `rows`."""
        wanted = -(-self.rows // self.together)
        return max(wanted if self.most is None else min(wanted, self.most), self.least)


@dataclass(frozen=True)
class Outline:
    """Needs of work that is not prepared yet, for planning. A ``Launch`` is one, too.

    workspace_bytes: of the work's own, as far as they are known by now. Where preparing it finds that it needs others,
    the plan's workspace is laid out again. Of an engine that is tuned (``Engine.problem``) they are exact.
    """

    workspace_bytes: int = 0


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel: grid, block, arguments, memory.

    grid: number of CTAs; 0 means that there is nothing to do, and nothing is launched.
    block: threads per CTA.
    cluster: CTAs per cluster.
    shared_bytes: dynamic shared memory per CTA.
    scratch_bytes: workspace of the launch, 256-byte aligned.
    arguments: in the order of the kernel's parameters.
    cooperative: whether all CTAs run at the same time, as a grid barrier needs. More CTAs than the device holds are
        refused. Of clusters, fewer are started, because chips of one kind hold different numbers of them.
    cleared: tensors of 4 bytes that are set to zero on the stream before the kernel starts.
    waits: whether the kernel may start before the previous kernel on the stream has ended. Every thread of it then
        calls ``gf::wait_for_previous_kernel`` (dependent_launch.cuh) before it accesses global memory and before it
        ends. Users ask for such a start with ``programmatic_dependent_launch`` of execute.
    by_rows: how the grid follows the number of rows; None if the launch is for one number of rows.
    """

    grid: int
    block: int
    arguments: tuple[Argument, ...]
    cluster: int = 1
    shared_bytes: int = 0
    scratch_bytes: int = 0
    cooperative: bool = False
    cleared: tuple[TensorId, ...] = ()
    waits: bool = False
    by_rows: ByRows | None = None

    @property
    def workspace_bytes(self) -> int:
        return self.scratch_bytes


@dataclass(frozen=True)
class ProblemClass:
    """The key that tuned knobs are stored under: all that the best knobs of an engine may depend on.

    key: JSON values by name, without names, numbers or addresses of tensors. rows: the number of rows, which is not
    part of any source. Tuned knobs apply to near numbers, too. within: the factor by which numbers of rows may differ
    for that. Entries of first-party tables are the square of it apart, so every number between them is near one.
    """

    key: Mapping[str, object]
    rows: int
    within: float = 2.0


class Buffers(Protocol):
    """Addresses of a graph's tensors in one execute, for a running step."""

    def address(self, tensor: TensorId) -> int: ...

    def scalar(self, tensor: TensorId) -> float: ...


class _Given:
    """Buffers of one call. values: address or number by tensor. Made at each call, so it does no more than look up."""

    __slots__ = ("address", "scalar")

    def __init__(self, values: Mapping[TensorId, float]):
        self.address = self.scalar = values.__getitem__


class Kernel(Protocol):
    """A compiled and loaded kernel: ``runtime.launch.Kernel``, or the emulator's."""

    def launcher(self, launch: Launch, dependent: bool = False) -> object:
        """Object that starts it as `launch` says. dependent: it may begin before the kernel before it ends."""


@dataclass(frozen=True, eq=False)
class FrozenKernel:
    """A frozen launch that is the start of a kernel. launcher: as ``Kernel.launcher`` makes it."""

    launch: Launch
    launcher: object

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.launch.arguments

    @property
    def rows(self) -> int | None:
        """The number of rows that it was planned for, where it can be started for fewer; else None."""
        return None if self.launch.by_rows is None else self.launch.by_rows.rows

    @property
    def outermost(self) -> int | None:
        """Extent of the axis of these rows of which there may be fewer."""
        return None if self.launch.by_rows is None else self.launch.by_rows.outermost or self.rows


@dataclass(frozen=True, eq=False)
class FrozenCall:
    """A frozen launch that is a call: of a library, or of Python.

    run: called as ``run(stream, *values)``. It puts the work on `stream`, an address (0: the default stream). On the
    CPU there is no stream, and the work is done on return. `values` are those of `arguments`, in their order: addresses
    (arbitrary for a tensor without elements), numbers passed by value, constants, and the number of rows for a
    ``RowCount``. Any number of threads may call it at once. It leaves the thread's current device as it was. It
    neither allocates device memory nor waits for the device, so that it can be captured into a CUDA graph. It raises
    DeviceError with what the library reports.
    rows: the number of rows that it was prepared for, if it can be started for fewer (``RowCount``); else None.
    """

    arguments: tuple[Argument, ...]
    run: Callable[..., None]
    rows: int | None = None

    @property
    def outermost(self) -> int | None:
        """The number of rows: they are one axis."""
        return self.rows


Frozen = FrozenKernel | FrozenCall


@dataclass(frozen=True, eq=False)
class Prepared:
    """Work that is ready to run, any number of times, on any thread.

    freeze: makes the frozen launch, which lacks only addresses, numbers, stream and number of rows. Its argument says
    whether the work may begin before the previous work on the stream has ended (programmatic dependent launch). That
    is True only if `undependable` is None. workspace_bytes: the work's own workspace, 256-byte aligned if the
    workspace is.
    undependable: why the work cannot begin early; None if it can. It then waits for the previous work by itself, as
    ``Launch.waits`` says.
    """

    freeze: Callable[[bool], Frozen]
    workspace_bytes: int = 0
    undependable: str | None = "it does not say that it waits for the work before it"


@dataclass(frozen=True, eq=False)
class Site:
    """Surroundings of a part that is prepared: all that `prepare` is given beside the problem.

    subgraph: the nodes of the work. outline: the engine's outline of it (``Engine.outline``). compile: makes a kernel
    for the device, from a source and the name of its extern "C" entry. It raises KernelCompileError if the source does
    not compile. sources: the engine's answer to ``Engine.sources``, so that it need not write them again.
    current_stream: tells the address of the stream that torch uses on a device in this thread, 0 for the default one.
    torch_setting: what reads and what writes a setting, of a module of torch.backends and its name there, as tuples.
    """

    subgraph: Subgraph
    outline: Outline | Launch
    compile: Callable[[str, str], Kernel]
    sources: tuple[str, ...]
    current_stream: Callable[[Device], int]
    torch_setting: Callable[[str, str], tuple[Callable[[], tuple], Callable[..., object]]]


class Engine(abc.ABC, Generic[FactsT, KnobsT]):
    """Base of all engines. Class attributes:

    name: the name that users see and deselect by.
    facts: the facts class that it serves.
    knobs: its frozen dataclass of knobs, or several, each with different fields.
    modes: the heuristic modes that ask it.
    emulated: whether its work on the device "emulator" is kernels, run as C++.
    behavior_notes, numerical_notes: notes by which users select plans. A plan has those of any of its parts;
        SUPPORTS_CUDA_GRAPH_NATIVE_API and STRICT_NAN_PROP it has if all of its parts have them.
    serves: what it accepts beyond the plain case: row-major tensors in memory, computing in FLOAT, and no rounding
        between nodes. It is not asked about anything else.
    """

    name: ClassVar[str]
    facts: ClassVar[type]
    knobs: ClassVar[type | tuple[type, ...]] = NoKnobs
    modes: ClassVar[frozenset[heur_mode]]
    emulated: ClassVar[bool] = False
    behavior_notes: ClassVar[frozenset[behavior_note]] = frozenset()
    numerical_notes: ClassVar[frozenset[numerical_note]] = frozenset()
    serves: ClassVar[Served] = Served()

    @abc.abstractmethod
    def why_not(self, facts: FactsT, device: Device) -> No | None:
        """The first reason against, naming the tensor and the limit; None if it can."""

    def propose(self, facts: FactsT, device: Device, mode: heur_mode) -> Sequence[KnobsT]:
        """Knobs to try, best first; at least one. Never compiles. Of an engine without knobs: just those."""
        return (NoKnobs(),)

    def illegal(self, facts: FactsT, knobs: KnobsT, device: Device) -> No | None:
        """Why these knobs cannot be used, for knobs that a user chose."""
        return None

    def in_place(self, facts: FactsT, knobs: KnobsT) -> tuple[tuple[TensorId, TensorId], ...]:
        """(input, output) tensors that may be the same memory, exactly; any other overlap is refused."""
        return ()

    def notes(self, facts: FactsT, knobs: KnobsT, device: Device) -> tuple[str, ...]:
        """Numerical notes of the plan: rounding, software conversions, and the like."""
        return ()

    def behavior_notes_of(self, facts: FactsT, knobs: KnobsT, device: Device) -> frozenset[behavior_note]:
        """Behaviour notes of one plan; `behavior_notes`, unless an engine's plans differ."""
        return self.behavior_notes

    def numerical_notes_of(self, facts: FactsT, knobs: KnobsT, device: Device) -> frozenset[numerical_note]:
        """Numerical notes of one plan; `numerical_notes`, unless an engine's plans differ."""
        return self.numerical_notes

    def problem(self, facts: FactsT) -> ProblemClass | None:
        """The class that tuned knobs are kept for; None if this engine is not tuned."""
        return None

    def sources(self, facts: FactsT, knobs: KnobsT) -> tuple[str, ...]:
        """The CUDA C++ text of each kernel that it generates, in the order in which they run."""
        return ()

    def outline(self, facts: FactsT, knobs: KnobsT) -> Outline | Launch:
        """Needs of the work, for planning, before it is prepared. Pure and quick, as it is asked for plans that are
        never built."""
        return Outline()

    @abc.abstractmethod
    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        """Make the work ready: compile it, or build what a library runs. Called once for each plan that is built;
        several plans may be prepared at the same time, in threads.

        GraphNotSupportedError if these knobs turn out to be unusable here. Building then goes on to the next plan, as
        it does after a KernelCompileError.
        """


class KernelEngine(Engine[FactsT, KnobsT]):
    """An engine whose work is one generated CUDA C++ kernel."""

    emulated: ClassVar[bool] = True
    behavior_notes = frozenset({behavior_note.RUNTIME_COMPILATION, behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API})
    entry: ClassVar[str]
    """Name of the extern "C" kernel in the source."""

    @abc.abstractmethod
    def source(self, facts: FactsT, knobs: KnobsT) -> str:
        """The complete translation unit. Pure; never depends on the number of rows."""

    @abc.abstractmethod
    def launch(self, facts: FactsT, knobs: KnobsT) -> Launch:
        """Grid, block and arguments."""

    def sources(self, facts: FactsT, knobs: KnobsT) -> tuple[str, ...]:
        return (self.source(facts, knobs),)

    def outline(self, facts: FactsT, knobs: KnobsT) -> Launch:
        return self.launch(facts, knobs)

    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        (source,) = site.sources
        launch, kernel = site.outline, site.compile(source, self.entry)
        return Prepared(
            lambda dependent: FrozenKernel(launch, kernel.launcher(launch, dependent)),
            launch.scratch_bytes,
            _undependable(launch),
        )


def _undependable(launch: Launch) -> str | None:
    if not launch.waits:
        return "its launch does not say that the kernel waits for the one before it"
    return "memory is cleared before its kernel" if launch.cleared else None


class HostEngine(Engine[FactsT, KnobsT]):
    """An engine that runs from Python."""

    @abc.abstractmethod
    def run(self, facts: FactsT, knobs: KnobsT, device: Device, buffers: Buffers, stream: int) -> None:
        """Do the work on `stream` (an address; 0 on the CPU). buffers: has what the engine's nodes read and write."""

    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        tensors, run = site.subgraph.graph.tensors, self.run
        touched = tuple(dict.fromkeys((*site.subgraph.inputs, *site.subgraph.outputs)))

        def call(stream: int, *values: float) -> None:
            run(facts, knobs, device, _Given(dict(zip(touched, values, strict=False))), stream)

        frozen = FrozenCall(tuple(HostScalar(t) if tensors[t].by_value else Address(t) for t in touched), call)
        return Prepared(lambda dependent: frozen, undependable="it runs from Python")


def knobs_to_dict(knobs: object) -> dict[str, object]:
    """Knobs as the mapping that users see and give back."""
    return asdict(knobs)


def knobs_from_dict(engine: Engine, values: dict[str, object]) -> object:
    """The engine's knobs from a mapping; GraphValidationError names an unknown or missing knob."""
    kinds = engine.knobs if isinstance(engine.knobs, tuple) else (engine.knobs,)
    names = {kind: [f.name for f in fields(kind)] for kind in kinds}
    kind = next((kind for kind in kinds if set(values) <= set(names[kind])), None)
    if kind is None:
        unknown = sorted(set(values).difference(*names.values()), key=str)
        wrong = "has no knob" if unknown else "takes no such knobs together as"
        known = "; or: ".join(", ".join(sorted(of)) or "none" for of in names.values())
        given = ", ".join(map(str, unknown or sorted(values)))
        raise GraphValidationError(f"engine {engine.name!r} {wrong} {given}; it has: {known}")
    try:
        return kind(**values)
    except TypeError as error:
        raise GraphValidationError(f"engine {engine.name!r}: {error}") from None
