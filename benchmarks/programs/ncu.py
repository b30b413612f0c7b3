"""Nsight Compute: how it replays, its metrics, how its CSV is read, what the figures are made of. Loads nothing."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Metrics = Mapping[str, "float | None"]

_PIPE = "sm__pipe_{}_cycles_active.avg.pct_of_peak_sustained_active"
_INSTRUCTIONS = "sm__inst_executed_pipe_{}.avg.pct_of_peak_sustained_active"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

STALLS = (
    "long_scoreboard short_scoreboard wait not_selected selected math_pipe_throttle mio_throttle lg_throttle "
    "barrier branch_resolving dispatch_stall drain imc_miss no_instruction membar sleeping tex_throttle misc"
).split()
"""What a warp can be at, of each cycle of its life: "selected" issues, the others wait."""

NAMES: dict[str, tuple[str, ...]] = {
    "time": ("gpu__time_duration.sum",),
    "clock": ("sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "warps": ("sm__warps_active.avg.per_cycle_active",),
    "registers": ("launch__registers_per_thread",),
    "grid": ("launch__grid_size",),
    "block": ("launch__block_size",),
    "issued": ("sm__inst_issued.avg.per_cycle_active", "sm__inst_executed.avg.per_cycle_active"),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "alu": (_PIPE.format("alu"), _INSTRUCTIONS.format("alu")),
    "fma": (_PIPE.format("fma"), _INSTRUCTIONS.format("fma")),
    "xu": (_PIPE.format("xu"), _INSTRUCTIONS.format("xu")),
    "lsu": (_INSTRUCTIONS.format("lsu"),),
    "dram": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "read": ("dram__bytes_read.sum",),
    "written": ("dram__bytes_write.sum",),
    "life": ("smsp__average_warp_latency_per_inst_issued.ratio",),
}
"""What is asked for, by a name of ours: versions and chips differ, the first that there is counts."""

METRICS = tuple(dict.fromkeys([m for names in NAMES.values() for m in names] + [_STALL.format(s) for s in STALLS]))

_OF_TIME = [metric for name in ("time", "clock", "dram") for metric in NAMES[name]]


@dataclass(frozen=True)
class Replay:
    """How a launch is run once for each pass of ncu: the options, and the metrics that mean something then.

    Whatever the way, what is profiled stands between cudaProfilerStart and cudaProfilerStop.
    """

    name: str
    options: tuple[str, ...]
    metrics: tuple[str, ...]


_OUR_LAUNCHES = ("--profile-from-start", "off", "--kernel-name", "regex:row_program")
KERNEL = Replay("kernel", ("--replay-mode", "kernel", *_OUR_LAUNCHES), METRICS)
RANGE = Replay("range", ("--replay-mode", "app-range"), tuple(m for m in METRICS if m not in _OF_TIME))
"""The program is run again for each pass. Time goes from start to stop, the host's before and behind the launch too."""

_REGISTER_FILE = 256 << 10  # bytes of an SM
_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"(?P<prefix>[numkKMGT]?)(?:second|s|byte|[hH]z)")


def parse(text: str, metrics: Container[str] = METRICS) -> list[dict[str, float | None]]:
    """Those of `metrics` of each launch or range in ncu's output (`--csv --page raw`), in seconds, bytes, Hz, percent.

    Lines around the table are passed over; a value that is no number, "n/a" too, is None.
    """
    launches, head, units = [], None, None
    for row in csv.reader(line for line in io.StringIO(text) if line.startswith('"')):
        if "Kernel Name" in row:
            head, units = row, None
        elif head is None or len(row) != len(head):
            continue
        elif not row[0]:  # below the head stand the units
            units = dict(zip(head, row, strict=True))
        else:
            values = dict(zip(head, row, strict=True))
            launches.append({m: _number(values[m], (units or {}).get(m, "")) for m in head if m in metrics})
    return launches


def _number(text: str, unit: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * _scale(unit) if value == value else None


def _scale(unit: str) -> float:
    """What a value in `unit` is multiplied with: "Gbyte/nsecond" has a prefix on both sides."""
    amount, _, per = unit.partition("/")
    return _prefix(amount) / _prefix(per)


def _prefix(unit: str) -> float:
    found = _UNIT.fullmatch(unit)
    return _PREFIXES[found["prefix"]] if found else 1.0


def unknown(text: str, metrics: Iterable[str]) -> list[str]:
    """Those of `metrics` that ncu says it cannot find."""
    lines = [line for line in text.splitlines() if "metric" in line.lower() and "==ERROR==" in line]
    words = {word for line in lines for word in re.findall(r"\w+__\w+", line)}
    return [m for m in metrics if m.partition(".")[0] in words]


def version(program: Path) -> str | None:
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version\s+(\S+)", said)
    return found[1] if found else None


def figures(metrics: Metrics, elements: int) -> dict[str, object]:
    """What the metrics of one launch on so many elements of bfloat16 mean; None for what they do not tell.

    in_flight_kb_per_sm is an estimate, as no counter has it: the input bytes that the resident threads hold
    (each its share of the whole input), times the share of their life that they wait for memory. Of CTAs that stay,
    and take one share after another, it says nothing: more than an SM's registers hold is None.
    """
    of = {name: _first(metrics, names) for name, names in NAMES.items()}
    threads = _product(of["grid"], of["block"])
    held = _product(of["warps"], 32, _over(2 * elements, threads))
    held = None if held is None or held > _REGISTER_FILE else held
    stalls = _shares({s: metrics.get(_STALL.format(s)) for s in STALLS}, of["life"])
    traffic = None if of["read"] is None or of["written"] is None else of["read"] + of["written"]
    made = {
        "us": _product(of["time"], 1e6),
        "ghz": _product(of["clock"], 1e-9),
        "occupancy": of["occupancy"],
        "registers": of["registers"],
        "instructions_per_cycle": of["issued"],
        "instructions_per_element": _product(of["instructions"], 32 / elements),
        **{f"{pipe}_percent": of[pipe] for pipe in ("alu", "fma", "xu", "lsu")},
        "dram_percent": of["dram"],
        "dram_tb_per_s": _product(_over(traffic, of["time"]), 1e-12),
        "held_kb_per_sm": _product(held, 1e-3),
        "in_flight_kb_per_sm": _product(held, stalls.get("long_scoreboard"), 1e-3),
    }
    return {name: None if v is None else round(v, 3) for name, v in made.items()} | {"stalls": stalls}


def _first(metrics: Metrics, names: Sequence[str]) -> float | None:
    return next((v for name in names if (v := metrics.get(name)) is not None), None)


def _product(*factors: float | None) -> float | None:
    made = 1.0
    for factor in factors:
        if factor is None:
            return None
        made *= factor
    return made


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _shares(waits: Mapping[str, float | None], life: float | None) -> dict[str, float]:
    """Shares of a warp's life, largest first. life: cycles between two of its instructions; their sum if unknown."""
    known = {name: value for name, value in waits.items() if value is not None}
    whole = life or sum(known.values())
    ranked = sorted(known.items(), key=lambda item: -item[1])
    return {name: round(value / whole, 4) for name, value in ranked} if whole else {}
