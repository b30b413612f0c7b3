"""Conditions that exclude plans: what the user deselected, and plug-ins that failed."""

import dataclasses
from collections.abc import Mapping

from graphfuse.base.enums import behavior_note, numerical_note
from graphfuse.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class Deselection:
    """Conditions that exclude plans.

    engines: names of engines that the user deselected. failed: why plug-ins are not used, by the engine's name.
    workspace: bytes that plans may need at most. notes: each with True if plans must have it, False if they must not.
    """

    engines: frozenset[str] = frozenset()
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace: int | None = None
    notes: tuple[tuple[behavior_note | numerical_note, bool], ...] = ()

    def against(self, p: Plan) -> str | None:
        """Why a plan is excluded; None if it is not."""
        for part in p.parts:
            if part.engine.name in self.engines:
                return f"engine {part.engine.name!r} is deselected"
            if part.engine.name in self.failed:
                return self.failed[part.engine.name]
        for note, wanted in self.notes:
            if (note in p.behavior_notes | p.numerical_notes) != wanted:
                return f"it lacks {note}, which is selected" if wanted else f"it has {note}, which is deselected"
        if self.workspace is not None and p.workspace_bytes > self.workspace:
            return f"it needs {p.workspace_bytes} bytes of workspace, more than the limit of {self.workspace}"
        return None
