"""What `tensor_parallel` measures, what its record has, as tables, and what it is to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphfuse.benchmarks.programs.model_cases import DECODE, MODELS, PREFILL, Decoder
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED, WAYS
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.tables import Table, spread
from graphfuse.benchmarks.target import Target


@dataclass(frozen=True)
class SplitCase:
    """Decoder layers at a work, split over ranks. shape: sequences and tokens of the input."""

    model: Decoder
    work: str
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.model.name}/{self.work}-{'x'.join(map(str, self.shape))}"


def _cases(name: str, sequences: tuple[int, ...]) -> tuple[SplitCase, ...]:
    model = MODELS[name]
    assert isinstance(model, Decoder)
    decoded = (SplitCase(model, DECODE.name, (n, 1)) for n in sequences)
    return *decoded, SplitCase(model, PREFILL.name, (1, 4096))


CASES = (*_cases("llama-3-8b", (1, 8, 32, 128)), *_cases("qwen3-8b", (1, 32, 128)))
_TITLES = {way.name: way.title for way in WAYS}


def _times_as_fast(work: str, ours: str, theirs: str):
    def figures(record: dict) -> Iterator[tuple[float, str]]:
        for one in record["cases"]:
            if f"/{work}" in one["case"] and (ratio := _ratio(one["ways"], theirs, ours)):
                yield ratio, one["case"]

    return figures


TARGETS = (
    Target(
        "decode: times as fast as torch.compile, with our backend, at worst",
        1.15,
        True,
        _times_as_fast(DECODE.name, OURS_COMPILED, COMPILED),
    ),
    Target(
        "prefill: times as fast as torch.compile, with our backend, at worst",
        1.0,
        True,
        _times_as_fast(PREFILL.name, OURS_COMPILED, COMPILED),
    ),
    Target("decode: times as fast as eager, fused, at worst", 1.0, True, _times_as_fast(DECODE.name, OURS, EAGER)),
)


def table(record: dict) -> Table:
    """Milliseconds of each way, or the error of one that failed, and how many times as fast ours are."""
    rows = []
    for one in record["cases"]:
        ways = one["ways"]
        times = [_time(ways.get(name, {})) for name in _TITLES]
        faster = [_faster(ways, COMPILED, OURS_COMPILED), _faster(ways, EAGER, OURS)]
        rows.append((one["case"], *times, *faster))
    title = f"milliseconds of {record['ranks']} GPUs, the slowest: median (quartiles), and how many times as fast"
    over = f"{_TITLES[OURS_COMPILED]} over {_TITLES[COMPILED]}", f"{_TITLES[OURS]} over {_TITLES[EAGER]}"
    return Table(title, ("", *_TITLES.values(), *over), rows)


def _time(way: dict) -> str:
    return way["error"] if "error" in way else spread(way.get("ms"), 3)


def _faster(ways: dict[str, dict], theirs: str, ours: str) -> str:
    ratio = _ratio(ways, theirs, ours)
    return f"{ratio:.3f}×" if ratio else "-"


def _ratio(ways: dict[str, dict], theirs: str, ours: str) -> float | None:
    """How many times as fast ours is; None if one of both was not measured."""
    medians = [ways[name]["ms"]["median"] for name in (theirs, ours) if "ms" in ways.get(name, {})]
    return medians[0] / medians[1] if len(medians) == 2 else None


STUDY = Study("tensor-parallel", tables=lambda record: (table(record),), targets=TARGETS)
