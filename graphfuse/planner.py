"""The plans of one graph: proposing, barring, compiling and running them. `pygraph` keeps one planner."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from graphfuse import guard, plan, plugins
from graphfuse.device import EMULATOR, Device
from graphfuse.engine import Engine, KernelEngine, knobs_from_dict
from graphfuse.enums import build_plan_policy, heur_mode
from graphfuse.errors import (
    DeviceError,
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    KernelCompileError,
    PluginError,
)
from graphfuse.ir import Graph
from graphfuse.lower import lower
from graphfuse.plan import Part, Plan, Proposal
from graphfuse.runtime.bound import Bound
from graphfuse.runtime.executable import Executable, NotBuilt
from graphfuse.runtime.fastcall import HostPart, KernelPart
from graphfuse.runtime.handle import stream_getter, stream_on
from graphfuse.runtime.variant_pack import Binder
from graphfuse.tables import store

_DEPENDENT_LAUNCH_SM = 90


class Planner:
    """Plans of one lowered graph on one device."""

    def __init__(self, graph: Graph, handle, patterns: Sequence[object], engines: Sequence[object]):
        self.graph = lower(graph)
        self.handle = handle
        # To users the emulator is an engine by name; to planning it is a device, for which all engines are asked.
        self.device = _device(handle, str(EMULATOR) in engines)
        self.registry = plugins.registry(patterns, [e for e in engines if e != str(EMULATOR)])
        self.regions, self.declined = plan.matches(self.graph, self.registry)
        self.proposals: list[Proposal] = []
        self.plans: list[Plan] = []
        self.running: Executable | NotBuilt = NotBuilt()
        """The selected plan if it is built, else a stand-in that runs nothing. Execute tries its fast path first."""
        self.stream: Callable[[], int] = stream_getter(self.device, handle)
        """The stream that work goes to where execute is given no handle."""
        self._barred_engines: set[str] = set()
        self._failed_engines: dict[str, str] = {}
        self._workspace_limit: int | None = None
        self._chosen: int | None = None
        self._executables: dict[int, Executable] = {}
        self._lock = threading.Lock()

    @property
    def chosen(self) -> int | None:
        """Index of the plan that execute runs."""
        return self._chosen

    @chosen.setter
    def chosen(self, index: int | None) -> None:
        self._chosen = index
        self.running = self._executables.get(index) or NotBuilt()

    @property
    def left_out(self) -> list[str]:
        """Why installed plug-ins are not used, a line each; what they did not say about a region (``Verdict``)."""
        return [*self._failed_engines.values(), *plugins.left_out()]

    def create(self, modes: Sequence[heur_mode]) -> None:
        """Plans of every mode, in the order of the modes and without repeats."""
        engines = [e for e in self.registry.engines if self._has_sound_table(e) and e.name not in self._failed_engines]
        tunings, origins = store.tunings(engines, self.device), self.registry.origins
        self.proposals = [
            plan.propose(self.graph, self.regions, engines, self.device, m, tunings, origins) for m in modes
        ]
        for proposal in self.proposals:
            known = {p.name for p in self.plans}
            self.plans += [p for p in proposal.plans if p.name not in known]
        if not self.plans:
            raise GraphNotSupportedError(self._no_plan("no engine can run it"))

    def _has_sound_table(self, engine: Engine) -> bool:
        """Whether an engine's table of tuned knobs can be read; where it cannot, an installed engine is left out."""
        try:
            guard.call(engine, self.graph, "table", store.first_party, engine, self.device)
        except PluginError as error:
            self._failed_engines[engine.name] = str(guard.left_out(engine, error, self.registry.origins))
            return False
        return True

    def append(self, engine: object, knobs: object) -> int:
        names = (engine,) if isinstance(engine, str) else engine
        values = ({} if knobs is None else knobs,) if isinstance(engine, str) else knobs
        lists = isinstance(names, tuple | list) and isinstance(values, tuple | list) and len(names) == len(values)
        if not lists or not all(isinstance(v, Mapping) for v in values):
            raise GraphTypeError(
                "create_execution_plan: give an engine name and a dict of knobs, or tuples of both; "
                f"got {engine!r}, {knobs!r}"
            )
        engines = [self._engine(name) for name in names]
        chosen = [knobs_from_dict(e, dict(v)) for e, v in zip(engines, values, strict=True)]
        self.plans.append(plan.named(self.graph, self.regions, engines, self.device, chosen))
        return len(self.plans) - 1

    def _engine(self, name: object) -> Engine:
        for engine in self.registry.engines:
            if engine.name == name:
                return engine
        names = ", ".join(e.name for e in self.registry.engines)
        raise GraphValidationError(f"no engine is named {name!r}; there are: {names}")

    def at(self, index: int) -> Plan:
        if isinstance(index, bool) or not isinstance(index, int):
            raise GraphTypeError(f"a plan index must be an int, got {index!r}")
        if not self.plans:
            raise GraphStateError(f"graph {self.graph.name!r}: call create_execution_plans() first")
        if not 0 <= index < len(self.plans):
            raise GraphValidationError(f"plan index {index} is out of range; there are {len(self.plans)} plans")
        return self.plans[index]

    def bar_engines(self, names: tuple[str, ...]) -> None:
        self._barred_engines |= {self._engine(name).name for name in names}
        self._drop_barred()

    def bar_workspace(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise GraphTypeError(f"a workspace limit must be an int >= 0, in bytes; got {limit!r}")
        self._workspace_limit = limit
        self._drop_barred()

    def _drop_barred(self) -> None:
        """A plan that was built before it was barred needs another choice."""
        with self._lock:
            self._executables = {i: e for i, e in self._executables.items() if not self.barred(self.plans[i])}
        if self.chosen not in self._executables:
            self.chosen = None

    def barred(self, p: Plan) -> str | None:
        """Why a plan may not be used, or None."""
        for part in p.parts:
            if part.engine.name in self._barred_engines:
                return f"engine {part.engine.name!r} is deselected"
            if part.engine.name in self._failed_engines:
                return self._failed_engines[part.engine.name]
        if self._workspace_limit is not None and p.workspace_bytes > self._workspace_limit:
            return f"it needs {p.workspace_bytes} bytes of workspace, more than the limit of {self._workspace_limit}"
        return None

    def check_support(self) -> None:
        if not self.plans:
            raise GraphStateError(f"graph {self.graph.name!r}: call create_execution_plans() first")
        if all(self.barred(p) for p in self.plans):
            raise GraphNotSupportedError(self._no_plan("every plan is deselected"))

    def build(self, policy: build_plan_policy) -> None:
        self.check_support()
        while not self._tried(first := self._usable()[0]):
            self.create([proposal.mode for proposal in self.proposals])  # plans without the engine that failed
            self.check_support()
        if policy is build_plan_policy.ALL:
            with compilers(self.device) as pool:
                list(pool.map(self._tried, [i for i in self._usable() if i != first]))
        self.chosen = first

    def _usable(self) -> list[int]:
        return [i for i, p in enumerate(self.plans) if not self.barred(p)]

    def _tried(self, index: int) -> bool:
        """Build a plan; False where an installed plug-in failed, which bars its plans."""
        try:
            self._build(index)
        except (PluginError, KernelCompileError):
            if self.barred(self.plans[index]) is None:
                raise
            return False
        return True

    def build_at(self, index: int) -> None:
        reason = self.barred(self.at(index))
        if reason:
            raise GraphNotSupportedError(f"plan {index} ({self.plans[index].name}): {reason}")
        self._build(index)
        self.chosen = index

    def selected(self) -> int:
        """Index of the plan that execute runs."""
        if self.chosen is None:
            raise GraphStateError(
                f"graph {self.graph.name!r}: no plan is built and allowed; call build_plans() or build() first"
            )
        return self.chosen

    def adopt(self, p: Plan) -> None:
        """Build a plan and select it; one with the same engines and knobs gives it its place."""
        index = next((i for i, known in enumerate(self.plans) if known.name == p.name), len(self.plans))
        self.plans[index : index + 1] = [p]
        self._build(index)
        self.chosen = index

    def _build(self, index: int) -> None:
        if index in self._executables:
            return
        p = self.plans[index]
        kernels = [self._kernel(part) if isinstance(part.engine, KernelEngine) else None for part in p.parts]

        def parts(dependent: bool) -> list[KernelPart | HostPart]:
            return [
                _host(part, self.device)
                if loaded is None
                else KernelPart(part.launch, loaded.launcher(part.launch, dependent), scratch)
                for part, loaded, scratch in zip(p.parts, kernels, p.scratch, strict=True)
            ]

        parts(False)
        made = Executable(
            self.graph,
            parts,
            lambda: Binder(self.graph, self.device, p.workspace_bytes, p.in_place, p.placed),
            self._undependable(p),
        )
        with self._lock:
            self._executables.setdefault(index, made)

    def _kernel(self, part: Part) -> object:
        try:
            return kernel(part, self.device)
        except (PluginError, KernelCompileError) as error:
            self._failed_engines[part.engine.name] = str(guard.left_out(part.engine, error, self.registry.origins))
            raise

    def _undependable(self, p: Plan) -> str | None:
        """Why a plan cannot be started by programmatic dependent launch, or None."""
        what = f"graph {self.graph.name!r}, plan {p.name}: programmatic_dependent_launch"
        if not self.device.runs_kernels or self.device.sm < _DEPENDENT_LAUNCH_SM:
            found = f"SM{self.device.sm}" if self.device.runs_kernels else self.device.name
            return f"{what} needs SM{_DEPENDENT_LAUNCH_SM} or newer; {self.device} is {found}"
        for part in p.parts:
            if part.launch is None or not part.launch.waits:
                return (
                    f"{what} needs kernels that wait for the one before them; the launch of engine "
                    f"{part.engine.name!r} does not say so"
                )
            if part.launch.cleared:
                return f"{what} needs kernels that begin with nothing but themselves; this one has memory cleared first"
        return None

    def execute(
        self, index: int | None, variant_pack: Mapping, workspace: object, handle, dependent: bool, check
    ) -> None:
        """Run a built plan, the selected one if index is None. check: called with a pack unless one like it was
        accepted before; raises."""
        executable = self.executable(index)
        stream = self.stream() if handle is None else self.stream_of(handle)
        if not executable.run(variant_pack, workspace, stream, dependent):
            check(variant_pack)
            executable.accept(variant_pack, workspace, stream, dependent)
            self.stream = stream_getter(self.device, self.handle)  # a faster one, as torch may use CUDA by now

    def stream_of(self, handle: object) -> int:
        """The stream that work goes to with this handle. Errors as of ``stream_on``."""
        return stream_on(self.device, handle)

    def bind(self, variant_pack: Mapping, workspace: object, handle, dependent: bool) -> Bound:
        """The selected plan on fixed buffers."""
        stream = stream_getter(self.device, self.handle if handle is None else handle)
        return Bound(self.executable().bind(variant_pack, workspace, dependent), variant_pack, workspace, stream)

    def executable(self, index: int | None = None) -> Executable:
        """A built plan's, the selected one's if index is None; GraphStateError if it is not built."""
        return self._executables.get(self.chosen if index is None else index) or self._not_built(index)

    def _not_built(self, index: int | None) -> NoReturn:
        index = self.selected() if index is None else index
        raise GraphStateError(f"plan {index} ({self.at(index).name}) is not built; call build_plan_at_index({index})")

    def _no_plan(self, what: str) -> str:
        lines = [f"graph {self.graph.name!r} on {self.device}: {what}"]
        for proposal in self.proposals:
            lines += [f" mode {proposal.mode.name}:"] + plan.refusals(proposal)
        lines += [f"  pattern {d.pattern}: {d.why}" for d in self.declined]
        lines += [f"  {line}" for line in self.left_out]
        lines += [f"  plan {p.name}: {self.barred(p)}" for p in self.plans]
        if heur_mode.FALLBACK not in (proposal.mode for proposal in self.proposals):
            lines.append(" mode FALLBACK was not asked: there the reference engine runs every valid graph")
        return "\n".join(lines)


def _host(part: Part, device: Device) -> HostPart:
    run = guard.running(part.engine, part.region.subgraph, part.engine.run)
    return HostPart(lambda buffers, stream: run(part.facts, part.knobs, device, buffers, stream))


def _device(handle, emulated: bool) -> Device:
    """Where to plan for: the handle's device, the emulator if it is asked for, else the current device."""
    from graphfuse.runtime import device
    from graphfuse.runtime import handle as handles

    given = None if handle is None else handles.alive(handle).device
    if not emulated:
        return given or device.get()
    if given not in (None, EMULATOR):
        raise DeviceError(
            f"engine {str(EMULATOR)!r} was asked for, but the handle is for {given}; accepted: no handle, or "
            f"create_handle({str(EMULATOR)!r})"
        )
    return EMULATOR


def compilers(device: Device) -> ThreadPoolExecutor:
    """Threads in which kernels for a device can be compiled and loaded side by side."""
    if device.kind == "cuda":
        from graphfuse.runtime import cuda_core  # noqa: F401 - two first imports of it at once, in the threads, fail
    return ThreadPoolExecutor(os.cpu_count())


def kernel(part: Part, device: Device):
    """The part's kernel, compiled and loaded: on a GPU by ``runtime``, elsewhere by ``emulator``."""
    source, entry = guard.checked_source(part, device), part.engine.entry
    if device.kind == EMULATOR.kind:
        from graphfuse.emulator import kernel as emulated

        return emulated.load(source, entry)
    from graphfuse.runtime import cache, launch

    return launch.load(cache.cubin(source, device.arch, f"{part.engine.name}.cu"), entry, device)
