"""Norms, softmax and losses with what stands around them: torch.compile, and torch.compile with our backend.

    python -m graphfuse.benchmarks.programs.followers [--record FOLDER] [--resume] [--only NAME ...] [--ways NAME ...]
                                          [--rounds 15] [--quick] [--list] [--json]

Functions of rows as models write them (`follower_cases`), at three sizes, forward and with their backward: eager,
compiled by inductor, and by inductor behind our backend, which replaces what it finds. A call is in a CUDA graph, on
rotating buffers, so that the L2 is cold; all ways in turns. Each is compared with float32 before it is timed: one that
is farther from it than eager is reported and not timed. `graphfuse bench followers` is this program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.programs import follower_cases
from graphfuse.benchmarks.programs.follower_cases import BOTH, FORWARD, FUNCTIONS, TIMING_SECONDS, FollowerCase
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED, WAYS, Way
from graphfuse.benchmarks.programs.program import Program
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.tables import Table, spread
from graphfuse.benchmarks.target import Target, averaged


def measured(case: FollowerCase, ways: Sequence[Way], device: str, rounds: int) -> dict:
    """The record's entry of one case."""
    from graphfuse.benchmarks.programs import follower_session

    return follower_session.measure(case, ways, device, rounds)


def name(entry: dict) -> str:
    return str(FollowerCase(**{field: value for field, value in entry.items() if field != "peers"}))


def _over(entry: dict) -> dict[str, float] | None:
    """The time of our backend over torch.compile's; None where one of them was not measured."""
    return entry["peers"].get(COMPILED, {}).get("ours_over", {}).get(OURS_COMPILED)


def ratios(r: Results, work: str) -> Iterator[tuple[float, str]]:
    """Inductor's time over ours, as the median of the rounds' ratios, and the case."""
    for entry in r.record["cases"]:
        found = _over(entry)
        if found and entry["work"] == work:
            yield 1 / found["median"], name(entry)


def slowest(work: str, limit: float) -> Target:
    text = f"{work}: time over torch.compile's, at worst"
    return Target(text, limit, False, lambda r: ((1 / ratio, where) for ratio, where in ratios(r, work)))


def average(work: str, limit: float) -> Target:
    text = f"{work}: times as fast as torch.compile, geometric mean"
    return Target(text, limit, True, lambda r: averaged(ratios(r, work)))


def times(work: str) -> Callable[[Results], Table]:
    """A table of every case with this work."""

    def became(entry: dict) -> str:
        ours = entry["peers"].get(OURS_COMPILED, {})
        return ", ".join(ours.get("became", ())) or "; ".join(ours.get("left", ())) or "-"

    def table(r: Results) -> Table:
        titles = r.record["peers"]
        return Table(
            f"{work}, microseconds: median (quartiles), and the time of our backend over torch.compile's",
            (
                "function",
                "rows",
                *(r.title(way) for way in titles),
                "over torch.compile",
                "replaced by, or left because",
            ),
            [
                (
                    FUNCTIONS[entry["function"]].title,
                    str(entry["rows"]),
                    *(spread(entry["peers"].get(way, {}).get("us"), 1) for way in titles),
                    spread(_over(entry), 3),
                    became(entry),
                )
                for entry in r.record["cases"]
                if entry["work"] == work
            ],
        )

    return table


def line(entry: dict) -> str:
    """One case in one line."""
    said = [
        f"{way} {one['us']['median']:.2f} us" if "us" in one else f"{way} failed: {one.get('error', one.get('absent'))}"
        for way, one in entry["peers"].items()
    ]
    if over := _over(entry):
        said.append(f"ours over torch.compile {over['median']:.3f}")
    return f"{name(entry)}: {', '.join(said)}"


TARGETS = (slowest(FORWARD, 1.02), slowest(BOTH, 1.02), average(FORWARD, 1.35), average(BOTH, 1.25))

BENCH = Bench(
    name="followers",
    title="What stands around norms, compiled",
    cases=follower_cases.CASES,
    quick=follower_cases.QUICK,
    peers=tuple(way for way in WAYS if way.name != OURS),
    targets=TARGETS,
    ours=OURS_COMPILED,
    stream=EAGER,
)
"""What is compared with is torch.compile alone."""

PROGRAM = Program(
    bench=BENCH,
    about=__doc__,
    measure=measured,
    group=lambda case: case.function,
    name=name,
    titled=lambda case: f"{FUNCTIONS[case.function].title}, {case.work}, {case.rows} x {case.columns}",
    line=line,
    tables=(times(FORWARD), times(BOTH)),
    longest=lambda ways: TIMING_SECONDS + sum(way.seconds for way in ways),
    rounds=15,
    quick_rounds=8,
    quick_cases=f"{follower_cases.ROWS[1]} rows, forward",
    distributions=("torch", "triton"),
)
main = PROGRAM.main

if __name__ == "__main__":
    main()
