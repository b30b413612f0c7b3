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
    """Reason why an engine declines; functions return None in its place to accept. A No is truthy."""

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
    """Kernel argument: the number of rows of this launch, as int64 (see ``ByRows``)."""


Argument = Address | HostScalar | Scratch | Constant | RowCount


@dataclass(frozen=True)
class ByRows:
    """Rule that computes the grid of a launch from the number of rows.

    Such a launch can be started for any number of rows up to `rows`. Only the grid and the ``RowCount`` arguments
    depend on that number. Everything else, scratch memory included, is enough for fewer rows.

    rows: the number that the launch was planned for. together: rows that one cluster processes at a time. cluster: CTAs
    per cluster; 1 without clusters, and a cluster is then a CTA.
    most: the largest number of clusters; None for no limit. If more were needed, each cluster processes several rounds
    of rows. The grid then has the fewest clusters for that number of rounds, so that all end together.
    least: clusters that start even for no rows. outermost: extent of the first of several row axes, the only one that
    may be shorter; 0 if rows have one axis.
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
        """Largest number of clusters, for any number of rows up to `rows`."""
        wanted = -(-self.rows // self.together)
        return max(wanted if self.most is None else min(wanted, self.most), self.least)


@dataclass(frozen=True)
class Outline:
    """Requirements of work that is not prepared yet, for planning. A ``Launch`` can serve as an outline.

    workspace_bytes: size of the work's own workspace, as far as it is known. If `prepare` finds another size, the
    plan's workspace is laid out again. It must be exact for an engine that is tuned (``Engine.problem``).
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
    cooperative: whether all CTAs run at the same time, as a grid barrier needs. More CTAs than the device holds are an
        error. With clusters, fewer are started, because chips of one kind hold different numbers of clusters.
    cleared: tensors of 4 bytes that are set to zero on the stream before the kernel starts.
    waits: whether the kernel may start before the previous kernel on the stream has ended. Every thread of the kernel
        then calls ``gf::wait_for_previous_kernel`` (dependent_launch.cuh) before it accesses global memory and before
        it ends. Users request such a start with ``programmatic_dependent_launch`` of execute.
    by_rows: how the grid depends on the number of rows; None if the launch is for one number of rows.
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
    part of any source. Tuned knobs apply to near numbers, too. within: largest factor between near numbers. Entries of
    first-party tables differ by the square of it, so every number between two entries is near one of them.
    """

    key: Mapping[str, object]
    rows: int
    within: float = 2.0


class Buffers(Protocol):
    """Addresses and numbers of a graph's tensors in one execute, for a running engine."""

    def address(self, tensor: TensorId) -> int: ...

    def scalar(self, tensor: TensorId) -> float: ...


class _CallBuffers:
    """Buffers of one call. values: address or number by tensor. It only looks up, because each call makes one."""

    __slots__ = ("address", "scalar")

    def __init__(self, values: Mapping[TensorId, float]):
        self.address = self.scalar = values.__getitem__


class Kernel(Protocol):
    """A compiled and loaded kernel: ``runtime.launch.Kernel``, or the emulator's."""

    def launcher(self, launch: Launch, dependent: bool = False) -> object:
        """Object that starts the kernel with `launch`. dependent: it may begin before the previous kernel has ended."""


@dataclass(frozen=True, eq=False)
class FrozenKernel:
    """A frozen launch of a kernel. launcher: result of ``Kernel.launcher``."""

    launch: Launch
    launcher: object

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.launch.arguments

    @property
    def rows(self) -> int | None:
        """The number of rows that it was planned for, if it can be started for fewer; None otherwise."""
        return None if self.launch.by_rows is None else self.launch.by_rows.rows

    @property
    def outermost(self) -> int | None:
        """Extent of the outermost row axis, the only one that may be shorter; None if `rows` is."""
        return None if self.launch.by_rows is None else self.launch.by_rows.outermost or self.rows


@dataclass(frozen=True, eq=False)
class FrozenCall:
    """A frozen launch that is a call: of a library, or of Python.

    run: called as ``run(stream, *values)``. It puts the work on `stream`, an address (0: the default stream). On the
    CPU there is no stream, and the work is done on return. `values` are those of `arguments`, in their order: addresses
    (arbitrary for a tensor without elements), numbers passed by value, constants, and the number of rows for a
    ``RowCount``. Several threads may call `run` at once. It leaves the thread's current device unchanged. It neither
    allocates device memory nor waits for the device, so that it can be captured into a CUDA graph. It raises
    DeviceError with the error that the library reports.
    rows: the number of rows that it was prepared for, if it can be started for fewer (``RowCount``); None otherwise.
    """

    arguments: tuple[Argument, ...]
    run: Callable[..., None]
    rows: int | None = None

    @property
    def outermost(self) -> int | None:
        """The number of rows, which have one axis."""
        return self.rows


