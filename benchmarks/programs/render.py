"""The tables and plots of the docs, made from the records.

    python -m graphfuse.benchmarks.programs.render [--check]

Tables stand between `<!-- bench:NAME -->` and `<!-- /bench -->`; whatever is there is replaced. A bench without a page
in docs/performance gets one.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.command import PART
from graphfuse.benchmarks.programs import (
    all_reduce_record,
    autoencoders,
    compile_cost,
    compiled_functions,
    cudnn_calls,
    every_size,
    followers,
    host_record,
    in_a_model,
    llama,
    models,
    plot,
    profile,
    ranking,
    tensor_parallel_record,
    torch_products,
    vae_calls,
    wan_block,
    wan_vae,
)
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.results import Results

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "nvidia-h200"
FOLDER = ROOT / "docs" / "performance"
MARKED = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
NONE = "There is no record of this yet.\n"


def _measured(r: Results) -> str:
    versions = {}
    for peer in r.record["peers"].values():
        versions |= peer["versions"]
    return _where({**r.record, "versions": versions})


def _where(record: dict) -> str:
    """Machine, date, commit and versions, also of what the record has beside the environment's."""
    about, versions = record["environment"], record.get("versions", {})
    named = {k: v for k, v in about["versions"].items() if k in ("torch", "cuda-core", "cuda-bindings")} | versions
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    return (
        f"{about['device']}, driver {about['driver']}, CUDA {about['cuda']}, NVRTC {about['nvrtc']}, {about['date']}, "
        f"commit {_commit(about)}. {versions}."
    )


def _commit(about: dict) -> str:
    """The commit, short, with what tells that files were changed."""
    commit, *changed = str(about["commit"]).partition("-")
    return commit[:12] + "".join(changed)


def _absences(r: Results) -> str:
    return "\n".join(f"- {text}" for text in tables.absences(r)) or "Every peer was measured in every case."


def _figures(r: Results) -> str:
    kind = r.record["bench"]
    return "\n\n".join(f"![Bandwidth, {o} output]({plot.name(kind, o)})" for o in r.outputs)


_VIEWS: dict[str, Callable[[Results], str]] = {
    "environment": _measured,
    "targets": lambda r: tables.markdown(tables.targets(BENCHES[r.record["bench"]], r)),
    "sizes": lambda r: tables.markdown(tables.sizes(r)),
    "speedups": lambda r: tables.markdown(tables.speedups(r)),
    "cases": lambda r: tables.markdown(tables.cases(r)),
    "absences": _absences,
    "plots": _figures,
    "dependent": lambda r: "\n".join(f"- {text}" for text in tables.dependent(r)),
}


_PARTS = {
    "": "environment",
    "## Targets": "targets",
    "## Fraction of the stream limit, geometric mean (least)": "sizes",
    "## Times as fast as each peer, geometric mean (least)": "speedups",
    "## Bandwidth": "plots",
    "## Not measured": "absences",
    "## Who starts by dependent launch": "dependent",
    "## Every case, microseconds": "cases",
}
"""Of a section: headings and views."""

_PAGE = """\
# {title}

<!-- bench:{name}/section -->
<!-- /bench -->
"""
"""The page of a bench of which nobody has written more."""


def _section(r: Results) -> str:
    """All there is of a bench, with headings below the page's title."""
    return "\n\n".join(f"{heading}\n\n{_VIEWS[view](r)}".lstrip() for heading, view in _PARTS.items())


_VIEWS["section"] = _section


def _overview(records: Path) -> str:
    found = [(b, r) for b in BENCHES.values() if (r := Results.read(records / f"{b.name}-{DEVICE}.json"))]
    return tables.markdown(tables.overview(found)) + "\n" if found else NONE


def _decodes(records: Path) -> str:
    found = [records / f"{name}-{DEVICE}.json" for name in (wan_vae.NAME, autoencoders.STUDY.name)]
    if not all(file.exists() for file in found):
        return NONE
    return tables.markdown(vae_calls.compared([json.loads(file.read_text()) for file in found])) + "\n"


def _benches(records: Path) -> str:
    """One line for each bench: its page, what it measures, its record."""
    rows = []
    for bench in BENCHES.values():
        outputs = ", ".join(dict.fromkeys(case.output for case in bench.cases))
        file = records / f"{bench.name}-{DEVICE}.json"
        record = f"[{file.name}](../records/{file.name})" if file.exists() else "none yet"
        rows.append((f"[{bench.title}]({bench.name}.md)", outputs, str(len(bench.cases)), record))
    return tables.markdown(tables.Table("benches", ("bench", "output", "cases", "record"), rows, left=2)) + "\n"


