"""What an engine is, and the records it exchanges with planning.

An engine serves one class of facts. It judges (`why_not`), proposes knobs, says what planning has to know of the work
(`outline`), and makes it ready to run (`prepare`). Judging and proposing are pure and quick. `prepare` is called once,
when a plan is built, and may compile. What it returns (`Prepared`) says how much workspace it needs and how it is
launched. Planning treats all engines alike.

Most engines say less: a `KernelEngine` gives the source and the launch of one CUDA C++ kernel, a `HostEngine` a Python
function. No engine looks at other engines.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Generic, Protocol, TypeVar

from graphfuse.device import Device
from graphfuse.enums import behavior_note, heur_mode, numerical_note
from graphfuse.errors import GraphValidationError
from graphfuse.ir import Subgraph, TensorId
from graphfuse.served import Served

FactsT = TypeVar("FactsT")
KnobsT = TypeVar("KnobsT")


@dataclass(frozen=True)
class No:
    """Why an engine declines. It stands where None is "yes", and is true as any object is."""

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
    """How the grid of a launch follows the number of rows.

    A launch that has it can be started for any number of rows up to `rows`. Only the grid and the arguments that are
    a ``RowCount`` depend on that number; all else of the launch, its scratch memory too, is enough for fewer rows.

    rows: the number that the launch was planned for. together: rows that one cluster takes at a time. cluster: CTAs in
    a cluster; without clusters it is 1, and a cluster is a CTA. most: how many clusters there are at most, None for no
    limit. Where more would be needed, each takes several rounds of rows, and the grid has no more clusters than these
    rounds need, so that all end together. least: clusters that start even for no rows.
    """

    rows: int
    together: int
    cluster: int = 1
    most: int | None = None
    least: int = 0

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
    """What planning has to know of work that is not prepared yet. A ``Launch`` is one, too.

    workspace_bytes: of the work's own, as far as they are known by now. Where preparing it finds that it needs others,
    the plan's workspace is laid out again. Of an engine that is tuned (``Engine.problem``) they are exact.
    """

    workspace_bytes: int = 0


@dataclass(frozen=True)
class Launch:
    """How a kernel is started. grid 0 means there is nothing to do and nothing is launched.

    grid: CTAs. block: threads a CTA. cluster: CTAs a cluster. shared_bytes: dynamic
    shared memory a CTA. scratch_bytes: workspace the launch needs for itself, 256-byte
    aligned. arguments: in the order of the kernel's parameters. cooperative: all CTAs run
    at the same time, which a barrier of the grid needs; more than the device holds at once
    are refused, but of clusters, of which chips of one kind hold more or less, fewer are started.
    cleared: tensors of 4 bytes that are set to zero before the kernel starts, on its stream.
    waits: whether the kernel may be started before the one before it on the stream has ended: every thread of it calls
    ``gf::wait_for_previous_kernel`` (dependent_launch.cuh) before it reads or writes global memory, and none ends
    before. Users ask for such a start with execute's ``programmatic_dependent_launch``.
    by_rows: how the grid follows the number of rows; None where the launch is for one number of them.
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
    """A problem class: all that the best knobs of an engine may depend on, so that tuned ones can be kept.

    key: JSON values by name, without names, numbers or addresses of tensors. rows: the
    extent that enters no source, across which tuned knobs carry over. within: the factor by which numbers of rows may
    differ for that. Those in first-party tables lie the square of it apart, so that between them one is always near.
    """

    key: Mapping[str, object]
    rows: int
    within: float = 2.0


class Buffers(Protocol):
    """What a running step sees: where the tensors of the graph are in this execute."""

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
        """What starts it as `launch` says. dependent: it may begin before the kernel before it ends."""


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


