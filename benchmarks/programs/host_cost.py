"""What one call costs the host: wall time of calls on tiny problems, ours beside a bare driver launch and peers.

    python -m graphfuse.benchmarks.programs.host_cost [--record FOLDER] [--only TEXT ...] [--sets 1,16,256,2000]
                                             [--parts addresses rows memory] [--rounds 60] [--quick]

addresses: each call works on the next of k address sets, as in a model, where no two calls have the same buffers. A
sample is 200 calls, 60 of those with backward. All take turns in rounds, each in an order of its own. Shown are the
median and quartiles of the rounds, and ratios, which are medians of the rounds' ratios: a host is faster at some times
than at others. A bare launch is one from Python of the same kernel with prepacked arguments. rows: one row count again
and again against 4,096 in random order, and row counts never seen before against those seen. memory: what a hundred
thousand calls leave behind. What cannot run here is listed as absent, with the reason. Where only some of it is
measured, the record is host-cost-part-DEVICE.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from graphfuse.benchmarks import session
from graphfuse.benchmarks.programs import host_calls, host_record, row_counts, turns
from graphfuse.benchmarks.programs.host_calls import Call, Sets
from graphfuse.benchmarks.programs.host_peers import PEERS
from graphfuse.benchmarks.programs.host_record import BARE
from graphfuse.benchmarks.untuned import untuned

CALLS, WITH_BACKWARD = 200, 60
"""Calls of a sample; fewer of what takes long."""
ROUNDS, QUICK_ROUNDS = 60, 5
UNSEEN = 500
PARTS = ("addresses", "rows", "memory")
STUDY = replace(
    host_record.STUDY,
    about=__doc__,
    distributions=("quack-kernels", "flashinfer-python", "liger-kernel", "triton", "nvidia-cudnn-frontend"),
    rounds=ROUNDS,
)

Wait = Callable[[], None]


def measured(
    counts: Sequence[int], only: Sequence[str], rounds: int, device: str, wait: Wait
) -> dict[int, dict[str, dict]]:
    """Rows by the number of address sets and name: {"us", "ratio", "over"} as in ``HostCost``, or {"absent"}."""
    ready, rows = {}, {}
    for count in counts:
        ready[count], rows[count] = found(Sets.make(count, device), only)
    samplers = {
        (name, count): functools.partial(_sample, call, itertools.cycle(call.arguments), wait)
        for count in counts
        for name, call in ready[count].items()
    }
    gc.collect()
    gc.freeze()  # what all these arguments cost the collector is no call's own
    try:
        taken = turns.take(samplers, rounds)
    finally:
        gc.unfreeze()
    for (name, count), times in taken.items():
        bare = taken.get((BARE, count))
        others = {to: taken.get((to, count)) for to in host_record.COMPARED.get(name, ())}
        others[host_record.FEW] = taken.get((name, host_record.FEW_SETS))
        rows[count][name] = {
            "us": turns.quartiles(times),
            "ratio": turns.ratio(times, bare) if bare else None,
            "over": {to: turns.ratio(times, its) for to, its in others.items() if its},
        }
    return rows


def found(sets: Sets, only: Sequence[str]) -> tuple[dict[str, Call], dict[str, dict]]:
    """Calls whose first result is right, and rows of what is absent. only: texts, one of which a name contains."""
    ready: dict[str, Call] = {}
    absent: dict[str, dict] = {}
    for group, make in {**host_calls.OURS, **PEERS}.items():
        try:
            made = make(sets)
        except Exception as error:  # not installed, or not for this machine: said, not left out
            absent[group] = {"absent": session.first_line(error)}
            continue
        for call in made:
            if call.name != BARE and only and not any(text in call.name for text in only):
                continue
            try:
                wrong = sets.wrong(call)
            except Exception as error:
                wrong = session.first_line(error)
            if wrong:
                absent[call.name] = {"absent": wrong}
            else:
                ready[call.name] = call
    return ready, absent


def _sample(call: Call, turn: Iterator[tuple], wait: Wait) -> float:
    """Microseconds of one call. turn: its arguments, over and over; a sample goes on where the last one ended."""
    import torch

    function, calls = call.call, WITH_BACKWARD if call.gradients else CALLS
    with torch.set_grad_enabled(call.gradients):
        wait()
        start = time.perf_counter()
        for given in itertools.islice(turn, calls):
            function(*given)
        wait()
        return (time.perf_counter() - start) / calls * 1e6


def table(by_sets: dict[int, dict[str, dict]]) -> list[dict]:
    """The record's rows: of each name what it took on each number of address sets, or why it was not measured."""
    names = dict.fromkeys(name for rows in by_sets.values() for name in rows)
    content = []
    for name in names:
        rows = {str(count): rows[name] for count, rows in by_sets.items() if name in rows}
        times = {count: row for count, row in rows.items() if "us" in row}
        why = [row["absent"] for row in rows.values() if "absent" in row]
        content.append({"name": name, "sets": times} if times else {"name": name, "absent": why[0]})
    return content


