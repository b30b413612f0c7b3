"""What a bench is to reach, as data: figures of the results and their limit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from graphfuse.benchmarks.results import Results, mean, name, size_text

Figures = Callable[[Any], Iterable[tuple[float, str]]]
"""Figures, each with the case it comes from ("" for a mean), as far as what they need was measured. Records that are
none of a bench have figures of what they are read as."""
Which = Callable[[dict], bool]
"""Whether a case of a record counts."""


@dataclass(frozen=True)
class Target:
    """What the worst of some figures is to reach."""

    text: str
    limit: float
    at_least: bool
    figures: Figures

    def verdict(self, results: Results) -> "Verdict":
        worst = min if self.at_least else max
        value, where = worst(self.figures(results), default=(None, ""))
        met = None if value is None else value >= self.limit if self.at_least else value <= self.limit
        return Verdict(self, value, where, met)


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

    text = f"{_and(outputs)}{how}: time over the best peer's, at worst"
    return Target(text, limit, False, lambda r: _over_best(r, outputs, by))


def mean_against_best(outputs: tuple[str, ...], limit: float, by: str = "", how: str = "") -> Target:
    """Ours over the best peer of the same case, geometric mean. by, how: as of slowest_against_best."""

    text = f"{_and(outputs)}{how}: time over the best peer's, geometric mean"
    return Target(text, limit, False, lambda r: averaged(_over_best(r, outputs, by)))


def _over_best(r: Results, outputs: tuple[str, ...], by: str) -> Iterator[tuple[float, str]]:
    for case in r.cases(*outputs):
        if (best := r.best_peer(case, by)) and (ratio := r.ratio(case, by or r.ours, best)):
            yield ratio, name(case)


def averaged(figures: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Their geometric mean, if there is any."""
    value = mean(figure for figure, _ in figures)
    return [] if value is None else [(value, "")]


def mean_speedup(peer: str, title: str, outputs: tuple[str, ...], limit: float, which: Which = _every) -> Target:
    """A peer over ours, geometric mean over the cases that `which` says."""

    text = f"{_and(outputs)}: speed-up over {title}, geometric mean"
    return Target(text, limit, True, lambda r: averaged(_ratios(r, filter(which, r.cases(*outputs)), peer, r.ours)))


def least_of_stream(output: str, low: float, high: float, limit: float, by: str = "", how: str = "") -> Target:
    """Fraction of the stream limit where low <= bytes moved < high, at worst. by, how: as of slowest_against_best."""
    return _least_of_stream(
        f"{output}{how}, {size_text(low, high)}", limit, by, lambda r: r.cases(output, size=(low, high))
    )


def least_of_stream_where(output: str, which: Which, where: str, limit: float) -> Target:
    """Fraction of the stream limit in the cases that `which` says, at worst. where: which these are, in words."""
    return _least_of_stream(f"{output}, {where}", limit, "", lambda r: filter(which, r.cases(output)))


def _least_of_stream(title: str, limit: float, by: str, cases: Callable[[Results], Iterable[dict]]) -> Target:
    text = f"{title}: fraction of the stream limit, at worst"
    return Target(text, limit, True, lambda r: _ratios(r, cases(r), r.stream, by or r.ours))


def slowest_against_stream(below: float, limit: float) -> Target:
    """Ours over an elementwise kernel on the same bytes, in tiny problems, at worst."""
    text = f"{size_text(0, below)}: time over an elementwise kernel's on the same bytes, at worst"
    return Target(text, limit, False, lambda r: _ratios(r, r.cases(size=(0, below)), r.ours, r.stream))


def slowest_against(peer: str, title: str, outputs: tuple[str, ...], limit: float) -> Target:
    """Ours over one peer, which may be another way of ours, at worst."""
    text = f"{_and(outputs)}: time over {title}'s, at worst"
    return Target(text, limit, False, lambda r: _ratios(r, r.cases(*outputs), r.ours, peer))


def _ratios(r: Results, cases: Iterable[dict], peer: str, to: str) -> Iterator[tuple[float, str]]:
    return ((ratio, name(case)) for ratio, case in r.ratios(cases, peer, to))


def slowest_against_output(output: str, other: str, limit: float) -> Target:
    """Ours with one output over ours with another at the same size, at worst."""

    def size(case: dict) -> tuple:
        return tuple(v for k, v in case.items() if k not in ("output", "bytes", "peers"))

    def figures(r: Results):
        others = {size(case): r.us(case, r.ours) for case in r.cases(other)}
        for case in r.cases(output):
            if (us := r.us(case, r.ours)) and (its := others.get(size(case))):
                yield us / its, name(case)

    return Target(f"{output}: time over {other} output's at the same size, at worst", limit, False, figures)


def _and(outputs: tuple[str, ...]) -> str:
    return " and ".join(outputs)
