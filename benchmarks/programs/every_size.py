"""How near sizes that no table has come to the stream limit, and rows of any length to rows of whole vectors.

    python -m graphfuse.benchmarks.programs.every_size [named random lengths] [--sizes 60] [--seed N] [--search]
                                              [--time-budget 500] [--record FOLDER]

Tables are left aside. Of each size, our kernel with the knobs of each ranking and the stream limit of its bytes are
timed in turns. named: sizes that were far from it. random: three outputs in turns, most with columns of any number.
lengths: columns 1 to 7 below a multiple of 8, and that multiple. --search: the best of all usual knobs beside them, to
fit the model to.

Rankings are the engine's model of cost, and those that are tried against it.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphfuse.base.device import Device
from graphfuse.base.enums import heur_mode
from graphfuse.benchmarks import sizes, tables
from graphfuse.benchmarks.peers import stream
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.sizes import Size
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.engines.rows.by_row.cost import cost as model
from graphfuse.engines.rows.by_row.cost import is_usual
from graphfuse.engines.rows.by_row.knobs import ByRowKnobs
from graphfuse.engines.rows.by_row.split import ByRowSplit
from graphfuse.patterns.rows import RowFacts
from graphfuse.planning.plan import Part

STUDY = Study("every-size", __doc__)
NAMED = (
    Size(343, 18416, "fp8_e4m3"),
    Size(861, 18025, "fp8_e4m3"),
    Size(352, 10065, "fp8_e4m3"),
    Size(13762, 19505, "fp8_e4m3"),
    Size(62, 9733, "fp8_e4m3"),
    Size(14211, 3539, "fp8_e4m3"),
    Size(23582, 11383, "bf16"),
    Size(24254, 59, "bf16"),
    Size(1, 6880, "bf16"),
)
LARGE, MEDIUM = 32 << 20, 8 << 20
MOST_STREAM, MOST_SMALL, MOST_LENGTHS = 1.25, 1.6, 1.15
"""Targets: of the stream limit from MEDIUM bytes on and below; of the next multiple of 8 from LARGE bytes on."""
SEED = 20261122
_ELSEWHERE = 32  # registers of a thread beside those that hold a row
_REGISTERS, _THREADS, _CTAS = 65536, 2048, 32  # of an SM

Ranking = Callable[[ByRowSplit, ByRowKnobs, Device], float]


def cost(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> float:
    return model(split, device)(knobs)


def resident(split: ByRowSplit, knobs: ByRowKnobs) -> int:
    """CTAs that an SM has room for, by an estimate of their registers."""
    held = split.held(split.steps(knobs), knobs, split.registers + (split.later if knobs.ahead else 0))
    return max(1, min(_REGISTERS // (knobs.threads * (_ELSEWHERE + held)), _THREADS // knobs.threads, _CTAS))


def ctas(facts: RowFacts, knobs: ByRowKnobs) -> int:
    return -(-facts.rows * knobs.threads_per_row // knobs.threads)


def by_waves(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> float:
    """The model, and for each wave of CTAs behind the first what an idle device takes, as far as no other CTA of the SM
    hides it."""
    there = resident(split, knobs)
    waves = math.ceil(ctas(split.facts, knobs) / (device.sm_count * there))
    return cost(split, knobs, device) + (waves - 1) / there * _alone(split, knobs, device)


def balanced(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> float:
    """The model, for the SM that has most: no SM has a part of a CTA."""
    alone = _alone(split, knobs, device)
    all_sms = ctas(split.facts, knobs) / device.sm_count
    return alone + (cost(split, knobs, device) - alone) * math.ceil(all_sms) / all_sms


def balanced_waves(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> float:
    return by_waves(split, knobs, device) + balanced(split, knobs, device) - cost(split, knobs, device)


def _alone(split: ByRowSplit, knobs: ByRowKnobs, device: Device) -> float:
    """The model's part that does not grow with rows."""
    few, many = (replace(split, facts=replace(split.facts, row_extents=(rows,))) for rows in (1, 2))
    one, two = (cost(s, knobs, device) for s in (few, many))
    return 2 * one - two


RANKINGS: dict[str, Ranking] = {
    "engine": cost,
    "waves": by_waves,
    "balanced": balanced,
    "balanced waves": balanced_waves,
}