def _told(study: Study, record: dict) -> str:
    """Where it was measured, what was to be reached, the tables with their titles, and who was not measured."""
    *shown, verdicts = study.shown(record)
    titled = (f"{_sentence(table.title)}\n\n{tables.markdown(table)}" for table in shown)
    where = _measured(Results(record)) if "versions" not in record and "peers" in record else _where(record)
    absences = [_absences(Results(record))] if "peers" in record else []
    return "\n\n".join([where, tables.markdown(verdicts), *titled, *absences])


def _sentence(title: str) -> str:
    return f"{title[0].upper()}{title[1:]}:"


def _wan_vae(record: dict) -> str:
    picture = plot.kinds_name(wan_vae.NAME, record)
    return f"{_told(wan_vae.STUDY, record)}\n\n![The same, over the time of the first way of a case]({picture})"


def _ranking(record: dict) -> str:
    return f"{_where(record)}\n\n{tables.markdown(ranking.table(record['us']))}"


def _every_size(record: dict) -> str:
    return f"{_where(record)}\n\n{tables.markdown(every_size.of_lengths(record))}"


def _profile(record: dict) -> str:
    about = record["environment"]
    where = f"{about['device']}, Nsight Compute {record['ncu']}, {about['date']}, commit {_commit(about)}."
    return f"{where}\n\n{tables.markdown(tables.profile(record))}"


_STUDIES = (
    *(
        module.STUDY
        for module in (host_record, in_a_model, llama, compile_cost, cudnn_calls, torch_products, wan_block)
    ),
    *(module.STUDY for module in (autoencoders, all_reduce_record, tensor_parallel_record, compiled_functions)),
    *(program.PROGRAM.study for program in (models, followers)),
)
_RECORDS: dict[str, Callable[[dict], str]] = {
    **{name: functools.partial(_told, s) for s in _STUDIES for name in (s.name, f"{s.name}{PART}")},
    "wan-vae": _wan_vae,
    "ranking": _ranking,
    "every-size": _every_size,
    **dict.fromkeys([f"{bench}-profile" for bench in profile.CASES], _profile),
}


_OF_ALL: dict[str, Callable[[Path], str]] = {"overview": _overview, "decodes": _decodes, "benches": _benches}


def files() -> list[Path]:
    """The documents with marked places."""
    return [ROOT / "README.md", ROOT / "docs" / "tuning.md", *sorted(FOLDER.glob("*.md"))]


def add_pages(folder: Path) -> list[Path]:
    """Writes a page for each bench that has none. Returns these."""
    missing = [(folder / f"{name}.md", bench) for name, bench in BENCHES.items()]
    missing = [(file, bench) for file, bench in missing if not file.exists()]
    for file, bench in missing:
        file.write_text(_PAGE.format(title=bench.title, name=bench.name))
    return [file for file, _ in missing]


def block(name: str, records: Path) -> str:
    """The text of one marked place: RECORD/VIEW of a bench, another RECORD, that of another DEVICE as RECORD@DEVICE, or
    of all benches."""
    if name in _OF_ALL:
        return _OF_ALL[name](records)
    kind, _, view = name.partition("/")
    kind, _, device = kind.partition("@")
    file = records / f"{kind}-{device or DEVICE}.json"
    if not file.exists():
        return NONE
    if view:
        return _VIEWS[view](Results.read(file)) + "\n"
    return _RECORDS[kind](json.loads(file.read_text())) + "\n"


def rendered(text: str, records: Path) -> str:
    """A document with its marked places as the records have them."""
    return MARKED.sub(lambda m: m[1] + block(m[2], records) + m[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not as its record")
    arguments = parser.parse_args()
    records = ROOT / "docs" / "records"
    if not arguments.check:
        for file in add_pages(FOLDER):
            print(f"{file}: new; add it to nav in mkdocs.yml")
    for file in files():
        before = file.read_text()
        after = rendered(before, records)
        if arguments.check and after != before:
            raise SystemExit(f"{file.relative_to(ROOT)} is not as its record: run make bench-docs")
        if after != before:
            file.write_text(after)
    for kind in BENCHES:
        results = Results.read(records / f"{kind}-{DEVICE}.json")
        if results and not arguments.check:
            print(*plot.write(results, kind, FOLDER), sep="\n")
    for file in [] if arguments.check else sorted(records.glob(f"{wan_vae.NAME}-*.json")):
        print(plot.write_kinds(json.loads(file.read_text()), wan_vae.NAME, FOLDER))


if __name__ == "__main__":
    main()
