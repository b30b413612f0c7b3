"""The SM100 table of the RMSNorm engine, translated from what the cuDNN frontend publishes for B200.

    python -m graphfuse.benchmarks.programs.published_sm100

Writes the knobs in engines/rows/rows.sm_100.json anew from the figures that each entry keeps
under "published": what that engine was swept to on a B200, by its authors. Nothing here was
measured by this project, and their kernel is another: one warp handles one row at a time.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import sizes
from graphfuse.contract.engine import knobs_to_dict
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.tuned_tables import store

TABLE = Path(__file__).resolve().parents[2] / "engines" / "rows" / "rows.sm_100.json"
DEVICE = for_arch("sm_100a")
ENGINE = RowEngine()

_WARP = 32
_CHUNK = 8  # elements that a thread of this kernel takes at once


def translate(published: Mapping[str, object], facts) -> ByRowKnobs:
    """This kernel's nearest knobs.

    A row has as many threads as a warp, or the row's chunks if those are fewer; twice as
    many where several of their CTAs share a row. CTAs have as many threads. Their width of a
    load has no counterpart, nor have persistent grids and where gamma is kept.
    """
    chunks = facts.columns // _CHUNK
    most = 1 << (chunks - 1).bit_length()
    threads_per_row = min(most, _WARP * (2 if published["split_columns"] else 1))
    return ByRowKnobs(threads_per_row, max(threads_per_row, _WARP * published["warps_per_cta"]))


def facts(columns: int, rows: int, output: str):
    """What the engine looks at in one of the published problems."""
    (part,) = sizes.Size(rows, columns, output).plans(DEVICE)[0].parts
    return part.facts


def translated(entries):
    """`entries` with their knobs translated anew from their published figures."""
    output = {dtype.value: name for name, dtype in sizes.OUTPUTS.items()}
    for entry in entries:
        seen = facts(entry.key["columns"], entry.rows, output[entry.key["outputs"][0]["type"]])
        problem = ENGINE.problem(seen)
        knobs = knobs_to_dict(translate(entry.published, seen))
        yield replace(entry, engine=ENGINE.name, key=problem.key, rows=problem.rows, knobs=knobs)


def main() -> None:
    TABLE.write_text(store.to_text([*translated(store.parse(TABLE.read_bytes()))]))
    print(TABLE.name)


if __name__ == "__main__":
    main()
