"""``Planner``: proposes, deselects, prepares and runs the plans of one graph. `pygraph` has one planner."""

import copy
import dataclasses
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

from graphfuse.base.device import EMULATOR, Device
from graphfuse.base.enums import behavior_note, build_plan_policy, heur_mode, numerical_note
from graphfuse.base.errors import (
    DeviceError,
    GraphNotSupportedError,
    GraphStateError,
    GraphTypeError,
    GraphValidationError,
    KernelCompileError,
    PluginError,
)
from graphfuse.base.wording import counted
from graphfuse.contract.engine import Engine, Prepared
from graphfuse.op_graph.ir import FrozenGraph
from graphfuse.op_graph.lower import lower
from graphfuse.planning import guard, kernels, plan, recipe
from graphfuse.planning import registry as plugins
from graphfuse.planning.deselection import Deselection
from graphfuse.planning.engine_lookup import EngineLookup
from graphfuse.planning.kernel_cache import CodeOf, KernelCache
from graphfuse.planning.plan import Part, Plan, Proposal
from graphfuse.planning.recipe import Code, Codes, Recipe
from graphfuse.runtime import device as devices
from graphfuse.runtime import fastcall
from graphfuse.runtime import handle as handles
from graphfuse.runtime.bound import Bound
from graphfuse.runtime.executable import Executable, NotBuilt
from graphfuse.runtime.handle import stream_getter, stream_on
from graphfuse.runtime.variant_pack import Binder
from graphfuse.tuned_tables import store

UNPREPARED = (GraphNotSupportedError, KernelCompileError)
"""Errors of ``Engine.prepare`` after which a plan is skipped, as it cannot be prepared here."""

_DEPENDENT_LAUNCH_SM = 90

_OVERLAPPING = frozenset({90})
"""Compute capabilities on which kernels of one plan overlap: those where it was measured."""
_CAPTURES_OVERLAP = 12030
"""First version of CUDA whose driver captures dependent launches into CUDA graphs as such."""


