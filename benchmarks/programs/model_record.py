"""What the record of models says: targets and tables. Loads nothing but the record."""

from __future__ import annotations

from collections.abc import Iterator

from graphfuse.benchmarks.programs.model_cases import MODELS, PREFILL, STEP, ModelCase, ModelWork
from graphfuse.benchmarks.programs.model_counts import KINDS, OTHER
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.tables import Table, spread
from graphfuse.benchmarks.target import Target

PAIRS = ((OURS_COMPILED, COMPILED), (OURS, EAGER))
"""A way of ours, and the way whose users would take it."""


def speed_up(case: dict, ours: str, over: str) -> float | None:
    """How many times as fast as another way one of ours is, as the median of the rounds' ratios; None if one of them
    was not measured."""
    ratio = case["peers"].get(over, {}).get("ours_over", {}).get(ours)
    return 1 / ratio if ratio else None


def slowest(work: ModelWork, ours: str, over: str, title: str, limit: float) -> Target:
    """The least speed-up of decoder layers."""

    def figures(r: Results) -> Iterator[tuple[float, str]]:
        for case in r.record["cases"]:
            decoder = case["work"] == work.name and MODELS[case["model"]].is_decoder
            if decoder and (ratio := speed_up(case, ours, over)):
                yield ratio, name(case)

    return Target(f"decoder layers, {work.name}: times as fast as {title}, at worst", limit, True, figures)


def of_model(model: str, ours: str, over: str, title: str, limit: float) -> Target:
    """The speed-up of one model in inference."""

    def figures(r: Results) -> Iterator[tuple[float, str]]:
        for case in r.record["cases"]:
            if (case["model"], case["work"]) == (model, PREFILL.name) and (ratio := speed_up(case, ours, over)):
                yield ratio, name(case)

    return Target(f"{MODELS[model].title}: times as fast as {title}", limit, True, figures)


TARGETS = (
    slowest(PREFILL, OURS_COMPILED, COMPILED, "torch.compile, with our backend", 1.05),
    slowest(PREFILL, OURS, EAGER, "eager, fused", 1.3),
    slowest(STEP, OURS_COMPILED, COMPILED, "torch.compile, with our backend", 1.05),
    slowest(STEP, OURS, EAGER, "eager, fused", 1.15),
    of_model("wan-dit", OURS_COMPILED, COMPILED, "torch.compile, with our backend", 1.2),
)


def name(case: dict) -> str:
    return str(ModelCase(**{field: value for field, value in case.items() if field != "peers"}))


def _named(case: dict) -> tuple[str, str]:
    return MODELS[case["model"]].title, f"{case['work']}, {case['layers']} layers, {case['size']}"


def times(r: Results) -> Table:
    """Every case: milliseconds of each way, and how many times as fast ours are."""

    def faster(case: dict, ours: str, over: str) -> str:
        ratio = speed_up(case, ours, over)
        return f"{ratio:.3f}×" if ratio else "-"

    return Table(
        "milliseconds: median (quartiles), and how many times as fast",
        ("model", "work", *(r.title(way) for way in r.record["peers"]), *(_over(r, *pair) for pair in PAIRS)),
        [
            (
                *_named(case),
                *(spread(case["peers"].get(way, {}).get("ms"), 3) for way in r.record["peers"]),
                *(faster(case, *pair) for pair in PAIRS),
            )
            for case in r.record["cases"]
        ],
        left=2,
    )


def _over(r: Results, ours: str, over: str) -> str:
    titles = r.record["peers"]
    return f"{titles.get(ours, {}).get('title', ours)} over {titles.get(over, {}).get('title', over)}"


def costs(r: Results) -> Table:
    """Every case: kernels of a call, the memory that it takes and how long the first one takes, each way; what was
    replaced."""

    def cell(case: dict, way: str) -> str:
        entry = case["peers"].get(way, {})
        said = [str(entry["kernels"])] if "kernels" in entry else []
        said += [f"{entry['peak_mb']:.0f} MB"] if "peak_mb" in entry else []
        said += [f"{entry['first_s']:.1f} s"] if "first_s" in entry else []
        return ", ".join(said) or "-"

    def replaced(case: dict, way: str) -> str:
        entry = case["peers"].get(way, {})
        said = ["{} of {}".format(*entry["sites"])] if "sites" in entry else []
        said += [f"{entry['our_kernels']} kernels"] if "our_kernels" in entry else []
        return ", ".join(said) or "-"

    ours = [way for way, about in r.record["peers"].items() if about.get("own")]
    return Table(
        "kernels and peak memory of a call, seconds to the first result; sites replaced, and kernels that are ours",
        ("model", "work", *(r.title(way) for way in r.record["peers"]), *(f"ours in: {r.title(way)}" for way in ours)),
        [
            (
                *_named(case),
                *(cell(case, way) for way in r.record["peers"]),
                *(replaced(case, way) for way in ours),
            )
            for case in r.record["cases"]
        ],
        left=2,
    )


def spent(r: Results) -> Table:
    """Every case: what each way spends its GPU time on, and how long the GPU is busy in all."""

    def cell(case: dict, way: str) -> str:
        by_kind = case["peers"].get(way, {}).get("gpu_ms")
        return f"{sum(by_kind.values()):.3f}: {', '.join(f'{ms:.3f}' for ms in by_kind.values())}" if by_kind else "-"

    return Table(
        f"milliseconds on the GPU in a call, all kernels: {', '.join((*KINDS, OTHER))}",
        ("model", "work", *(r.title(way) for way in r.record["peers"])),
        [(*_named(case), *(cell(case, way) for way in r.record["peers"])) for case in r.record["cases"]],
        left=2,
    )


def line(case: dict) -> str:
    """One case in one line."""

    def said() -> Iterator[str]:
        for way, entry in case["peers"].items():
            if "ms" in entry:
                yield f"{way} {entry['ms']['median']:.3f} ms"
            elif "error" in entry:
                yield f"{way} failed: {entry['error']}"

    reasons = {entry.get("absent") for entry in case["peers"].values()}
    return f"{name(case)}: {', '.join(said()) or ', '.join(map(str, reasons))}"
