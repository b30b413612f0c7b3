"""Methods of a graph that plan it: the steps that make plans, queries about plans, selection and deselection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphfuse.api.checks import check_not_offered, modes, several
from graphfuse.api.defined_graph import DefinedGraph
from graphfuse.base.cudnn_keywords import also
from graphfuse.base.cudnn_names import KEYWORDS
from graphfuse.base.enums import behavior_note, build_plan_policy, heur_mode, numerical_note
from graphfuse.base.errors import GraphTypeError

if TYPE_CHECKING:
    from graphfuse.base.device import Device
    from graphfuse.planning.engine_numbers import knob
    from graphfuse.planning.kernel_cache import KernelCache
    from graphfuse.planning.plan import Plan
    from graphfuse.planning.planner import Planner
    from graphfuse.runtime.device import Target
    from graphfuse.runtime.handle import Handle


class PlanConfig(NamedTuple):
    """A plan in the form that ``create_execution_plan`` accepts.

    engine_id: the engine's name. knobs: a dict of values by name. For several regions, both are tuples.
    """

    engine_id: object
    knobs: object


GraphT = TypeVar("GraphT", bound="PlannedGraph")
NoteT = TypeVar("NoteT")


class PlannedGraph(DefinedGraph):
    """A graph with plans, which its planner makes. ``build_operation_graph`` makes the planner."""

    handle: Handle | None
    kernel_cache: KernelCache | None
    _target: Target | None
    _planner: Planner | None

    def build_operation_graph(self, *, patterns: Sequence[object] = (), engines: Sequence[object] = ()) -> None:
        """Match patterns; calls ``validate`` first if it has not been called.

        patterns, engines: additional objects for this graph, or the only names to use. With the name "emulator" among
        the engines, kernels run on the CPU, on CPU tensors.
        """
        from graphfuse.planning.planner import Planner

        patterns, engines = several("patterns", patterns), several("engines", engines)
        if self._ir is None:
            self.validate()
        self._planner = Planner(self.frozen, self.handle, patterns, engines, self._target, self.kernel_cache)

    def create_execution_plans(self, heuristics: Sequence[heur_mode] = (heur_mode.A,)) -> None:
        """Make plans, ranked for each heuristic mode in turn.

        Raises GraphNotSupportedError with every engine's reason if there is no plan."""
        chosen = modes("heuristics", heuristics)
        self._need(self._planner, "build_operation_graph").create(chosen)

    def check_support(self) -> None:
        """Raises GraphNotSupportedError if all plans are deselected or cannot be prepared."""
        self._need(self._planner, "build_operation_graph").check_support()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE, *, ctx: None = None) -> None:
        """Prepare the first plan that can be prepared (HEURISTICS_CHOICE), or all (ALL), and select the first.

        A plan that cannot be prepared is skipped, with a warning if its kernel does not compile. Raises
        GraphNotSupportedError if no plan remains, KernelCompileError if the only plan does not compile.
        """
        check_not_offered("build_plans", KEYWORDS, {"ctx": ctx})
        _check_policy("build_plans", policy)
        self._need(self._planner, "build_operation_graph").build(policy)

    def build(
        self,
        heuristics: Sequence[heur_mode] = (heur_mode.A,),
        policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE,
        *,
        patterns: Sequence[object] = (),
        engines: Sequence[object] = (),
        ctx: None = None,
    ) -> None:
        """Do all steps from ``validate`` to ``build_plans``, with the arguments of these steps."""
        check_not_offered("build", KEYWORDS, {"ctx": ctx})
        _check_policy("build", policy)
        self.validate()
        self.build_operation_graph(patterns=patterns, engines=engines)
        self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans(policy)

    def get_execution_plan_count(self) -> int:
        """Number of plans, deselected ones included; 0 before ``create_execution_plans``."""
        return 0 if self._planner is None else len(self._planner.plans)

    @property
    def plans(self) -> list[PlanConfig]:
        """All plans in the order of their indices, deselected ones included."""
        return [PlanConfig(*self.get_engine_and_knobs_at_index(i)) for i in range(self.get_execution_plan_count())]

    def get_plan_name_at_index(self, index: int) -> str:
        return self._plan(index).name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[object, object]:
        """(engine name, knob dict), as ``create_execution_plan`` accepts them; for several regions, tuples of both."""
        return self._plan(index).engine_and_knobs

    def get_engine_count(self) -> int:
        """Number of engines that can run a part of the graph. An engine counts once for each kind of its knobs."""
        return len(self._need(self._planner, "build_operation_graph").lookup.numbered)

    @also(engine_id="engine")
    def get_knobs_for_engine(self, engine: int | str) -> list[knob]:
        """Knobs of an engine, with the ranges of the values that it proposes for the graph.

        engine: a number below ``get_engine_count()``, or the name of an engine with one kind of knobs here."""
        return self._need(self._planner, "build_operation_graph").lookup.knobs_of(engine)

    def get_behavior_notes(self) -> list[behavior_note]:
        """Behaviour notes of the selected plan."""
        planner = self._need(self._planner, "build_plans")
        return _in_order(behavior_note, planner.at(planner.selected()).behavior_notes)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        return _in_order(behavior_note, self._plan(index).behavior_notes)

    def get_numerical_notes_at_index(self, index: int) -> tuple[str, ...]:
        """Notes on how the plan rounds, converts and sums, in words."""
        return self._plan(index).notes

    def get_kernel_source_at_index(self, index: int) -> tuple[str, ...]:
        """The CUDA C++ text of each kernel of a plan, in running order. The plan need not be built.

        The reference engine has no kernels."""
        return self._plan(index).sources

    @property
    def device(self) -> Device:
        """Device that the graph is planned for."""
        return self._need(self._planner, "build_operation_graph").device

    @also(engine_id="engine")
    def create_execution_plan(self, engine: object, knobs: object = None) -> int:
        """Append the plan with this engine and these knobs. Returns its index.

        engine: a name, or a number below ``get_engine_count()``. knobs: a dict of values by name; the engine chooses
        knobs that are left out. For several regions, both are tuples. Raises GraphNotSupportedError, which says why
        the engines cannot run the graph.
        """
        return self._need(self._planner, "build_operation_graph").append(engine, knobs)

    def build_plan_at_index(self: GraphT, index: int) -> GraphT:
        """Compile one plan and select it."""
        self._need(self._planner, "create_execution_plans").build_at(index)
        return self

    def select_plan(self: GraphT, index: int) -> GraphT:
        """Make ``build_plans`` build this plan alone; it then raises if the plan cannot be prepared."""
        self._need(self._planner, "create_execution_plans").pin(index)
        return self

    def deselect_engines(self: GraphT, engine_names: Sequence[str]) -> GraphT:
        """Bar plans that use an engine with one of these names; those built already count as not built."""
        names = several("deselect_engines", engine_names)
        self._need(self._planner, "create_execution_plans").bar_engines(names)
        return self

    def deselect_workspace_greater_than(self: GraphT, workspace_limit: int) -> GraphT:
        """Bar plans that need more than `workspace_limit` bytes; those built already count as not built."""
        self._need(self._planner, "create_execution_plans").bar_workspace(workspace_limit)
        return self

    def select_behavior_notes(self: GraphT, notes: Sequence[behavior_note]) -> GraphT:
        """Bar plans that lack one of these notes; those built already count as not built."""
        return self._bar_notes("select_behavior_notes", behavior_note, notes, True)

    def deselect_behavior_notes(self: GraphT, notes: Sequence[behavior_note]) -> GraphT:
        """Bar plans that have one of these notes; those built already count as not built."""
        return self._bar_notes("deselect_behavior_notes", behavior_note, notes, False)

    def select_numeric_notes(self: GraphT, notes: Sequence[numerical_note]) -> GraphT:
        """Bar plans that lack one of these notes; those built already count as not built."""
        return self._bar_notes("select_numeric_notes", numerical_note, notes, True)

    def deselect_numeric_notes(self: GraphT, notes: Sequence[numerical_note]) -> GraphT:
        """Bar plans that have one of these notes; those built already count as not built."""
        return self._bar_notes("deselect_numeric_notes", numerical_note, notes, False)

    def _bar_notes(self: GraphT, what: str, kind: type, notes: Sequence[object], wanted: bool) -> GraphT:
        found = several(what, notes)
        for note in found:
            if not isinstance(note, kind):
                raise GraphTypeError(f"{what}: give a list of {kind.__name__}, got {note!r}")
        self._need(self._planner, "build_operation_graph").bar_notes(found, wanted)
        return self

    def _plan(self, index: int) -> Plan:
        return self._need(self._planner, "create_execution_plans").at(index)

    def _forget(self) -> None:
        super()._forget()
        self._planner = None


def _in_order(kind: Iterable[NoteT], notes: frozenset[NoteT]) -> list[NoteT]:
    return [note for note in kind if note in notes]


def _check_policy(what: str, policy: object) -> None:
    if not isinstance(policy, build_plan_policy):
        raise GraphTypeError(f"{what}: policy must be a build_plan_policy, got {policy!r}")
