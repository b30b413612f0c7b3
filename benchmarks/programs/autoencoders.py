"""Autoencoders of diffusers with group norms: decode, by everybody.

    python -m graphfuse.benchmarks.programs.autoencoders [--record FOLDER] [--rounds N]

Times are of whole calls, the host's part in them, from CUDA events, all ways in turns. The time by kind of kernel is
the profiler's. Memory is torch's peak over what was allocated before the call.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.programs import wan_vae
from graphfuse.benchmarks.programs.autoencoder_cases import CASES
from graphfuse.benchmarks.programs.wan_vae_cases import COMPILED, EAGER, WAYS
from graphfuse.benchmarks.untuned import untuned

NAME = "autoencoders"
TARGETS = (
    wan_vae.faster(EAGER, "decode", 1.3),
    wan_vae.faster(COMPILED, "decode", 1.0),
    wan_vae.no_more("error against float32", "error", 1.05),
    wan_vae.no_more("peak memory", "peak_bytes", 1.0),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help=f"write {NAME}-DEVICE.json into FOLDER")
    parser.add_argument("--rounds", type=int, default=12, help="samples of each way, 12 unless told, 2 at least")
    asked = parser.parse_args(arguments)
    if asked.rounds < 2:
        parser.error(f"--rounds {asked.rounds}: quartiles take two rounds or more")
    if reason := record.gpu_needed(NAME):
        parser.exit(2, f"{reason}\n")
    if importlib.util.find_spec("diffusers") is None:
        parser.exit(2, f"{NAME} needs diffusers, which is not installed: pip install diffusers\n")
    from rich.console import Console

    about = record.environment(record.CHECKOUT)
    content: dict = {"versions": {name: record.version(name) for name in wan_vae.DISTRIBUTIONS}, "cases": []}
    with untuned():
        for case in CASES:
            ways = {title: WAYS[title] for title in case.ways}
            content["cases"].append({"name": str(case), "ways": wan_vae.measure(case, ways, asked.rounds)})
            if asked.record:
                print(record.write(asked.record, NAME, about, content), flush=True)
    console = Console(highlight=False, width=200)
    for table in (wan_vae.times(content), wan_vae.kinds(content), tables.judged(TARGETS, content)):
        console.print(tables.terminal(table))


if __name__ == "__main__":
    main()
