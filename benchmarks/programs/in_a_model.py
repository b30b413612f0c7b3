"""What a norm costs between the matrix products of a model, ours beside its peers'.

    python -m graphfuse.benchmarks.programs.in_a_model [--record FOLDER] [--resume] [--rows N] [--columns N]
                                                       [--peers NAME] [--quick] [--seconds 4] [--least 30]
                                                       [--knobs COUNT]

A chain of 12 times [matrix product, residual add + RMSNorm, matrix product] is one CUDA graph for each peer, and one
without the norms. A round replays each of them once, or as often as makes some milliseconds. What a norm takes is the
difference to the chain without, round by round: the median counts, with the quartiles. --knobs tries other knobs of
our kernel in the chain instead, and records nothing.
"""

from __future__ import annotations

import functools
import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from graphfuse.benchmarks import command, session, tables, target
from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.peer import Peer
from graphfuse.benchmarks.peers import flashinfer, graphfuse, liger, quack, torch_compile, torch_eager
from graphfuse.benchmarks.programs import chain_knobs, products, turns
from graphfuse.benchmarks.programs.chain import LAYERS, ChainCase, sampler
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.results import Results, name
from graphfuse.benchmarks.untuned import untuned


def slowest_chain(limit: float, by: str = "", how: str = "") -> target.Target:
    """The chain with ours over the chain with each peer that it is compared with, at worst. by, how: as of
    target.slowest_against_best."""

    def figures(r: Results):
        return (
            (entry["ours_over"][by or r.ours], f"{name(case)}, {r.title(peer)}")
            for case in r.cases()
            for peer in r.rivals(by)
            if (by or r.ours) in (entry := case["peers"].get(peer, {})).get("ours_over", {})
        )

    return target.Target(f"bf16{how}: the whole chain's time over that with a peer, at worst", limit, False, figures)


def _targets(*way: str) -> tuple[target.Target, ...]:
    return (
        target.slowest_against_best(("bf16",), 1.03, *way),
        target.mean_against_best(("bf16",), 0.95, *way),
        slowest_chain(1.005, *way),
    )


BENCH = Bench(
    name="in-a-model",
    title="Residual add → RMSNorm between matrix products, bf16, in place",
    cases=tuple(ChainCase(r, c) for c, r in itertools.product((2048, 4096, 8192), (1, 16, 128, 512, 2048, 8192))),
    quick=(ChainCase(1, 4096), ChainCase(512, 4096), ChainCase(2048, 8192)),
    peers=(
        *graphfuse.IN_A_MODEL,
        liger.IN_A_MODEL,
        quack.IN_A_MODEL,
        *flashinfer.IN_A_MODEL,
        torch_compile.IN_A_MODEL,
        torch_eager.IN_A_MODEL,
        products.PEER,
    ),
    targets=_targets() + _targets(graphfuse.DEPENDENT.name, " with dependent launch"),
    stream=products.PEER.name,
)
"""Not one of `benches`: its protocol is its own, and there is no stream limit."""


def measure(
    case: ChainCase, peers: Sequence[Peer], arch: int, device: str, clock: session.Clock, least: int, seconds: float
) -> dict:
    """The record's entry of one case."""
    (chain,) = case.sets(1, device)
    ready, entries = session.prepare(case, [chain], peers, arch, device, functools.partial(sampler, chain, clock))
    taken = turns.take({name: sample for name, (sample, _) in ready.items()}, least, seconds)
    entries |= compared(taken, [p.name for p in peers if p.name == BENCH.ours or p.own])
    return {**vars(case), "bytes": case.moved, "peers": {peer.name: entries[peer.name] for peer in peers}}


def compared(taken: dict[str, list[float]], ours: Sequence[str]) -> dict[str, dict]:
    """Entries from the microseconds of the chains, round by round. ours: which of them are our ways."""
    without = taken.get(products.PEER.name)
    if without is None:  # nothing to be told apart from
        return {who: {"error": "the chain without norms was not measured"} for who in taken}
    entries: dict[str, dict] = {}
    for who, times in taken.items():
        if who == products.PEER.name:
            entries[who] = {"us": turns.quartiles([t / LAYERS for t in times])}
            continue
        us = turns.quartiles([(with_it - alone) / LAYERS for with_it, alone in zip(times, without, strict=True)])
        if us["median"] <= 0:
            entries[who] = {"error": f"lost in the noise: {us['median']} us, quartiles {us['low']} and {us['high']}"}
            continue
        over = {way: turns.ratio(taken[way], times) for way in ours if way in taken}
        entries[who] = {"us": us, "chain_us": turns.quartiles(times), "ours_over": over, "rounds": len(times)}
    return entries


