"""Models with our operators in them, beside the same models without: measured in models.

    python -m graphfuse.benchmarks.programs.models [--record FOLDER] [--resume] [--only NAME ...] [--ways NAME ...]
                                          [--rounds 30] [--quick] [--list] [--json]

A few layers of published models' sizes, random weights, bfloat16 (`model_cases`): prefill of 1 x 4096 tokens, a
decoding step of 64 sequences as a CUDA graph, a training step with AdamW. Each runs as it is, compiled by
torch.compile, and both with us (`model_ways`), all in turns. Every way is compared with float32 before it is timed: one
that is farther from it than the unmodified model ends the case (`model_check`). `graphfuse bench models` is this
program.

The record is written after each case; until it has all of them it is models-part-DEVICE.json. Each stage of a case has
a limit of seconds, torch.compile among them: --list adds them up. In sessions that are shorter: one model at a time by
--only, with --resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphfuse.benchmarks.bench import Bench
from graphfuse.benchmarks.programs import model_record, model_session
from graphfuse.benchmarks.programs.model_cases import CASES, MODELS, QUICK, ModelCase
from graphfuse.benchmarks.programs.model_ways import EAGER, OURS, WAYS, Way
from graphfuse.benchmarks.programs.program import Program

BENCH = Bench(
    name="models",
    title="Measured in models",
    cases=CASES,
    quick=QUICK,
    peers=WAYS,
    targets=model_record.TARGETS,
    ours=OURS,
    stream=EAGER,
)
"""What is compared with is the unmodified model."""


def _measured(case: ModelCase, ways: Sequence[Way], device: str, rounds: int) -> dict:
    return model_session.measure(case, MODELS[case.model], ways, device, rounds)


PROGRAM = Program(
    bench=BENCH,
    about=__doc__,
    measure=_measured,
    group=lambda case: case.model,
    name=model_record.name,
    titled=lambda case: f"{MODELS[case.model].title}, {case.layers} layers, {case.size}",
    line=model_record.line,
    tables=(model_record.times, model_record.spent, model_record.costs),
    longest=model_session.longest,
    rounds=30,
    quick_rounds=10,
    quick_cases="two of the models",
    distributions=("transformers", "triton"),
    why_not=lambda case: MODELS[case.model].why_not(),
)
main = PROGRAM.main

if __name__ == "__main__":
    main()
