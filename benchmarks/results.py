"""What a record says, in the terms that targets, tables and plots ask in. Loads nothing but the record."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MB = 1e6

SIZES = ((0, 2 * MB), (2 * MB, 32 * MB), (32 * MB, 128 * MB), (128 * MB, 512 * MB), (512 * MB, math.inf))
"""Classes of problems by bytes moved, from and below."""


def size_text(low: float, high: float) -> str:
    if not low:
        return f"below {high / MB:.0f} MB"
    return f"{low / MB:.0f} MB and more" if math.isinf(high) else f"{low / MB:.0f} to {high / MB:.0f} MB"


@dataclass(frozen=True)
class Results:
    """A record of one bench. Cases are its dictionaries: the case's fields, "bytes" and "peers"."""

    record: dict

    @classmethod
    def read(cls, file: Path) -> "Results | None":
        """None if there is no such record."""
        return cls(json.loads(file.read_text())) if file.exists() else None

    @property
    def ours(self) -> str:
        return self.record["ours"]

    @property
    def stream(self) -> str:
        return self.record["stream"]

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case["output"] for case in self.record["cases"]))

    @property
    def peers(self) -> tuple[str, ...]:
        """All but ours and the stream limit, also those that were absent."""
        return tuple(name for name in self.record["peers"] if name not in (self.ours, self.stream))

    def title(self, peer: str) -> str:
        return self.record["peers"][peer]["title"]

    def cases(self, *outputs: str, size: tuple[float, float] = (0, math.inf)) -> list[dict]:
        """Cases with these outputs (all if none is given) whose moved bytes are in [low, high)."""
        low, high = size
        return [
            case
            for case in self.record["cases"]
            if (not outputs or case["output"] in outputs) and low <= case["bytes"] < high
        ]

    def us(self, case: dict, peer: str) -> float | None:
        """Median microseconds; None if the peer was absent or failed."""
        entry = case["peers"].get(peer, {})
        return entry["us"]["median"] if "us" in entry else None

    def ratio(self, case: dict, peer: str, to: str) -> float | None:
        """Time of `peer` over the time of `to`."""
        a, b = self.us(case, peer), self.us(case, to)
        return a / b if a and b else None

    def best_peer(self, case: dict, by: str = "") -> str | None:
        """The fastest of those that `by`, ours or another way of ours, is compared with; None if `by` was not run."""
        measured = [(us, peer) for peer in self.rivals(by) if (us := self.us(case, peer))]
        return min(measured)[1] if measured else None

    def rivals(self, by: str = "") -> tuple[str, ...]:
        """Those that `by`, ours or another way of ours, is compared with; none if `by` was not run."""
        about = self.record["peers"]
        if (by := by or self.ours) not in about:
            return ()
        ways = ("", about[by].get("way", ""))
        return tuple(p for p in self.peers if not about[p].get("own") and about[p].get("way", "") in ways)

    def ratios(self, cases: Iterable[dict], peer: str, to: str) -> list[tuple[float, dict]]:
        """The ratios there are, each with its case."""
        return [(ratio, case) for case in cases if (ratio := self.ratio(case, peer, to))]

    def absences(self, peer: str) -> dict[str, int]:
        """Why the peer was not measured -> in how many cases."""
        found: dict[str, int] = {}
        for case in self.record["cases"]:
            entry = case["peers"].get(peer, {"absent": "not asked for"})
            reason = entry.get("absent") or ("failed: " + entry["error"] if "error" in entry else None)
            if reason:
                found[reason] = found.get(reason, 0) + 1
        return found


def mean(ratios: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def name(case: dict) -> str:
    """A case in few characters."""
    fields = [str(v) for k, v in case.items() if k not in ("bytes", "peers", "output")]
    return f"{case['output']} {'x'.join(fields)}"
