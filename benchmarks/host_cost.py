"""What one call costs the host: wall time of calls on tiny problems, ours beside a bare driver launch and peers.

    python -m graphfuse.benchmarks.host_cost [--record FOLDER] [--only TEXT ...] [--sets 1,16,256,2000]
                                             [--parts addresses rows memory] [--repeats 7] [--quick]

addresses: each call works on the next of k address sets, as in a model, where no two calls have the same buffers;
2,000 calls, synchronizing every 200, fewer of those with backward unless the sets are more. All take turns; each shows
the median, smallest and largest of its repeats, and the ratio to a bare launch from Python of the same kernel with
prepacked arguments. rows: one row count again and again against 4,096 in random order, and row counts never seen
before against those seen. memory: what a hundred thousand calls leave behind. What cannot run here is listed as
absent, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from graphfuse import record
from graphfuse.benchmarks import host_calls, host_record, row_counts, session, tables, turns
from graphfuse.benchmarks.host_calls import Call, Sets
from graphfuse.benchmarks.host_peers import PEERS
from graphfuse.benchmarks.host_record import BARE, HostCost
from graphfuse.benchmarks.untuned import untuned

CALLS, BETWEEN = 2000, 200
WITH_BACKWARD = 600
"""Calls of what takes long."""
QUICK_CALLS = 400
UNSEEN = 500
PARTS = ("addresses", "rows", "memory")
WIDTH = 160
DISTRIBUTIONS = ("quack-kernels", "flashinfer-python", "liger-kernel", "triton", "nvidia-cudnn-frontend")

Wait = Callable[[], None]


def measured(
    counts: Sequence[int], only: Sequence[str], repeats: int, calls: int, device: str, wait: Wait
) -> dict[int, dict[str, dict]]:
    """Rows by the number of address sets and name: {"us", "ratio"}, or {"absent"}.

    A call is sampled on one number of sets right after another: the host is faster at some times than at others.
    """
    ready, rows = {}, {}
    for count in counts:
        ready[count], rows[count] = found(Sets.make(count, device), only)
    names = dict.fromkeys(name for each in ready.values() for name in each)
    samplers = {
        (name, count): functools.partial(_sample, ready[count][name], _calls(ready[count][name], count, calls), wait)
        for name in names
        for count in counts
        if name in ready[count]
    }
    gc.collect()
    gc.freeze()  # what all these arguments cost the collector is no call's own
    try:
        taken = turns.take(samplers, repeats)
    finally:
        gc.unfreeze()
    for (name, count), times in taken.items():
        bare = taken.get((BARE, count))
        rows[count][name] = {"us": turns.extremes(times), "ratio": turns.ratio(times, bare) if bare else None}
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


def _calls(call: Call, count: int, calls: int) -> int:
    """How many make a sample: each set has its turn."""
    return max(count, min(calls, WITH_BACKWARD) if call.gradients else calls)


def _sample(call: Call, calls: int, wait: Wait) -> float:
    """Microseconds of one call."""
    import torch

    function, turn, left = call.call, itertools.cycle(call.arguments), calls
    with torch.set_grad_enabled(call.gradients):
        wait()
        start = time.perf_counter()
        while left > 0:
            for given in itertools.islice(turn, min(left, BETWEEN)):
                function(*given)
            wait()
            left -= BETWEEN
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

    calls, repeats = (QUICK_CALLS, 3) if arguments.quick else (CALLS, arguments.repeats)
    content: dict[str, object] = {
        "problem": {
            "rows": host_calls.ROWS,
            "columns": host_calls.COLUMNS,
            "sets": list(arguments.sets),
            "calls": calls,
            "calls_with_backward": min(calls, WITH_BACKWARD),
            "between_synchronizing": BETWEEN,
            "repeats": repeats,
        },
        "versions": {name: record.version(name) for name in DISTRIBUTIONS},
        "calls": [],
    }
    if "addresses" in arguments.parts:
        by_sets = _timed("address sets", lambda: measured(arguments.sets, arguments.only, repeats, calls, device, wait))
        for rows in by_sets.values():
            if device != "cpu" and "us" not in rows.get(BARE, {}):
                raise SystemExit(f"no bare launch to compare with: {rows.get(BARE) or rows.get(host_calls.LAUNCHES)}")
        gc.collect()
        session.release(device)
        content["calls"] = table(by_sets)
    with torch.no_grad():
        if "rows" in arguments.parts:
            content["unseen"] = _timed("unseen row counts", lambda: row_counts.unseen(device, wait, UNSEEN))
            content["row_counts"] = _timed("row counts in turn", lambda: row_counts.in_turn(device, wait, repeats))
        if "memory" in arguments.parts:
            count = host_record.MEMORY_CALLS // (10 if arguments.quick else 1)
            content["memory"] = _timed("memory", lambda: row_counts.growth(device, wait, count))
    return content


def _timed(what: str, make: Callable):
    start = time.perf_counter()
    made = make()
    print(f"{what}: measured in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def report(content: dict) -> None:
    from rich.console import Console

    cost, console = HostCost(content), Console(highlight=False, width=WIDTH)
    for each in (*host_record.every(cost), tables.judged(host_record.TARGETS, cost)):
        console.print(tables.terminal(each))


def counts(text: str) -> tuple[int, ...]:
    """Numbers of address sets, with commas between them."""
    made = tuple(int(part) for part in text.split(","))
    if min(made) < 1:
        raise ValueError(text)
    return made


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--record", type=Path, metavar="FOLDER", help="write host-cost-DEVICE.json into FOLDER, "
                      "host-cost-part-DEVICE.json where only some of it is measured")  # fmt: skip
    made.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="calls whose names have one of these")
    made.add_argument("--sets", type=counts, default=host_record.SETS, help="numbers of address sets, as in 1,16")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--quick", action="store_true", help="few repeats of few calls")
    return made


def whole(arguments: argparse.Namespace) -> bool:
    """Whether all is measured that a record has."""
    chosen = set(arguments.parts) == set(PARTS) and set(host_record.SETS) <= set(arguments.sets)
    return chosen and not arguments.only and not arguments.quick


def main() -> None:
    arguments = parser().parse_args()
    if reason := record.gpu_needed("host_cost"):
        parser().exit(2, f"{reason}\n")
    import torch

    with untuned():
        content = run(arguments, "cuda", torch.cuda.synchronize)
    report(content)
    if arguments.record:
        kind = "host-cost" if whole(arguments) else "host-cost-part"
        print(record.write(arguments.record, kind, record.environment(record.CHECKOUT), content))


if __name__ == "__main__":
    main()
