"""Functions of torch compiled by torch.compile, and by torch.compile with our backend, beside one another.

    python -m graphfuse.benchmarks.programs.compiled_functions [--record FOLDER]

The functions of `torch_functions`, each at one size. Both ways are compiled in several processes first. Then each is
compared with eager mode, and its calls are captured into CUDA graphs on rotating buffers, timed in turns.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.results import mean
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

if TYPE_CHECKING:
    from torch import Tensor

    from graphfuse.benchmarks.programs.torch_functions import TorchFunction

COMPILED, OURS = "torch.compile", "torch.compile, our backend"
BACKENDS = {COMPILED: "inductor", OURS: "graphfuse"}
BYTES, MOST_SETS = 160_000_000, 6
"""Of all buffer sets together, at least, so that the L2 is cold, and how many there are at most."""
FARTHEST = 1.5
"""Distance of a way from eager mode over the largest that a rounding to bfloat16 makes, at most."""
_WARM = "--warm"

PROCESSES = 14
"""That compile at the same time."""


def called(function: TorchFunction, way: str) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A function as a way runs it: results, or gradients of all that have some. way: "" for eager mode."""
    import torch

    run = torch.compile(function.run, backend=BACKENDS[way]) if way else function.run
    upstream: list[Tensor] = []

    def call(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(function.trains):
            made = run(*given)
        made = made if isinstance(made, tuple) else (made,)
        if not function.trains:
            return made
        if not upstream:  # once, so that it is no part of what is timed
            upstream.extend(map(_upstream, made))
        return torch.autograd.grad(made, [t for t in given if t.requires_grad], upstream)

    return call


def _upstream(t: Tensor) -> Tensor:
    """What a backward begins with: other numbers in other places, so that little of it cancels."""
    import torch

    return torch.arange(t.numel(), device=t.device).remainder_(7).sub_(3).view(t.shape).to(t.dtype)


def sets(function: TorchFunction, device: str) -> list[tuple[Tensor, ...]]:
    from graphfuse.benchmarks.programs.torch_functions import Draw

    first = function.draw(Draw(device, 0))
    count = max(2, min(MOST_SETS, -(-BYTES // sum(t.nbytes for t in first))))
    made = [first, *(function.draw(Draw(device, seed)) for seed in range(1, count))]
    for t in (t for given in made for t in given if t.is_floating_point()):
        t.requires_grad_(function.trains)
    return made


def distance(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest distance of results from others, over their size and 2^-7."""
    pairs = [(a.float(), b.float()) for a, b in zip(made, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs) * 2.0**7


def measure(function: TorchFunction, device: str = "cuda") -> dict:
    """The record's entry of a function."""
    import torch

    from graphfuse.runtime import timing
    from graphfuse.torch import compile_report

    given, captured, entry = sets(function, device), [], {"name": function.name, "us": {}, "became": []}
    wanted = called(function, "")(given[0])
    for way in BACKENDS:
        torch.compiler.reset()
        call = called(function, way)
        if (far := distance(call(given[0]), wanted)) > FARTHEST:
            return entry | {"error": f"{way} is {far:.1f} roundings from eager mode"}
        if way == OURS:
            (entries,) = (graph.entries for graph in compile_report().graphs[-1:]) or ((),)
            entry["became"] = sorted({e.became for e in entries if e.is_replaced})
            entry["left"] = sorted({e.why for e in entries if not e.is_replaced})
        captured.append(timing.capture([functools.partial(call, one) for one in given]))
    times = timing.compare(captured)
    return entry | {"us": {way: vars(t) for way, t in zip(BACKENDS, times, strict=True)}}


def _over(entry: dict) -> float | None:
    us = entry["us"]
    return us[OURS]["median"] / us[COMPILED]["median"] if us else None


def _ratios(content: dict) -> list[tuple[float, str]]:
    return [(over, entry["name"]) for entry in content["cases"] if (over := _over(entry)) is not None]


def _average(content: dict) -> list[tuple[float, str]]:
    value = mean(1 / over for over, _ in _ratios(content))
    return [] if value is None else [(value, "")]


def table(content: dict) -> tables.Table:
    return tables.Table(
        "microseconds: median (least to most), and the time of our backend over torch.compile's",
        ("function", COMPILED, OURS, "over torch.compile", "replaced by, or left because"),
        [
            (
                entry["name"],
                *(tables.spread(entry["us"].get(way), 1) for way in BACKENDS),
                f"{over:.3f}" if (over := _over(entry)) is not None else "-",
                entry.get("error") or ", ".join(entry["became"]) or "; ".join(entry["left"]) or "-",
            )
            for entry in content["cases"]
        ],
    )


STUDY = Study(
    name="compiled-functions",
    about=__doc__,
    tables=lambda content: (table(content),),
    targets=(
        Target("time over torch.compile's, at worst", 1.02, False, _ratios),
        Target("times as fast as torch.compile, geometric mean", 1.25, True, _average),
    ),
    distributions=("torch", "triton"),
)


def _warm(part: str) -> None:
    """Compiles a part of the functions, of which the number and the count of all are told."""
    import torch

    from graphfuse.benchmarks.programs.torch_functions import FUNCTIONS

    number, count = map(int, part.split("/"))
    for function in FUNCTIONS[number::count]:
        for way in BACKENDS:
            torch.compiler.reset()
            called(function, way)(sets(function, "cuda")[0])


def main(arguments: Sequence[str] | None = None) -> None:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if given[:1] == [_WARM]:
        return _warm(given[1])
    asked = STUDY.asked(given)
    import torch

    from graphfuse.benchmarks.programs.torch_functions import FUNCTIONS

    command = [sys.executable, "-m", "graphfuse.benchmarks.programs.compiled_functions", _WARM]
    for one in [subprocess.Popen([*command, f"{n}/{PROCESSES}"]) for n in range(PROCESSES)]:
        one.wait()
    content: dict = {"versions": STUDY.versions(), "cases": []}
    with untuned():
        for function in FUNCTIONS:
            content["cases"].append(measure(function))
            torch.cuda.empty_cache()
            if asked.record:
                STUDY.write(asked.record, content)
    STUDY.report(content)


if __name__ == "__main__":
    main()
