"""cuDNN's plans for some nodes: gets its proposals, and builds one of them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from graphfuse.base.enums import behavior_note, heur_mode, numerical_note
from graphfuse.base.errors import GraphNotSupportedError
from graphfuse.contract.engine import No
from graphfuse.engines.cudnn.translation import Translation, translate
from graphfuse.op_graph.ir import Subgraph

MODES = (heur_mode.A, heur_mode.B, heur_mode.FALLBACK)
"""Modes of cuDNN's heuristics that are used, best first."""

_DESELECTED = "Deselecting execution plan"  # part of the package's message for a plan with a refused note

MULTIPLIES = frozenset({"matmul", "conv_fprop", "conv_dgrad", "conv_wgrad", "sdpa", "sdpa_backward"})
"""Ops that may use tensor cores."""

REFUSED = (
    numerical_note.DOWN_CONVERT_INPUTS,
    numerical_note.REDUCED_PRECISION_REDUCTION,
    numerical_note.NONDETERMINISTIC,
    numerical_note.FFT,
    numerical_note.WINOGRAD,
    numerical_note.WINOGRAD_TILE_4x4,
    numerical_note.WINOGRAD_TILE_6x6,
    numerical_note.WINOGRAD_TILE_13x13,
)
"""Notes of plans that are never used: they do not compute in the node's type, or not the same bits in every run."""


@dataclass(frozen=True)
class CudnnKnobs:
    """Identity of one of cuDNN's plans, which does not depend on its place in a list.

    engine: cuDNN's number of the engine. knobs: "NAME=VALUE,..." of cuDNN's knobs, sorted by name.
    """

    engine: int
    knobs: str = ""


@dataclass(frozen=True)
class Proposed:
    """A plan that cuDNN proposes. mode: the first mode in which it was proposed."""

    knobs: CudnnKnobs
    mode: heur_mode
    behavior_notes: frozenset[behavior_note] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, eq=False)
class BuiltPlan:
    """A plan that is ready to run. index: its place in the Python graph's list. cpp_index: its place in the list of
    cuDNN's library."""

    translation: Translation
    index: int
    cpp_index: int
    workspace_bytes: int


@dataclass(frozen=True, eq=False)
class Answer:
    """Plans that cuDNN proposes, best first, starting with the first one that can be built. first: this plan, built for
    the nodes of the query."""

    proposed: tuple[Proposed, ...]
    first: BuiltPlan


def errors(cudnn: ModuleType) -> tuple[type[Exception], ...]:
    """Exceptions that the package raises for a graph that cuDNN does not support, and for errors of the device."""
    return (cudnn.cudnnGraphNotSupportedError, RuntimeError, NotImplementedError, ValueError, ImportError)


def query(cudnn: ModuleType, facts: Subgraph, handle: object) -> Answer | No:
    """Proposals of cuDNN for some nodes; No with its message if none can be built."""
    failed: Exception | None = None
    try:
        made = _planned(cudnn, facts, handle)
        listed = tuple(_listed(made.graph))
        for first, (_, entry) in enumerate(listed):
            try:
                found = _built(made, entry)
            except errors(cudnn) as error:
                failed = failed or error
                continue
            return Answer(tuple(one for one, _ in listed[first:]), found)
    except errors(cudnn) as error:
        failed = error
    if failed is None:
        return No("cuDNN has no plan for it")
    if _DESELECTED in str(failed):
        rounding = " (float32 would be read as TF32)" if rounds_inputs(facts) else ""
        names = ", ".join(note.name for note in _refused(facts))
        return No(f"each of cuDNN's plans for it has one of the notes that are not taken{rounding}: {names}")
    return No(f"cuDNN has no plan for it: {words(failed)}")


def build(cudnn: ModuleType, facts: Subgraph, knobs: CudnnKnobs, handle: object) -> BuiltPlan:
    """The plan with these knobs, built. Raises GraphNotSupportedError if cuDNN does not propose it, and `errors` if it
    cannot be built."""
    made = _planned(cudnn, facts, handle)
    listed = {one.knobs: index for one, index in _listed(made.graph)}
    if knobs not in listed:
        raise GraphNotSupportedError(
            f"cuDNN {cudnn.backend_version()} proposes no plan {knobs} here; it proposes: "
            f"{', '.join(map(str, listed)) or 'none'}"
        )
    return _built(made, listed[knobs])


def _built(made: Translation, index: int) -> BuiltPlan:
    made.graph.build_plan_at_index(index)
    size = made.graph.get_workspace_size_plan_at_index(index)
    return BuiltPlan(made, index, made.graph.plans[index].cpp_index, size)


def rounds_inputs(facts: Subgraph) -> bool:
    """True if tensor cores would round operands of products: they read float32 as TF32, with 10 bits of mantissa."""
    tensors = facts.graph.tensors
    read = (tensors[t] for node in facts.nodes if node.op_name in MULTIPLIES for _, t in node.inputs)
    return any(t.dtype.bits >= 32 and not t.by_value for t in read)


def words(error: Exception) -> str:
    """Message of a cuDNN error on one line, without that of the package's Python engines, which are not used."""
    return " ".join(str(error).partition("; python engines")[0].split()) or type(error).__name__


def _planned(cudnn: ModuleType, facts: Subgraph, handle: object) -> Translation:
    """`facts` as a cuDNN graph with the plans of its heuristics in all modes."""
    made = translate(cudnn, facts, handle)
    made.graph.validate()
    made.graph.build_operation_graph()
    made.graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note.name) for note in _refused(facts)])
    made.graph.create_execution_plans([getattr(cudnn.heur_mode, mode.name) for mode in MODES])
    return made


def _refused(facts: Subgraph) -> tuple[numerical_note, ...]:
    return (*REFUSED, numerical_note.TENSOR_CORE) if rounds_inputs(facts) else REFUSED


def _listed(graph) -> Iterator[tuple[Proposed, int]]:
    """Plans of cuDNN's library with their places in the graph's list, which also has those of Python engines."""
    modes: Mapping[int, object] = {
        entry.cpp_index: entry.mode for entry in graph.backend_plan_entries() if entry.cpp_index is not None
    }
    known: set[CudnnKnobs] = set()
    for index, plan in enumerate(graph.plans):
        if plan.cpp_index in modes:
            texts = sorted(f"{name.name}={value}" for name, value in (plan.knobs or {}).items())
            knobs = CudnnKnobs(int(plan.engine_id), ",".join(texts))
            if knobs not in known:  # of plans that differ only in knobs without names, the best one is kept
                known.add(knobs)
                yield Proposed(knobs, heur_mode[modes[plan.cpp_index].name], _behavior(graph, index)), index


def _behavior(graph, index: int) -> frozenset[behavior_note]:
    """cuDNN's notes of a plan, without that of CUDA graphs' native API, as the engine runs the plan by a call."""
    found: frozenset[behavior_note] = frozenset()
    with contextlib.suppress(RuntimeError):  # raised for plans whose notes cuDNN does not know
        theirs = [note.name for note in graph.get_behavior_notes_for_plan_at_index(index)]
        found = frozenset(note for note in behavior_note if note.name in theirs)
        found -= {behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API}
    return found