def random_sizes(count: int, seed: int = SEED) -> tuple[Size, ...]:
    """Log-uniform: rows 1 to 100,000, columns 32 to 20,000 of any number, for NVFP4 multiples of 16; no more than
    1 GiB moves."""
    source, tuned, found = random.Random(seed), set(sizes.seeds()), []
    while len(found) < count:
        output = tuple(sizes.OUTPUTS)[len(found) % 3]
        columns = round(2 ** source.uniform(5, math.log2(20000)))
        columns = max(1, columns // sizes.BLOCK) * sizes.BLOCK if output == "nvfp4" else columns
        size = Size(1, columns, output)
        size = Size(max(1, min(round(10 ** source.uniform(0, 5)), (1 << 30) // size.row_bytes)), columns, output)
        if size not in tuned and size not in found:
            found.append(size)
    return tuple(found)


def lengths() -> Iterator[tuple[Size, Size]]:
    """Rows of any length, and of the next multiple of 8, from LARGE bytes on."""
    for output in ("bf16", "fp8_e4m3"):
        for multiple in (64, 256, 1024, 2048, 4096, 5120, 8192, 12288, 16384):
            for less in (1, 2, 4, 7):
                rows = -(-2 * LARGE // Size(1, multiple, output).row_bytes)
                yield Size(rows, multiple - less, output), Size(rows, multiple, output)


@dataclass(frozen=True)
class Measured:
    """Microseconds: of the stream limit, and of our kernel by what chose its knobs, which are beside."""

    size: Size
    stream: float
    us: dict[str, float]
    knobs: dict[str, dict[str, object]]

    def ratio(self, ranking: str = "engine") -> float:
        return self.us[ranking] / self.stream

    @property
    def target(self) -> float:
        return MOST_STREAM if self.size.moved >= MEDIUM else MOST_SMALL

    def __str__(self) -> str:
        found = "  ".join(f"{name} {us:.2f} us x {us / self.stream:.3f}" for name, us in self.us.items())
        fast = min(self.us, key=self.us.get)
        words = " ".join(f"{k}={v}" for k, v in self.knobs[fast].items())
        missed = "  MISSED" if self.ratio() > self.target else ""
        size = f"{self.size!s:24} {self.size.moved / 1e6:8.2f} MB  stream {self.stream:8.2f} us"
        return f"{size}  {found}  ({fast}: {words}){missed}"


def chosen(part: Part, device: Device) -> dict[str, ByRowKnobs]:
    """The knobs that each ranking puts first, of those that the engine proposes."""
    facts, split = part.facts, ByRowSplit.of(part.facts)
    proposed = part.engine.propose(facts, device, heur_mode.B)
    first = part.engine.propose(facts, device, heur_mode.A)[0]
    made = {"engine": first}
    for name, ranking in RANKINGS.items():
        if name != "engine":
            made[name] = min(usual(proposed), key=lambda k: ranking(split, k, device))
    return made


def usual(proposed: Sequence[ByRowKnobs]) -> list[ByRowKnobs]:
    """Those that the engine ranks itself."""
    return [knobs for knobs in proposed if isinstance(knobs, ByRowKnobs) and is_usual(knobs)]


def measure(size: Size, search: bool) -> Measured:
    """On the current device, everything in turns."""
    import torch

    from graphfuse.planning.kernels import prepare
    from graphfuse.runtime import timing
    from graphfuse.tuning.workbench import Workbench, reference

    planner = size.planner()
    plan, device = planner.plans[0], planner.device
    (part,) = plan.parts
    with torch.cuda.device(device.ordinal):
        tensors = size.tensors(device.memory)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device.memory)
        bound = planner.binder(plan).bind(tensors, workspace)
        bench = Workbench(part, device, reference(plan, device, bound), bound.scalars)
        sets = [Buffers(tensors["x"])] * timing.buffer_sets(size.moved)

        def calls(knobs: ByRowKnobs):
            made = bench.calls(prepare(Part(part.region, part.engine, knobs), device))
            wrong = bench.check(made)
            if wrong is not None:
                raise SystemExit(f"{size}: {knobs} is wrong: {wrong}")
            return made

        by_name = chosen(part, device)
        if search:
            tried = usual(part.engine.propose(part.facts, device, heur_mode.B))
            by_name["best"] = min(tried, key=lambda k: timing.measure(calls(k), 1, 1000.0).median)
        distinct = list(dict.fromkeys(by_name.values()))
        captured = [timing.capture(calls(k)) for k in distinct]
        captured.append(timing.capture(stream.PEER.make(size, sets).calls))
        *ours, limit = (t.median for t in timing.compare(captured))
        taken = dict(zip(distinct, ours, strict=True))
    us = {name: taken[k] for name, k in by_name.items()}
    return Measured(size, limit, us, {name: knobs_to_dict(k) for name, k in by_name.items()})


@dataclass(frozen=True)
class Buffers:
    """What the stream limit asks of a buffer set."""

    x: object


def summary(found: Sequence[Measured]) -> list[str]:
    """The worst and the median ratio to the stream limit, by bytes and ranking."""
    lines = []
    for words, large in ((f"from {MEDIUM >> 20} MB", True), ("below", False)):
        some = [m for m in found if (m.size.moved >= MEDIUM) is large]
        for name in some[0].us if some else ():
            ratios = sorted(m.ratio(name) for m in some)
            target = MOST_STREAM if large else MOST_SMALL
            over = sum(r > target for r in ratios)
            lines.append(
                f"{words:12} {name:15} {len(some):3} sizes: median {statistics.median(ratios):.3f}, "
                f"worst {ratios[-1]:.3f}, {over} above {target}"
            )
    return lines


def of_lengths(record: dict) -> tables.Table:
    """How much longer rows take than those of the next multiple of 8, by how many columns are missing."""
    us = {result["size"]: result["us"]["engine"] for result in record["results"]}
    found: dict[int, list[float]] = {}
    for odd, even in lengths():
        if str(odd) in us and str(even) in us:
            found.setdefault(even.columns - odd.columns, []).append(us[str(odd)] / us[str(even)])
    return tables.Table(
        "time over that of rows of the next multiple of 8 columns",
        ("columns less", "sizes", "median", "least", "most"),
        [
            (str(less), str(len(r)), *(f"{n:.2f}" for n in (statistics.median(r), min(r), max(r))))
            for less, r in sorted(found.items())
        ],
    )


def main() -> None:
    parser = STUDY.parser()
    parser.add_argument("what", nargs="*", metavar="WHAT", help="named, random, lengths; all of them if none")
    parser.add_argument("--sizes", type=int, default=60, metavar="COUNT", help="of the random ones")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--search", action="store_true", help="the best of all usual knobs, too")
    parser.add_argument("--time-budget", type=float, default=500.0, metavar="SECONDS")
    arguments = parser.parse_args()
    wanted = arguments.what or ["named", "random", "lengths"]
    if unknown := sorted(set(wanted) - {"named", "random", "lengths"}):
        parser.error(f"unknown: {', '.join(unknown)}; there are: named, random, lengths")
    STUDY.need_gpu(parser)
    import torch

    deadline = time.monotonic() + arguments.time_budget
    found: dict[Size, Measured] = {}

    def one(size: Size) -> Measured | None:
        if size not in found and time.monotonic() < deadline:
            found[size] = measure(size, arguments.search)
            print(found[size], flush=True)
            torch.cuda.empty_cache()
        return found.get(size)

    for group, these in (("named", NAMED), ("random", random_sizes(arguments.sizes, arguments.seed))):
        if group in wanted:
            done = [m for m in map(one, these) if m is not None]
            print(f"{group}: {len(done)} of {len(these)} sizes", *summary(done), sep="\n  ")
    pairs = []
    if "lengths" in wanted:
        for odd, even in lengths():
            both = one(odd), one(even)
            if None not in both:
                pairs.append((both[0].us["engine"] / both[1].us["engine"], odd, even))
                missed = "  MISSED" if pairs[-1][0] > MOST_LENGTHS else ""
                print(f"  {odd} takes {pairs[-1][0]:.3f} of {even}{missed}", flush=True)
        worst = max(pairs, default=(0.0, None, None))
        print(f"lengths: {len(pairs)} pairs, worst {worst[0]:.3f}: {worst[1]}")
    if arguments.record:
        results = [
            {"size": str(m.size), "bytes": m.size.moved, "stream us": m.stream, "us": m.us, "knobs": m.knobs}
            for m in found.values()
        ]
        print(STUDY.write(arguments.record, {"seed": arguments.seed, "results": results}))


if __name__ == "__main__":
    main()