class Planner:
    """Plans of one lowered graph on one device.

    handle: the user's; it sets the stream. target: the device to plan for, None for the handle's. cache: the user's
    kernel cache, or None."""

    def __init__(
        self,
        graph: FrozenGraph,
        handle,
        patterns: Sequence[object],
        engines: Sequence[object],
        target: devices.Target | None = None,
        cache: KernelCache | None = None,
    ):
        self.handle = handle
        # Users name the emulator as an engine. In planning it is a device, for which all engines are queried.
        self.device = devices.chosen(target, _given(handle, str(EMULATOR) in engines))
        self._code_of: CodeOf = kernels.compiled if cache is None else cache.finding(kernels.compiled)
        self.registry = plugins.registry(patterns, [e for e in engines if e != str(EMULATOR)])
        self.stream: Callable[[], int] = stream_getter(self.device, handle)
        """Returns the stream to run on if execute is given no handle."""
        self._deselection = Deselection()
        self._begin(graph)

    def _begin(self, graph: FrozenGraph) -> None:
        """Sets all attributes that depend on the graph, to their values before planning."""
        self.graph = lower(graph)
        self.regions, self.declined = plan.matches(self.graph, self.registry)
        self.proposals: list[Proposal] = []
        self.plans: list[Plan] = []
        self.running: Executable | NotBuilt = NotBuilt()
        """The selected plan if it is built, else a placeholder that runs nothing. Execute tries its fast path first."""
        self.chosen: int | None = None
        """Index of the plan that execute runs."""
        self._pinned: int | None = None
        self._executables: dict[int, Executable | NotBuilt] = {}
        self._codes: dict[int, tuple[Code, ...]] = {}  # of built plans
        self.lookup = EngineLookup(self.graph, self.regions, self.device, self.registry, self._sound_engines)
        self._failed: dict[str, str] = {}  # why a plan could not be prepared when it was last tried, by its name
        self._lock = threading.Lock()

    def like(self, graph: FrozenGraph) -> "Planner":
        """A planner without plans, for a graph that differs only in shapes.

        It has the same device, plug-ins and deselections."""
        made = copy.copy(self)
        made._begin(graph)
        return made

    def _choose(self, index: int | None) -> None:
        """Select the plan with this index for execute; None selects none."""
        self.chosen, self.running = index, self._executables.get(index) or NotBuilt()

    @property
    def left_out(self) -> list[str]:
        """Why installed plug-ins are not used at all, a line each. Verdicts have reasons that concern one region."""
        return [*self._deselection.failed.values(), *plugins.left_out()]

    def create(self, modes: Sequence[heur_mode]) -> None:
        """Make the plans of every mode, in the order of the modes and without repeats."""
        engines = self._sound_engines()
        known, tunings = self.registry, store.tunings(engines, self.device)
        about = {"origins": known.origins, "last": known.last, "off": known.off}
        self.proposals = [
            plan.propose(self.graph, self.regions, engines, self.device, m, tunings, **about) for m in modes
        ]
        for proposal in self.proposals:
            known = {p.name for p in self.plans}
            self.plans += [p for p in proposal.plans if p.name not in known]
        if not self.plans:
            raise GraphNotSupportedError(self.no_plan("no engine can run it"))

    def _sound_engines(self) -> list[Engine]:
        """Engines that can be used: those that have not failed, and whose table of tuned knobs can be read."""
        for engine in self.registry.engines:
            try:
                guard.call(engine, self.graph, "table", store.first_party, engine, self.device)
            except PluginError as error:
                self._leave_out(engine, error)
        return [e for e in self.registry.engines if e.name not in self._deselection.failed]

    def _leave_out(self, engine: Engine, error: Exception) -> None:
        """Exclude an installed engine that failed; for any other engine, raise the error."""
        why = str(guard.left_out(engine, error, self.registry.origins))
        with self._lock:  # plans are built in several threads
            self._deselection = dataclasses.replace(
                self._deselection, failed={**self._deselection.failed, engine.name: why}
            )

    def append(self, engine: object, knobs: object) -> int:
        """Add the plan with this engine and these knobs. Returns its index."""
        self.plans.append(self.lookup.plan(engine, knobs))
        return len(self.plans) - 1

    def at(self, index: int) -> Plan:
        if isinstance(index, bool) or not isinstance(index, int):
            raise GraphTypeError(f"a plan index must be an int, got {index!r}")
        if not self.plans:
            raise GraphStateError(f"graph {self.graph.name!r}: call create_execution_plans() first")
        if not 0 <= index < len(self.plans):
            raise GraphValidationError(f"plan index {index} is out of range of {counted(len(self.plans), 'plan')}")
        return self.plans[index]

    def bar_engines(self, names: tuple[str, ...]) -> None:
        self._deselect(engines=self._deselection.engines | {self.lookup.named(name).name for name in names})

    def bar_workspace(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise GraphTypeError(f"a workspace limit must be an int >= 0, in bytes; got {limit!r}")
        self._deselect(workspace=limit)

    def bar_notes(self, notes: Sequence[behavior_note | numerical_note], wanted: bool) -> None:
        """Bar plans that lack one of these notes if wanted is True, plans that have one if it is False."""
        self._deselect(notes=(*self._deselection.notes, *((note, wanted) for note in notes)))

    def _deselect(self, **changed: object) -> None:
        """Add conditions, as in ``Deselection``. Built plans that these exclude count as not built."""
        self._deselection = dataclasses.replace(self._deselection, **changed)
        with self._lock:
            self._executables = {i: e for i, e in self._executables.items() if not self.barred(self.plans[i])}
        if self.chosen not in self._executables:
            self._choose(None)

    def barred(self, p: Plan) -> str | None:
        """Why a plan is deselected, or could not be prepared when it was last tried; None if neither."""
        return self._deselection.against(p) or self._failed.get(p.name)

    def check_support(self) -> None:
        if not self.plans:
            raise GraphStateError(f"graph {self.graph.name!r}: call create_execution_plans() first")
        if all(self.barred(p) for p in self.plans):
            raise GraphNotSupportedError(self.no_plan("every plan is deselected or cannot be prepared"))

    def build(self, policy: build_plan_policy) -> None:
        """Build the first plan that can be prepared, or all that can, and select the first. A pinned plan is the only
        one that is tried.

        If none can be prepared, raises the error of the only plan, or GraphNotSupportedError with each plan's reason.
        """
        if self._pinned is not None:
            return self.build_at(self._pinned)
        usable = [i for i, p in enumerate(self.plans) if not self._deselection.against(p)]
        if not usable:
            self.check_support()
        errors: dict[int, Exception | None] = {}
        left, known = iter(usable), self._deselection.failed
        for first in left:
            errors[first] = self._tried(first)
            if errors[first] is None:
                break
        else:
            if self._deselection.failed != known:
                self.create([proposal.mode for proposal in self.proposals])  # plans without the plug-in that failed
                return self.build(policy)
            found = [*errors.values()]
            if len(found) == 1:
                raise found[0]
            raise GraphNotSupportedError(self.no_plan("no plan can be prepared")) from found[0]
        if policy is build_plan_policy.ALL:
            with kernels.compilers(self.device) as pool:
                rest = [*left]
                errors |= zip(rest, pool.map(self._tried, rest), strict=True)
        for index, error in errors.items():
            # Without this warning, users would not see the engine's fault. For excluded plug-ins they had another one.
            if isinstance(error, KernelCompileError) and not self._deselection.against(self.plans[index]):
                warnings.warn(f"another plan takes the place of one that fails: {error}", RuntimeWarning, stacklevel=3)
        self._choose(first)

    def _tried(self, index: int) -> Exception | None:
        """Build a plan. Returns the error if it cannot be prepared, or if an installed plug-in fails, which bars it."""
        if self._deselection.against(self.plans[index]):
            return PluginError(self._deselection.against(self.plans[index]))
        try:
            self._build(index)
        except UNPREPARED as error:
            return error
        except PluginError as error:
            if not self._deselection.against(self.plans[index]):
                raise
            return error
        return None

    def build_at(self, index: int) -> None:
        self._refuse_deselected(index, self.at(index))
        self._build(index)
        self._choose(index)

    def pin(self, index: int) -> None:
        """Make ``build`` build this plan alone."""
        self._refuse_deselected(index, self.at(index))
        self._pinned = index
        self._choose(index if index in self._executables else None)

    def _refuse_deselected(self, index: int, p: Plan) -> None:
        reason = self._deselection.against(p)
        if reason:
            raise GraphNotSupportedError(f"plan {index} ({p.name}): {reason}")

    def selected(self) -> int:
        """Index of the plan that execute runs."""
        if self.chosen is None:
            raise GraphStateError(
                f"graph {self.graph.name!r}: no plan is built and allowed; call build_plans() or build() first"
            )
        return self.chosen

    def adopt(self, p: Plan) -> Plan:
        """Build a plan and select it; it replaces a plan with the same engines and knobs. Returns the built plan."""
        index = next((i for i, known in enumerate(self.plans) if known.name == p.name), len(self.plans))
        self.plans[index : index + 1] = [p]
        self._build(index)
        self._choose(index)
        return self.plans[index]

    def recorded(self) -> tuple[tuple[Recipe, ...], int, tuple[Code, ...]]:
        """Recipes of the built plans, the place of the selected one among them, and their kernels.

        Raises GraphStateError if no plan is selected."""
        chosen = self.selected()
        with self._lock:
            built = sorted(self._executables)
            plans, codes = [self.plans[i] for i in built], [code for i in built for code in self._codes[i]]
        return tuple(recipe.of(p, self.regions) for p in plans), built.index(chosen), tuple(codes)

    def restore(self, recipes: Sequence[Recipe], selected: int, codes: Codes | None) -> None:
        """Build the plans of these recipes, instead of planning, and select one.

        codes: their kernels, None to compile them. Raises SerializedError if a recipe does not fit the graph or the
        installed plug-ins, or if a kernel is missing."""
        engines = self.registry.engines
        self.plans = [recipe.rebuild(r, self.graph, self.regions, engines, self.device) for r in recipes]
        for index in range(len(self.plans)):
            self._build(index, None if codes is None else codes.find)
        self._choose(selected)

    def _build(self, index: int, code_of: CodeOf | None = None) -> None:
        if index in self._executables:
            return
        p, found = self.plans[index], code_of or self._code_of
        codes: list[Code] = []

        def kept(source: str, entry: str, name: str, device: Device) -> Code:
            codes.append(found(source, entry, name, device))
            return codes[-1]

        try:
            prepared = [self._prepared(part, kept) for part in p.parts]
            needs = [work.workspace_bytes for work in prepared]
            if needs != [part.outline.workspace_bytes for part in p.parts]:
                p = plan.assemble(self.graph, p.parts, self.device, needs)
                self._refuse_deselected(index, p)
        except UNPREPARED as error:
            self._failed[p.name] = f"it cannot be prepared: {str(error).partition(chr(10))[0]}"
            raise

        made = self._executable(p, prepared) if self.device.here else NotBuilt()
        with self._lock:
            if index not in self._executables:
                self.plans[index], self._executables[index] = p, made
                self._codes[index] = tuple(codes)
                self._failed.pop(p.name, None)

    def _executable(self, p: Plan, prepared: Sequence[Prepared]) -> Executable:
        """The executable of a plan. prepared: the work of its parts."""

        waits = [work.undependable is None for work in prepared]
        # Only a kernel that waits lets the next one begin early.
        overlap = [one and other and self._overlaps for one, other in itertools.pairwise(waits)]

        @functools.cache
        def parts(dependent: bool) -> list[fastcall.FrozenPart]:
            early = [dependent, *(dependent or both for both in overlap)]
            frozen = [work.freeze(begins) for work, begins in zip(prepared, early, strict=True)]
            return [fastcall.FrozenPart(*each) for each in zip(frozen, p.scratch, strict=True)]

        parts(False)  # so that errors of the device are raised now
        return Executable(
            self.graph,
            parts,
            functools.partial(self.binder, p),
            self._undependable(p, prepared),
        )

    @property
    def _overlaps(self) -> bool:
        """True if kernels of one plan overlap without being asked to."""
        if self.device.kind != "cuda" or self.device.sm not in _OVERLAPPING:
            return False
        return devices.driver_version() >= _CAPTURES_OVERLAP

    def binder(self, p: Plan) -> Binder:
        """The object that finds and checks the buffers of a plan."""
        return Binder(self.graph, self.device, p.workspace_bytes, p.in_place, p.placed)

    def _prepared(self, part: Part, code_of: CodeOf) -> Prepared:
        try:
            return kernels.prepare(part, self.device, code_of)
        except (PluginError, KernelCompileError) as error:
            self._leave_out(part.engine, error)
            raise

    def _undependable(self, p: Plan, prepared: Sequence[Prepared]) -> str | None:
        """Why a plan cannot be started by programmatic dependent launch; None if it can."""
        what = f"graph {self.graph.name!r}, plan {p.name}: programmatic_dependent_launch"
        if not self.device.runs_kernels or self.device.sm < _DEPENDENT_LAUNCH_SM:
            found = f"SM{self.device.sm}" if self.device.runs_kernels else self.device.name
            return f"{what} needs SM{_DEPENDENT_LAUNCH_SM} or newer; {self.device} is {found}"
        for part, work in zip(p.parts, prepared, strict=True):
            if work.undependable is not None:
                return (
                    f"{what} needs work that begins with nothing but kernels that wait for the one before them; "
                    f"engine {part.engine.name!r}: {work.undependable}"
                )
        return None

    def run(
        self, executable: Executable, variant_pack: Mapping, workspace: object, handle, dependent: bool, check
    ) -> None:
        """Run a plan of this graph, possibly for other shapes.

        check: called with the pack unless one like it was accepted before; raises for a wrong one."""
        stream = self.stream() if handle is None else self.stream_of(handle)
        if not executable.run(variant_pack, workspace, stream, dependent):
            check(variant_pack)
            executable.accept(variant_pack, workspace, stream, dependent)
            self.stream = stream_getter(self.device, self.handle)  # there is a faster getter once torch uses CUDA

    def stream_of(self, handle: object) -> int:
        """The stream to run on with this handle. Errors as in ``stream_on``."""
        return stream_on(self.device, handle)

    def bind(self, executable: Executable, variant_pack: Mapping, workspace: object, handle, dependent: bool) -> Bound:
        """A plan of this graph on fixed buffers."""
        stream = stream_getter(self.device, self.handle if handle is None else handle)
        return Bound(executable.bind(variant_pack, workspace, dependent), variant_pack, workspace, stream)

    def executable(self, index: int | None = None) -> Executable:
        """The executable of a built plan, of the selected one if index is None.

        Raises GraphStateError if the plan is not built, DeviceError if its device is not on this machine."""
        index = self.selected() if index is None else index
        found = self._executables.get(index)
        if found is None:
            name = self.at(index).name
            raise GraphStateError(f"plan {index} ({name}) is not built; call build_plan_at_index({index})")
        self.device.check_here(self.graph.name)
        assert isinstance(found, Executable)
        return found

    def no_plan(self, what: str) -> str:
        """Error message for a graph without a plan: `what`, and the reasons of engines, patterns and plans."""
        place = self.device if self.device.here else self.device.described
        lines = [f"graph {self.graph.name!r} on {place}: {what}"]
        for proposal in self.proposals:
            refusals = plan.refusals(proposal)
            lines += [f" mode {proposal.mode.name}:", *refusals] if refusals else []
        lines += [f"  pattern {d.pattern}: {d.why}" for d in self.declined]
        missed = plan.unmatched(self.graph, self.regions, self.declined)
        lines += [f"  no pattern matches {self.graph.nodes[i].name}" for i in missed]
        lines += [f"  {line}" for line in self.left_out]
        lines += [f" plan {p.name}: {why}" for p in self.plans if (why := self.barred(p))]
        if heur_mode.FALLBACK not in (proposal.mode for proposal in self.proposals):
            lines.append(" mode FALLBACK was not asked: there the reference engine runs every valid graph")
        if not self.device.runs_kernels:
            lines.append(" without a GPU, the emulator runs kernels: GRAPHFUSE_DEVICE=emulator, or a handle of it")
        return "\n".join(lines)


def _given(handle, emulated: bool) -> Device | None:
    """Device of the user's handle, or the emulator if the engines have its name; None if neither is given."""
    given = None if handle is None else handles.alive(handle).device
    if not emulated:
        return given
    if given not in (None, EMULATOR):
        raise DeviceError(
            f"engine {str(EMULATOR)!r} was asked for, but the handle is for {given}; accepted: no handle, or "
            f"create_handle({str(EMULATOR)!r})"
        )
    return EMULATOR
