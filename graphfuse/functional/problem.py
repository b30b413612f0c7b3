"""Problems: graphs of calls, planned and built once for the layouts of their tensors."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphfuse.api import pygraph
from graphfuse.base.dtypes import data_type
from graphfuse.base.enums import build_plan_policy, heur_mode
from graphfuse.base.errors import GraphNotSupportedError, GraphValidationError, ReferenceEngineWarning, VariantPackError
from graphfuse.explain import explained, fallback
from graphfuse.functional.declaration import Variant
from graphfuse.functional.graph_builder import GraphBuilder
from graphfuse.functional.layout import Layout
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.ir import Subgraph
from graphfuse.planning.plan import Plan
from graphfuse.planning.planner import Planner
from graphfuse.runtime.executable import Executable
from graphfuse.runtime.handle import Handle, create_handle


@dataclass(frozen=True, eq=False)
class Problem:
    """A built graph of a function. parameters: names of the function's parameters, by names of the graph's tensors.
    fallback: returns what the reference engine runs on a device that runs kernels, and why; None if it runs nothing."""

    plan: Plan
    executable: Executable
    parameters: Mapping[str, str]
    fallback: Callable[[], str | None] | None

    @property
    def workspace_bytes(self) -> int:
        return self.executable.binder.workspace_bytes

    @property
    def values(self) -> tuple[str, ...]:
        """The parameters whose addresses or numbers are passed to the plan's launch, in order."""
        return tuple(self.parameters[t.name] for t in self.executable.bound)


@functools.lru_cache(maxsize=1024)
def plan(name: str, variant: Variant, layouts: tuple[tuple[str, Layout], ...], device: str, generation: int) -> Problem:
    """The problem of these layouts on a device. layouts: by argument, already checked. generation: of the tuned knobs
    (``tables.store``); problems are planned anew for each. Raises VariantPackError if the graph does not accept the
    layouts."""
    builder, planner = planned(name, variant, dict(layouts), device)
    planner.build(build_plan_policy.HEURISTICS_CHOICE)
    return Problem(planner.at(planner.selected()), planner.executable(), builder.pack, _fallback(planner))


def planned(name: str, variant: Variant, layouts: Mapping[str, Layout], device: str) -> tuple[GraphBuilder, Planner]:
    """The graph of these layouts with its plans, none of which is built. Raises the errors of ``plan``."""
    builder = build_graph(name, variant, layouts, create_handle(device))
    try:
        planner = Planner(freeze(builder.graph), builder.graph.handle, (), ())
    except GraphValidationError as error:  # errors of strides: the graph's tensors are named like the arguments
        raise VariantPackError(str(error)) from None
    try:
        planner.create([heur_mode.OPENSOURCE])
    # kernels for the parts that they support, so that a row has the same bits as in other calls
    except GraphNotSupportedError:
        planner.create([*([heur_mode.A] * planner.device.runs_kernels), heur_mode.FALLBACK])
    return builder, planner


def _fallback(planner: Planner) -> Callable[[], str | None] | None:
    parts = planner.at(planner.selected()).parts
    if not planner.device.runs_kernels or not any(part.engine.facts is Subgraph for part in parts):
        return None
    return lambda: fallback(explained(planner))


def warn_of_fallback(name: str, problem: Problem) -> None:
    """Warns, once per function, if the reference engine runs a call on a device that runs kernels."""
    if name in warned or problem.fallback is None:
        return
    why = problem.fallback()
    if why is not None:
        warned.add(name)
        warnings.warn(
            f"graphfuse: {name} runs on the reference engine, which is slow: {why}. "
            "print(graphfuse.functional.explain(FUNCTION, *args)) tells more; this is said once for each function.",
            ReferenceEngineWarning,
            stacklevel=2,
        )


warned: set[str] = set()
"""Names of functions that a warning was given for."""


def build_graph(name: str, variant: Variant, layouts: Mapping[str, Layout], handle: Handle) -> GraphBuilder:
    """The graph of these layouts, not planned yet. It computes in float64 if any tensor is float64, otherwise in
    float32."""
    double = any(t.stored is data_type.DOUBLE for t in layouts.values())
    compute = data_type.DOUBLE if double else data_type.FLOAT
    graph = pygraph(
        name,
        intermediate_data_type=compute,
        compute_data_type=compute,
        # A tensor between nodes declares its own type only if a function rounds there.
        intermediate_rounding="declared",
        handle=handle,
    )
    builder = GraphBuilder(graph, layouts, dict(variant.options))
    variant.build(builder)
    if double:  # otherwise the result of a reduction would be rounded to FLOAT, its default
        for t in (t for node in graph.nodes for t in node.outputs.values()):
            if t.get_is_virtual() and t.get_data_type() is data_type.NOT_SET:
                t.set_data_type(compute)
    return builder
