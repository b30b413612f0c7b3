"""Plans that the user does not want, or that a failed plug-in would have to run."""

import dataclasses
from collections.abc import Mapping

from graphfuse.base.enums import behavior_note, numerical_note
from graphfuse.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class Deselected:
    """Parts that are deselected: by the user, and because a plug-in failed.

    engines: names of those that the user deselected. failed: why engines are left out, by name. workspace: bytes that
    plans may need at most. notes: each with whether plans must have it, or must not.
    """

    engines: frozenset[str] = frozenset()
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace: int | None = None
    notes: tuple[tuple[behavior_note | numerical_note, bool], ...] = ()

    def against(self, p: Plan) -> str | None:
        """Why a plan is not wanted, or None."""
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
