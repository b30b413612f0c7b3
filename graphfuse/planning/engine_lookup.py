"""Engines that a user requests by name or number, with all or some of their knobs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from graphfuse.base.device import Device
from graphfuse.base.errors import GraphTypeError, GraphValidationError
from graphfuse.contract.engine import Engine
from graphfuse.contract.match import Region
from graphfuse.op_graph.ir import FrozenGraph
from graphfuse.planning import plan
from graphfuse.planning.engine_numbers import NumberedEngine, knob, knob_request, numbered, widest
from graphfuse.planning.plan import Plan
from graphfuse.planning.registry import Registry
from graphfuse.tuned_tables import store


class EngineLookup:
    """Engines for one lowered graph on one device. sound: returns the engines that can be used."""

    def __init__(
        self,
        graph: FrozenGraph,
        regions: Sequence[Region],
        device: Device,
        registry: Registry,
        sound: Callable[[], Sequence[Engine]],
    ):
        self._graph, self._regions, self._device = graph, regions, device
        self._registry, self._sound = registry, sound

    @cached_property
    def numbered(self) -> tuple[NumberedEngine, ...]:
        """Engines that can run a part of the graph. An engine's number is its place."""
        return numbered(self._graph, self._regions, self._sound(), self.proposals)

    def plan(self, engine: object, knobs: object) -> Plan:
        """The plan with an engine and its knobs, or with tuples of both. Errors as in ``create_execution_plan``."""
        several = isinstance(engine, tuple | list)
        named = tuple(engine) if several else (engine,)
        given = ((None,) * len(named) if several else None) if knobs is None else knobs
        values = given if several else (given,)
        lists = isinstance(values, tuple | list) and len(named) == len(values)
        if not lists or not all(v is None or isinstance(v, Mapping) for v in values):
            raise GraphTypeError(
                "create_execution_plan: give an engine's name or number and a dict of knobs, or tuples of both; "
                f"got {engine!r}, {knobs!r}"
            )
        chosen = [self._engine_and_kind(one) for one in named]
        requests = [knob_request(of, kind, dict(v or {})) for (of, kind), v in zip(chosen, values, strict=True)]
        engines = [of for of, _ in chosen]
        knobs_for = [partial(request.knobs, of, self.proposals) for of, request in zip(engines, requests, strict=True)]
        return plan.named(self._graph, self._regions, engines, self._device, knobs_for)

    def proposals(self, engine: Engine, region: Region) -> tuple[object, ...]:
        """Knobs that an engine proposes for a region, the tuned ones first."""
        tunings, mode = store.tunings([engine], self._device), widest(engine)
        parts = plan.parts_of(region, engine, self._device, mode, tunings, self._registry.origins, [])
        return tuple(part.knobs for part in parts)

    def knobs_of(self, engine: object) -> list[knob]:
        """Knobs of an engine that is given by its number, or by its name if it has only one number."""
        if not isinstance(engine, str):
            return self._of_number(engine).knobs
        found = {n: one for n, one in enumerate(self.numbered) if one.engine is self.named(engine)}
        if len(found) != 1:
            numbers = "; ".join(f"{n}: {one}" for n, one in found.items()) or "none, as it takes nothing of the graph"
            raise GraphValidationError(f"engine {engine!r} has the numbers {numbers}; give one of them")
        return next(iter(found.values())).knobs

    def _engine_and_kind(self, engine: object) -> tuple[Engine, type | None]:
        """An engine by its name or number, and the kind of its knobs, which a name leaves open (None)."""
        if not isinstance(engine, int) or isinstance(engine, bool):
            return self.named(engine), None
        found = self._of_number(engine)
        return found.engine, found.kind

    def _of_number(self, number: object) -> NumberedEngine:
        if isinstance(number, bool) or not isinstance(number, int):
            raise GraphTypeError(f"an engine is given by its name or its number, got {number!r}")
        if not 0 <= number < len(self.numbered):
            there = "; ".join(f"{n}: {one}" for n, one in enumerate(self.numbered))
            raise GraphValidationError(f"no engine has the number {number}; there are: {there}")
        return self.numbered[number]

    def named(self, name: object) -> Engine:
        """The engine with this name, even if it can run no part. Raises GraphValidationError if there is none."""
        for engine in self._registry.engines:
            if engine.name == name:
                return engine
        names = ", ".join(e.name for e in self._registry.engines)
        raise GraphValidationError(f"no engine is named {name!r}; there are: {names}")