def norms(r: Results) -> tables.Table:
    """What a norm takes, and how far the quartiles are from each other."""

    def cell(case: dict, peer: str) -> str:
        us = case["peers"].get(peer, {}).get("us")
        return "-" if us is None else f"{us['median']:.2f} ± {(us['high'] - us['low']) / 2:.2f}"

    shown = (r.stream, r.ours, *r.peers)
    return tables.Table(
        "microseconds of one norm: median ± half of the quartiles' distance",
        ("case", *(r.title(peer) for peer in shown)),
        [(name(case), *(cell(case, peer) for peer in shown)) for case in r.cases()],
    )


def chains(r: Results) -> tables.Table:
    """The whole chain with ours against each peer's."""

    def cell(case: dict, peer: str) -> str:
        ratio = case["peers"].get(peer, {}).get("ours_over", {}).get(r.ours)
        return "-" if ratio is None else f"{100 * (ratio - 1):+.2f} %"

    return tables.Table(
        "time of the whole chain with ours against that with a peer",
        ("case", *(r.title(peer) for peer in r.peers)),
        [(name(case), *(cell(case, peer) for peer in r.peers)) for case in r.cases()],
    )


def _line(r: Results, case: dict) -> str:
    found = ", ".join(f"{who} {us:.2f}" for who in (r.ours, *r.peers) if (us := r.us(case, who)))
    failed = [f"{who} failed: {entry['error']}" for who, entry in case["peers"].items() if "error" in entry]
    return ", ".join([f"{name(case)}: products {r.us(case, r.stream) or 0:.2f} us, {found}", *failed])


STUDY = Study(BENCH.name, __doc__, lambda r: (norms(r), chains(r)), BENCH.targets, read=Results)


def main() -> None:
    parser = STUDY.parser()
    parser.add_argument("--resume", action="store_true", help="keep what the record there already has")
    parser.add_argument("--rows", type=int, nargs="+", default=[])
    parser.add_argument("--columns", type=int, nargs="+", default=[])
    parser.add_argument("--peers", nargs="+", default=[], help="only these, beside ours and the matrix products")
    parser.add_argument("--quick", action="store_true", help="three of the sizes")
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds, for each size")
    parser.add_argument("--least", type=int, default=30, help="rounds for each size, whatever they take")
    parser.add_argument("--knobs", type=int, metavar="COUNT", help="try the model's COUNT first knobs, each with every "
                        "eviction, and record nothing")  # fmt: skip
    arguments = parser.parse_args()
    choice = command.Choice((), (*arguments.rows,), (*arguments.columns,), (*arguments.peers,), arguments.quick)
    if wrong := choice.unknown(BENCH):
        parser.error(wrong)
    STUDY.refuse(parser, arguments)
    if arguments.least < 2:
        parser.error(f"--least {arguments.least}: quartiles take two rounds or more")
    STUDY.need_gpu(parser)
    with untuned():
        if arguments.knobs is None:
            _run(parser, arguments, choice)
        else:
            for case in choice.cases(BENCH):
                print("\n".join(chain_knobs.lines(case, arguments.knobs, arguments.least, arguments.seconds)))
                session.release("cuda")


def _run(parser: ArgumentParser, arguments: Namespace, choice: command.Choice) -> None:
    from rich.console import Console

    from graphfuse.runtime import device, timing

    arch, peers = device.get("cuda").sm, choice.chosen_peers(BENCH)
    try:
        made = command.Making(BENCH, peers, arguments.record, arguments.resume, layers=LAYERS)
    except command.ResumeError as error:
        parser.exit(2, f"{error}\n")
    for case in made.left(choice.cases(BENCH)):
        entry = measure(case, peers, arch, "cuda", timing, arguments.least, arguments.seconds)
        session.release("cuda")
        print(_line(made.results, entry), flush=True)
        made.add(entry)
    console = Console(highlight=False, width=command.WIDTH)
    command.told(console, made.results, STUDY.shown(made.results.record))
    made.say_where(console)


if __name__ == "__main__":
    main()