@dataclass(frozen=True, eq=False)
class FrozenCall:
    """A frozen launch that is a call: of a library, or of Python.

    run: called as ``run(stream, *values)`` to put the work on `stream`, an address (0: the default stream; on the CPU
    there is none, and the work is done on return). values: of `arguments`, in their order: addresses (any, of a tensor
    without elements), numbers of tensors passed by value, constants, and for a ``RowCount`` the number of rows. Any
    number of threads may call it at once. The thread's current device may be another, and stays what it was. To be
    captured into a CUDA graph, it neither allocates device memory nor waits for the device. DeviceError with what the
    library reports.
    rows: the number of rows that it was prepared for, where it can be started for fewer (``RowCount``); else None.
    """

    arguments: tuple[Argument, ...]
    run: Callable[..., None]
    rows: int | None = None


Frozen = FrozenKernel | FrozenCall


@dataclass(frozen=True, eq=False)
class Prepared:
    """Work that is ready to run, any number of times, on any thread.

    freeze: makes the launch, all of which is fixed but addresses, numbers, stream and number of rows. It is called with
    whether the work may begin before the work before it on the stream has ended (programmatic dependent launch); with
    True only where `undependable` is None. workspace_bytes: of its own, 256-byte aligned as long as the workspace is.
    undependable: why it cannot begin early, None if it can: then all of it waits for the work before it, as
    ``Launch.waits`` says.
    """

    freeze: Callable[[bool], Frozen]
    workspace_bytes: int = 0
    undependable: str | None = "it does not say that it waits for the work before it"


@dataclass(frozen=True, eq=False)
class Site:
    """What `prepare` is given beside the problem.

    subgraph: the nodes whose work it is. outline: what the engine said of it (``Engine.outline``). compile: makes the
    device's kernel of a source, as ``KernelEngine.source``, and the name of its extern "C" entry; for engines that
    write kernels. It raises KernelCompileError where the source does not compile. sources: what the engine answered to
    ``Engine.sources``, so that it need not write them again.
    """

    subgraph: Subgraph
    outline: Outline | Launch
    compile: Callable[[str, str], Kernel]
    sources: tuple[str, ...]


class Engine(abc.ABC, Generic[FactsT, KnobsT]):
    """Base of all engines. Class attributes:

    name: what users see and deselect by. facts: the facts class it serves.
    knobs: its frozen dataclass of knobs, or several, no two of which have the same fields.
    modes: the heuristic modes that ask it. emulated: whether its work on the device "emulator" is kernels, run there as
    C++. behavior_notes, numerical_notes: by which users select plans. serves: what it takes beyond row-major tensors in
    memory, computing in FLOAT and values that are not rounded between nodes; it is not asked for what goes beyond that.
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
        """Those of one plan. Of an engine whose plans do not differ in it: `behavior_notes`."""
        return self.behavior_notes

    def numerical_notes_of(self, facts: FactsT, knobs: KnobsT, device: Device) -> frozenset[numerical_note]:
        """Those of one plan. Of an engine whose plans do not differ in it: `numerical_notes`."""
        return self.numerical_notes

    def problem(self, facts: FactsT) -> ProblemClass | None:
        """The class that tuned knobs are kept for; None if this engine is not tuned."""
        return None

    def sources(self, facts: FactsT, knobs: KnobsT) -> tuple[str, ...]:
        """The CUDA C++ text of each kernel that it generates, in the order in which they run."""
        return ()

    def outline(self, facts: FactsT, knobs: KnobsT) -> Outline | Launch:
        """What planning has to know before the work is prepared. Pure and quick, as it is asked for plans that are
        never built."""
        return Outline()

    @abc.abstractmethod
    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        """Make the work ready: compile it, or build what a library runs. Called once for a plan that is built, several
        plans at once from threads of their own.

        GraphNotSupportedError where it turns out only now that these knobs cannot be used here; building then goes on
        to the next plan, as it does after the KernelCompileError of a kernel.
        """


class KernelEngine(Engine[FactsT, KnobsT]):
    """An engine whose work is one generated CUDA C++ kernel."""

    emulated: ClassVar[bool] = True
    behavior_notes = frozenset({behavior_note.RUNTIME_COMPILATION})
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
