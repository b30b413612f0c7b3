"""Autoencoders of diffusers beside WAN's: decode, by everybody.

    python -m graphfuse.benchmarks.programs.autoencoders [--record FOLDER] [--rounds N]

Times are of whole calls, the host's part in them, from CUDA events, all ways in turns. The time by kind of kernel is
the profiler's. Memory is torch's peak over what was allocated before the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphfuse.benchmarks import record
from graphfuse.benchmarks.programs import wan_vae
from graphfuse.benchmarks.programs.autoencoder_cases import CASES
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.wan_vae_cases import COMPILED, EAGER, WAYS
from graphfuse.benchmarks.untuned import untuned

TARGETS = (
    wan_vae.faster(EAGER, "decode", 1.3),
    wan_vae.faster(COMPILED, "decode", 1.0),
    wan_vae.no_more("error against float32", "error", 1.05),
    wan_vae.no_more("peak memory", "peak_bytes", 1.0),
)
STUDY = Study("autoencoders", __doc__, wan_vae.shown, TARGETS, wan_vae.DISTRIBUTIONS, rounds=12)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = STUDY.asked(arguments)
    wan_vae.need_diffusers(STUDY)
    about = record.environment(record.CHECKOUT)
    content: dict = {"versions": STUDY.versions(), "cases": []}
    with untuned():
        for case in CASES:
            ways = {title: WAYS[title] for title in case.ways}
            content["cases"].append({"name": str(case), "ways": wan_vae.measure(case, ways, asked.rounds)})
            if asked.record:
                print(record.write(asked.record, STUDY.name, about, content), flush=True)
    STUDY.report(content)


if __name__ == "__main__":
    main()