def run(arguments: argparse.Namespace, device: str, wait: Wait) -> dict:
    """The record's content. A line on each part as it is done."""
    import torch

    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    content: dict[str, object] = {
        "problem": {
            "rows": host_calls.ROWS,
            "columns": host_calls.COLUMNS,
            "sets": list(arguments.sets),
            "calls": CALLS,
            "calls_with_backward": WITH_BACKWARD,
            "rounds": rounds,
        },
        "versions": STUDY.versions(),
        "calls": [],
    }
    if "addresses" in arguments.parts:
        by_sets = _timed("address sets", lambda: measured(arguments.sets, arguments.only, rounds, device, wait))
        for rows in by_sets.values():
            if device != "cpu" and "us" not in rows.get(BARE, {}):
                raise SystemExit(f"no bare launch to compare with: {rows.get(BARE) or rows.get(host_calls.LAUNCHES)}")
        gc.collect()
        session.release(device)
        content["calls"] = table(by_sets)
    with torch.no_grad():
        if "rows" in arguments.parts:
            content["unseen"] = _timed("unseen row counts", lambda: row_counts.unseen(device, wait, UNSEEN))
            passes = max(3, rounds // 8)  # of thousands of calls each
            content["row_counts"] = _timed("row counts in turn", lambda: row_counts.in_turn(device, wait, passes))
        if "memory" in arguments.parts:
            count = host_record.MEMORY_CALLS // (10 if arguments.quick else 1)
            content["memory"] = _timed("memory", lambda: row_counts.growth(device, wait, count))
    return content


def _timed(what: str, make: Callable):
    start = time.perf_counter()
    made = make()
    print(f"{what}: measured in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def counts(text: str) -> tuple[int, ...]:
    """Numbers of address sets, with commas between them."""
    made = tuple(int(part) for part in text.split(","))
    if min(made) < 1:
        raise ValueError(text)
    return made


def parser() -> argparse.ArgumentParser:
    made = STUDY.parser()
    made.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="calls whose names have one of these")
    made.add_argument("--sets", type=counts, default=host_record.SETS, help="numbers of address sets, as in 1,16")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--quick", action="store_true", help="few rounds")
    return made


def whole(arguments: argparse.Namespace) -> bool:
    """Whether all is measured that a record has."""
    chosen = set(arguments.parts) == set(PARTS) and set(host_record.SETS) <= set(arguments.sets)
    return chosen and not arguments.only and not arguments.quick


def main() -> None:
    arguments = parser().parse_args()
    STUDY.refuse(parser(), arguments)
    STUDY.need_gpu(parser())
    import torch

    with untuned():
        content = run(arguments, "cuda", torch.cuda.synchronize)
    measured_all = STUDY if whole(arguments) else replace(STUDY, name=f"{STUDY.name}-part")
    measured_all.report(content, arguments.record)


if __name__ == "__main__":
    main()
