"""The result of a check, as data that prints as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphfuse.base.errors import CheckFailedError
from graphfuse.base.wording import in_columns

_SHOWN = 8  # number of findings and reasons that are printed in full


@dataclass(frozen=True)
class Finding:
    """One mistake. case: description of the problem, with sizes, types and layouts."""

    stage: str
    case: str
    what: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.case}\n    " + self.what.strip().replace("\n", "\n    ")


@dataclass(frozen=True)
class Line:
    """One stage. passed, failed: numbers of problems. note: what was omitted, and why."""

    stage: str
    passed: int
    failed: int
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The result of a check, which prints as a table. It is true if nothing is wrong. subject: what was checked.
    declined: how often engines gave each reason to decline, which is not a mistake."""

    subject: str
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...] = ()
    declined: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [("stage", "passed", "failed", ""), *((o.stage, o.passed, o.failed, o.note) for o in self.lines)]
        text = [f"{self.subject}: {'passed' if self.ok else 'FAILED'}", *in_columns(rows, right=(1, 2))]
        text += [str(finding) for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            text.append(f"and {len(self.findings) - _SHOWN} more")
        reasons = sorted(self.declined.items(), key=lambda item: -item[1])[:_SHOWN]
        text += [f"declined {count} times: {reason}" for reason, count in reasons]
        return "\n".join(text)

    def raise_for_findings(self) -> None:
        """Raises CheckFailedError with this report if something is wrong."""
        if self.findings:
            error = CheckFailedError(str(self))
            error.report = self
            raise error
