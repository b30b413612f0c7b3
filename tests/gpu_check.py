"""Checks the kernels on this machine's GPU: its tests, then every tool of the compute-sanitizer; writes a record.

Exit status: 0 nothing was found, 1 something was or a tool could not be relied on, 2 there is
no GPU. A tool that does not run on this machine is said to, in the record too, and changes nothing.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from graphfuse.benchmarks import record
from support import sanitizer

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "records"
COMMAND = "make gpu-check"
KIND = "gpu-check"

# What each tool says, in all its versions, about its bug in planted.cu.
_PLANTED = {
    "memcheck": r"Invalid __global__ write",
    "racecheck": r"race|hazard",
    "initcheck": r"uninitialized",
    "synccheck": r"barrier|divergent",
}
_BAD = ("found", "failed", "blind")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORDS, metavar="FOLDER", help="where records go")
    parser.add_argument(
        "--tools",
        nargs="*",
        choices=sanitizer.TOOLS,
        default=[*sanitizer.TOOLS],
        metavar="TOOL",
        help=f"of {', '.join(sanitizer.TOOLS)} (default: all)",
    )
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out; the record says so")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="for each run of a tool")
    options = parser.parse_args(arguments)
    if reason := record.gpu_needed(COMMAND):
        print(reason, file=sys.stderr)
        return 2
    from support import variants

    # Before anything is written: a new record would make the commit a dirty one.
    about = record.environment(ROOT)
    tests = None if options.no_tests else run_tests(options.record, about)
    program = [sys.executable, str(Path(__file__).with_name("gpu_kernels.py"))]
    plain = subprocess.run(program, capture_output=True, text=True)
    print(f"kernels: {plain.stdout.strip() or plain.stderr}")
    content = {
        "sources": variants.digest(),
        "tests": tests,
        "kernels": plain.stdout.strip() if plain.returncode == 0 else "failed",
        **run_tools(options.tools, program, options.timeout),
    }
    path = record.write(options.record, KIND, about, content)
    print(f"record: {path}\n{outcome(content)}")
    return int(is_bad(content))


def run_tests(folder: Path, about: dict[str, object]) -> dict[str, object]:
    """Counts of the GPU lane, which leaves its own record, too."""
    side_by_side = ("-n", "auto", "--maxprocesses", "16", "--dist", "loadgroup")  # most of the time is compilers'
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-q", *side_by_side]
    command.append(f"--record={folder.resolve()}")
    code = subprocess.run(command, cwd=ROOT).returncode
    if code not in (0, 1):  # pytest did not get as far as its record
        return {"exit_status": code, "counts": {}}
    left = json.loads(record.path(folder, record.of_tests(about), about).read_text())
    return {"exit_status": code, "counts": left["counts"], "seconds": left["seconds"]}


def run_tools(tools: list[str], program: list[str], timeout: float) -> dict[str, object]:
    """The sanitizer's file, version and what each tool came to."""
    found, places = sanitizer.find()
    if found is None:
        why = f"compute-sanitizer is not in {', '.join(places)}; pip install nvidia-cuda-sanitizer-api brings it"
        return {"sanitizer": None, "tools": {tool: {"status": "did not run", "why": why} for tool in tools}}
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    results = {}
    for tool in tools:
        planted = sanitizer.run(found, tool, [*program, "--planted", tool], timeout)
        # A tool without a summary refused this machine: its second run would go the same way.
        kernels = planted if planted.errors is None else sanitizer.run(found, tool, program, timeout)
        results[tool] = judge(tool, planted, kernels)
        print(f"{tool}: {results[tool]['status']} {results[tool].get('why', '')}", flush=True)
    return {"sanitizer": " ".join(re.findall(r"Version (\S+)", version)), "tools": results}


def judge(tool: str, planted: sanitizer.Report, kernels: sanitizer.Report) -> dict[str, object]:
    """What a tool came to, given its reports on the planted bug and on the kernels. status:

    "clean" or "found"; "failed" if it works and the kernels' run under it did not end well;
    "blind" if it passes the planted bug, too; "did not run" if it does not work here.
    """
    seen = any(re.search(_PLANTED[tool], finding, re.IGNORECASE) for finding in planted.findings)
    if seen and kernels.errors:
        about = {"findings": [*kernels.findings], "seconds": kernels.seconds}
        return {"status": "found", "errors": kernels.errors, **about}
    if kernels.finished and kernels.errors == 0:
        counts = {"errors": 0, "seconds": kernels.seconds, "ran": kernels.output.strip()}
        return (
            {"status": "clean", **counts}
            if seen
            else {"status": "blind", "why": f"it did not report the planted bug: {planted.last_words}", **counts}
        )
    return {"status": "failed" if seen else "did not run", "why": kernels.last_words}


def is_bad(content: dict[str, object]) -> bool:
    """Whether a record's content has anything that must be looked at."""
    tests = content["tests"] or {}
    statuses = [tool["status"] for tool in content["tools"].values()]
    return bool(tests.get("exit_status")) or content["kernels"] == "failed" or any(s in _BAD for s in statuses)


def outcome(content: dict[str, object]) -> str:
    """A record's content in one line."""
    counts = (content["tests"] or {}).get("counts", {})
    tests = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "not run"
    tools = ", ".join(f"{tool} {result['status']}" for tool, result in content["tools"].items())
    return f"tests: {tests}; {tools}"


def standing(folder: Path, digest: str) -> list[str]:
    """For each record what it says, or that it is of other kernel sources than those with this digest."""
    lines = []
    for path in sorted(folder.glob(f"{KIND}-*.json")):
        content = json.loads(path.read_text())
        about = content["environment"]
        made = f"{path.name} ({about['date']}, commit {str(about['commit'])[:12]})"
        if content["sources"] != digest:
            lines.append(f"{made} is older than the kernel sources: run {COMMAND} on a {about['device']}")
        else:
            lines.append(f"{made} is of these kernel sources: {outcome(content)}")
    return lines or [f"there is no record of {COMMAND}: run it on a machine with a GPU"]


if __name__ == "__main__":
    sys.exit(main())
