"""Problems that engines accept, found by planning one case for one device."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.base.device import Device
from graphfuse.contract.engine import Engine
from graphfuse.planning import plan
from graphfuse.planning.engine_numbers import widest
from graphfuse.planning.plan import Part
from graphfuse.testing.subject import REFERENCE, Subject
from graphfuse.testing.variants import CheckCase


@dataclass(frozen=True)
class AcceptedCase:
    """A case with the part of its plan that the engine under test runs."""

    case: CheckCase
    part: Part
    device: Device

    @property
    def engine(self) -> Engine:
        return self.part.engine

    @property
    def name(self) -> str:
        return f"{self.case.name} by {self.part.name}"

    @property
    def elements(self) -> int:
        return max(t.span for t in self.case.graph.tensors)


def accepted_cases(subject: Subject, case: CheckCase, device: Device, declined: Counter) -> Iterator[AcceptedCase]:
    """Parts that each engine accepts, with the knobs that it proposes first and with other proposed knobs. declined:
    counts the reasons of engines that accept nothing of the case. Raises PluginError as planning does."""
    regions, without_facts = plan.matches(case.graph, subject.registry)
    declined.update(f"pattern {d.pattern}: {d.why}" for d in without_facts)
    reference = [e for e in subject.registry.engines if e.name == REFERENCE]
    for engine in subject.engines:
        if engine.emulated and device.kind == "cpu":
            continue  # kernels run on the emulator
        others = [e for e in reference if e is not engine]
        proposal = plan.propose(case.graph, regions, [engine, *others], device, widest(engine))
        parts = dict.fromkeys(part for p in proposal.plans for part in p.parts if part.engine is engine)
        if not parts:
            reasons = [
                f"{v.engine}: {_without_extents(str(v.why))}"
                for v in proposal.verdicts
                if v.why and v.engine != REFERENCE
            ]
            declined.update(dict.fromkeys(reasons or [f"{engine.name}: no pattern of its facts matches"], 1))
        first, *rest = [*parts] or [None]
        for part in (first, random.Random(case.name).choice(rest) if rest else None):
            if part is not None:
                yield AcceptedCase(case, part, device)


def _without_extents(reason: str) -> str:
    """A reason without the extents and strides of a case, so that equal reasons are counted together."""
    return re.sub(r"\[[\d, ]*\]", "[..]", reason)
