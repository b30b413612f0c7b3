"""The tools of NVIDIA's compute-sanitizer: where they are, one run of one tool, and what it said."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from subprocess import PIPE

from graphfuse.base import settings

# Tool -> its own options. A call that fails raises in the program: memcheck need not report it, and
# cuda.bindings probes for entry points that drivers lack. Padding makes a step past the end a step outside.
TOOLS = {
    "memcheck": ("--report-api-errors=no", "--padding=64"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
_NAME = "compute-sanitizer"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")
_BANNER = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application")
_FINDINGS_KEPT = 20


@dataclass(frozen=True)
class Report:
    """errors: as the tool counts them, None if it printed no summary. findings: its distinct messages, with
    the place in the kernel. output: what the program printed. log: all that the tool and the program said."""

    errors: int | None
    findings: tuple[str, ...]
    finished: bool
    output: str
    log: str
    seconds: float

    @property
    def last_words(self) -> str:
        """The end of the log on one line, for a message."""
        lines = [line.strip("= \t") for line in self.log.splitlines()]
        return " / ".join([line for line in lines if line][-4:])


def find() -> tuple[Path | None, tuple[str, ...]]:
    """The program, or None, and the places that were looked at."""
    folders = [root / sub for _, root in settings.toolkit_roots() for sub in ("bin", _NAME)]
    folders += _wheel()
    on_path = shutil.which(_NAME)
    folders += [Path(on_path).parent] if on_path else []
    for root in sorted(Path("/usr/local").glob("cuda*"), key=lambda p: (p.name != "cuda", p.name)):
        folders += [root / "bin", root / _NAME]
    found = (folder / _NAME for folder in folders if (folder / _NAME).is_file())
    return next(found, None), tuple(map(str, folders)) if on_path else (*map(str, folders), "PATH")


def _wheel() -> list[Path]:
    try:
        files = metadata.distribution("nvidia-cuda-sanitizer-api").files or ()
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(f.locate())).parent for f in files if f.name == _NAME and f.parent.name == "bin"]


def run(program: Path, tool: str, command: Sequence[str], timeout: float) -> Report:
    """`command` under `tool`. A run that outlasts `timeout` seconds is ended and has not finished."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ("--tool", tool, *TOOLS[tool], "--print-limit=1000", "--log-file", str(log))
        start = time.monotonic()
        # A group of its own: the tool's end alone would leave the command running.
        process = subprocess.Popen(
            [program, *options, *command], stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()[0], f"not finished after {timeout:.0f} s"
        said = log.read_text(errors="replace") if log.is_file() else ""
        return parse(said, process.returncode == 0, output, errors, time.monotonic() - start)


def parse(log: str, finished: bool, output: str = "", errors: str = "", seconds: float = 0.0) -> Report:
    """What a log says."""
    summary = _SUMMARY.search(log)
    return Report(
        int(summary[1]) if summary else None,
        tuple(_findings(log))[:_FINDINGS_KEPT],
        finished,
        output,
        log + errors,
        round(seconds, 1),
    )


def _findings(log: str) -> dict[str, None]:
    """Distinct messages: the line that begins one, joined with the line after it, which says where."""
    lines = [line.removeprefix("=========")[1:] for line in log.splitlines() if line.startswith("=========")]
    found = {}
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if line.strip() and not line.startswith((" ", *_BANNER)):
            found[" ".join((line.strip(), after.strip())).strip()] = None
    return found
