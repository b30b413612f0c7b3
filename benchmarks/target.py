"""What a bench is to reach, as data: a figure of the results and its limit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from graphfuse.benchmarks.results import Results, mean, name, size_text

Figure = Callable[[Results], tuple[float, str] | None]
"""A figure and the case it comes from ("" for a mean); None if nothing was measured that it needs. Records that are
none of a bench have figures of what they are read as."""
Which = Callable[[dict], bool]
"""Whether a case of a record counts."""


@dataclass(frozen=True)
class Target:
    text: str
    limit: float
    at_least: bool
    figure: Figure

    def verdict(self, results: Results) -> "Verdict":
        found = self.figure(results)
        if found is None:
            return Verdict(self, None, "", None)
        value, where = found
        return Verdict(self, value, where, value >= self.limit if self.at_least else value <= self.limit)


@dataclass(frozen=True)
class Verdict:
    target: Target
    value: float | None
    where: str
    met: bool | None


def _every(case: dict) -> bool:
    return True


def slowest_against_best(outputs: tuple[str, ...], limit: float, by: str = "", how: str = "") -> Target:
    """Ours over the best peer of the same case, at worst. by, how: another way of ours, and which, in words."""

    def figure(r: Results):
        found = [
            (ratio, name(case))
            for case in r.cases(*outputs)
            if (best := r.best_peer(case, by)) and (ratio := r.ratio(case, by or r.ours, best))
        ]
        return max(found, default=None)

    return Target(f"{_and(outputs)}{how}: time over the best peer's, at worst", limit, False, figure)


def mean_against_best(outputs: tuple[str, ...], limit: float, by: str = "", how: str = "") -> Target:
    """Ours over the best peer of the same case, geometric mean. by, how: as of slowest_against_best."""

    def figure(r: Results):
        found = [(case, best) for case in r.cases(*outputs) if (best := r.best_peer(case, by))]
        value = mean(ratio for case, best in found if (ratio := r.ratio(case, by or r.ours, best)))
        return None if value is None else (value, "")

    return Target(f"{_and(outputs)}{how}: time over the best peer's, geometric mean", limit, False, figure)


def mean_speedup(peer: str, title: str, outputs: tuple[str, ...], limit: float, which: Which = _every) -> Target:
    """A peer over ours, geometric mean over the cases that `which` says."""

    def figure(r: Results):
        value = mean(ratio for ratio, _ in r.ratios(filter(which, r.cases(*outputs)), peer, r.ours))
        return None if value is None else (value, "")

    return Target(f"{_and(outputs)}: speed-up over {title}, geometric mean", limit, True, figure)


def least_of_stream(output: str, low: float, high: float, limit: float, by: str = "", how: str = "") -> Target:
    """Fraction of the stream limit where low <= bytes moved < high, at worst. by, how: as of slowest_against_best."""
    return _least_of_stream(
        f"{output}{how}, {size_text(low, high)}", limit, by, lambda r: r.cases(output, size=(low, high))
    )


def least_of_stream_where(output: str, which: Which, where: str, limit: float) -> Target:
    """Fraction of the stream limit in the cases that `which` says, at worst. where: which these are, in words."""
    return _least_of_stream(f"{output}, {where}", limit, "", lambda r: filter(which, r.cases(output)))


def _least_of_stream(title: str, limit: float, by: str, cases: Callable[[Results], Iterable[dict]]) -> Target:
    def figure(r: Results):
        ratios = r.ratios(cases(r), r.stream, by or r.ours)
        return min(((ratio, name(case)) for ratio, case in ratios), default=None)

    return Target(f"{title}: fraction of the stream limit, at worst", limit, True, figure)


def slowest_against_stream(below: float, limit: float) -> Target:
    """Ours over an elementwise kernel on the same bytes, in tiny problems, at worst."""
    text = f"{size_text(0, below)}: time over an elementwise kernel's on the same bytes, at worst"
    return Target(text, limit, False, lambda r: _slowest(r, r.cases(size=(0, below)), r.stream))


def slowest_against(peer: str, title: str, outputs: tuple[str, ...], limit: float) -> Target:
    """Ours over one peer, which may be another way of ours, at worst."""
    text = f"{_and(outputs)}: time over {title}'s, at worst"
    return Target(text, limit, False, lambda r: _slowest(r, r.cases(*outputs), peer))


def _slowest(r: Results, cases: Iterable[dict], peer: str) -> tuple[float, str] | None:
    return max(((ratio, name(case)) for ratio, case in r.ratios(cases, r.ours, peer)), default=None)


def slowest_against_output(output: str, other: str, limit: float) -> Target:
    """Ours with one output over ours with another at the same size, at worst."""

    def size(case: dict) -> tuple:
        return tuple(v for k, v in case.items() if k not in ("output", "bytes", "peers"))

    def figure(r: Results):
        others = {size(case): r.us(case, r.ours) for case in r.cases(other)}
        found = [
            (us / its, name(case))
            for case in r.cases(output)
            if (us := r.us(case, r.ours)) and (its := others.get(size(case)))
        ]
        return max(found, default=None)

    return Target(f"{output}: time over {other} output's at the same size, at worst", limit, False, figure)


def _and(outputs: tuple[str, ...]) -> str:
    return " and ".join(outputs)
