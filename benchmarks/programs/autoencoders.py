"""Autoencoders of diffusers beside WAN's: decode, by everybody.

    python -m graphfuse.benchmarks.programs.autoencoders [--record FOLDER] [--resume] [--only TEXT ...]
                                                         [--ways WAY ...] [--seconds N] [--rounds N] [--top N]

Times are of whole calls, the host's part in them, from CUDA events, all ways in turns. Beside them are those of a CUDA
graph of the call, without the host's part. The time by kind of kernel is the profiler's. Memory is torch's peak over
what was allocated before the call.

The record is written after each case. With --resume, --only and --ways a session can measure some of them, and keep
the others of the record that is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphfuse.benchmarks.programs import vae_calls
from graphfuse.benchmarks.programs.autoencoder_cases import CASES
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.wan_vae_cases import COMPILED, EAGER

TARGETS = (
    vae_calls.faster(EAGER, "decode", 1.3),
    vae_calls.faster(COMPILED, "decode", 1.0),
    vae_calls.no_more("error against float32", "error", 1.05),
    vae_calls.no_more("peak memory", "peak_bytes", 1.0),
)
STUDY = Study("autoencoders", __doc__, vae_calls.shown, TARGETS, vae_calls.DISTRIBUTIONS, rounds=12)


def main(arguments: Sequence[str] | None = None) -> None:
    vae_calls.run(STUDY, vae_calls.asked(STUDY, CASES, arguments))


if __name__ == "__main__":
    main()