Frozen = FrozenKernel | FrozenCall


@dataclass(frozen=True, eq=False)
class Prepared:
    """Work that is ready to run, any number of times, on any thread.

    freeze: makes the frozen launch, which lacks only addresses, numbers, stream and number of rows. Its argument is
    True if the work may begin before the previous work on the stream has ended (programmatic dependent launch), which
    requires that `undependable` is None. workspace_bytes: size of the work's own workspace, 256-byte aligned if the
    plan's workspace is.
    undependable: why the work cannot begin early; None if it can. The work then waits for the previous work by itself,
    as with ``Launch.waits``.
    """

    freeze: Callable[[bool], Frozen]
    workspace_bytes: int = 0
    undependable: str | None = "it does not say that it waits for the work before it"


@dataclass(frozen=True, eq=False)
class Site:
    """Context of `Engine.prepare`: the nodes, and the functions that an engine may use.

    subgraph: the nodes of the work. outline: the engine's outline of it (``Engine.outline``). compile: makes a kernel
    for the device, from a source and the name of its extern "C" entry. It raises KernelCompileError if the source does
    not compile. sources: result of ``Engine.sources``, so that the engine need not generate them again.
    current_stream: returns the address of torch's current stream on a device in this thread, 0 for the default stream.
    torch_setting: returns the getter and the setter of a setting, given its module in torch.backends and its name.
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
    modes: the heuristic modes in which it proposes plans.
    emulated: whether it runs on the device "emulator" by kernels that are compiled as C++.
    behavior_notes, numerical_notes: notes by which users select plans. A plan has the notes of all its parts; it has
        SUPPORTS_CUDA_GRAPH_NATIVE_API and STRICT_NAN_PROP only if every part has them.
    serves: what it accepts beyond the plain case: row-major tensors in memory, computing in FLOAT, and no rounding
        between nodes. Planning declines everything else for it.
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
        """The first reason why the engine cannot run the facts, with tensor and limit; None if it can."""

    def propose(self, facts: FactsT, device: Device, mode: heur_mode) -> Sequence[KnobsT]:
        """Knobs to try, best first, at least one. Never compiles. The default is for engines without knobs."""
        return (NoKnobs(),)

    def illegal(self, facts: FactsT, knobs: KnobsT, device: Device) -> No | None:
        """Reason why knobs that a user chose cannot be used; None if they can."""
        return None

    def in_place(self, facts: FactsT, knobs: KnobsT) -> tuple[tuple[TensorId, TensorId], ...]:
        """(input, output) tensors that may have exactly the same memory. Any other overlap is an error."""
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
        """The class under which tuned knobs are stored; None if this engine is not tuned."""
        return None

    def sources(self, facts: FactsT, knobs: KnobsT) -> tuple[str, ...]:
        """The CUDA C++ source of each generated kernel, in the order in which they run."""
        return ()

    def outline(self, facts: FactsT, knobs: KnobsT) -> Outline | Launch:
        """Requirements of the work, for planning, before it is prepared. Pure and quick: it is called for plans that
        are never built, too."""
        return Outline()

    @abc.abstractmethod
    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        """Makes the work ready: compiles it, or builds a library's plan. Called once for each plan that is built.
        Several plans may be prepared at the same time, in threads.

        Raises GraphNotSupportedError if these knobs cannot be used here. Building then goes on to the next plan, as
        after a KernelCompileError.
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
        """Does the work on `stream` (an address; 0 on the CPU). buffers: what the engine's nodes read and write."""

    def prepare(self, facts: FactsT, knobs: KnobsT, device: Device, site: Site) -> Prepared:
        tensors, run = site.subgraph.graph.tensors, self.run
        touched = tuple(dict.fromkeys((*site.subgraph.inputs, *site.subgraph.outputs)))

        def call(stream: int, *values: float) -> None:
            run(facts, knobs, device, _CallBuffers(dict(zip(touched, values, strict=False))), stream)

        frozen = FrozenCall(tuple(HostScalar(t) if tensors[t].by_value else Address(t) for t in touched), call)
        return Prepared(lambda dependent: frozen, undependable="it runs from Python")


def knobs_to_dict(knobs: object) -> dict[str, object]:
    """Knobs as a mapping, for users."""
    return asdict(knobs)


def knobs_from_dict(engine: Engine, values: dict[str, object]) -> object:
    """The engine's knobs from a mapping. Raises GraphValidationError for an unknown or missing knob."""
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
