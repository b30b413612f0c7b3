"""What is read from Nsight Compute, how it is started, and what becomes of what it lacks."""

import json
import re
import sys

import pytest

from graphfuse.base.device import for_arch
from graphfuse.benchmarks import sizes
from graphfuse.benchmarks.programs import ncu, profile
from graphfuse.contract.engine import Launch
from graphfuse.runtime.handle import Handle

RAW = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==WARNING== Note: Running with unmodified GPU clocks. Profiling results may be inconsistent.
==PROF== Profiling "rmsnorm" - 0: 0%....50%....100% - 12 passes
==PROF== Profiling "rmsnorm" - 1: 0%....50%....100% - 12 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","launch__block_size","launch__grid_size","launch__registers_per_thread",\
"sm__cycles_elapsed.avg.per_second","sm__inst_issued.avg.per_cycle_active","sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active","sm__warps_active.avg.per_cycle_active",\
"smsp__average_warp_latency_per_inst_issued.ratio","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","smsp__inst_executed.sum"
"","","","","","","","","","","","byte","byte","%","ns","","","register/thread","hz","inst/cycle","%","%","warp","cycle","inst","inst","inst"
"0","4711","python3.12","127.0.0.1","rmsnorm","1","7","(128, 1, 1)","(199,680, 1, 1)","0","9.0",\
"817,889,280","230,031,360","72.40","300,224","128","199,680","58","1,755,000,000.50","3.38","57.12","n/a","32","8","2","1","265,000,000"
"1","4711","python3.12","127.0.0.1","rmsnorm","1","7","(128, 1, 1)","(199,680, 1, 1)","0","9.0",\
"817,889,280","230,031,360","72.40","300,224","128","199,680","58","1,755,000,000.50","3.38","57.12","n/a","32","8","2","1","265,000,000"
[{"rows": 399360}]
"""
IN_RANGES = """==PROF== Connected to process 618 (/usr/bin/python3.12)
==PROF== Disconnected from process 618
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum","launch__block_size",\
"launch__cluster_size","launch__grid_size","launch__registers_per_thread","sm__cycles_elapsed.avg.per_second",\
"sm__warps_active.avg.pct_of_peak_sustained_active","smsp__average_warp_latency_per_inst_issued.ratio",\
"smsp__average_warps_issue_stalled_membar_per_issue_active.ratio","smsp__inst_executed.sum"
"","","","","","","","","","byte","byte","%","%","ns","","","","register/thread","hz","%","cycle","inst","inst"
"0","618","python3.12","127.0.0.1","range","1","n/a","0","9.0",\
"268,527,360","119,864,064","11.02","11.02","732,672","128","2","256","246","1,969,854,839.34","12.10","5.73","1.14","35,760,745"
"""
ONE = {"place": 0, "rows": 399360, "columns": 1024, "output": "nvfp4", "elements": 399360 * 1024}


def test_figures_are_those_of_what_ncu_prints():
    first, second = profile.entries([profile.Run(ncu.KERNEL, [ONE, {**ONE, "place": 1, "output": "bf16"}], RAW)])
    assert first["replay"] == "kernel"
    assert (first["output"], second["output"]) == ("nvfp4", "bf16") and first["metrics"] == second["metrics"]
    assert first["us"] == pytest.approx(300.224) and first["ghz"] == pytest.approx(1.755)
    assert first["registers"] == 58 and first["instructions_per_cycle"] == 3.38 and first["alu_percent"] == 57.12
    assert first["instructions_per_element"] == pytest.approx(32 * 265e6 / (399360 * 1024), abs=1e-3)
    assert first["dram_tb_per_s"] == pytest.approx((817889280 + 230031360) / 300.224e-6 / 1e12, abs=1e-3)
    # 32 bytes a thread, 32 warps of 32 threads; a quarter of a warp's life is spent waiting for memory.
    assert first["held_kb_per_sm"] == pytest.approx(32.768) and first["in_flight_kb_per_sm"] == pytest.approx(8.192)
    assert first["stalls"] == {"long_scoreboard": 0.25, "selected": 0.125}
    # What is "n/a", and what is not there at all.
    assert first["fma_percent"] is None and first["xu_percent"] is None and first["occupancy"] is None
    assert first["metrics"]["sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active"] is None
    json.dumps(first)


def test_a_range_tells_nothing_that_refers_to_time():
    case = {"place": 0, "rows": 4096, "columns": 16384, "output": "bf16", "elements": 4096 * 16384}
    (entry,) = profile.entries([profile.Run(ncu.RANGE, [case], IN_RANGES)])
    assert entry["replay"] == "range"
    assert {entry[name] for name in ("us", "ghz", "dram_percent", "dram_tb_per_s")} == {None}
    assert not [m for m in entry["metrics"] if "elapsed" in m or "time" in m]
    assert entry["registers"] == 246 and entry["occupancy"] == 12.1 and entry["stalls"] == {"membar": 0.199}
    assert entry["instructions_per_element"] == pytest.approx(17.052)
    assert entry["metrics"]["dram__bytes_read.sum"] == 268527360


@pytest.mark.parametrize(
    "cooperative, cluster, replay",
    [(False, 1, ncu.KERNEL), (True, 1, ncu.KERNEL), (False, 2, ncu.KERNEL), (True, 2, ncu.RANGE)],
)
def test_cooperative_clusters_are_ranges(cooperative, cluster, replay):
    assert profile.replay_of(Launch(8, 128, (), cluster, cooperative=cooperative)) is replay


def test_what_the_user_tuned_is_not_profiled(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path / "tuned"))
    program, said = tmp_path / "ncu", tmp_path / "said"
    program.write_text(f'#!/bin/sh\nls "$GRAPHFUSE_TUNING_DIR" > {said}; echo "$GRAPHFUSE_TUNING_DIR" >> {said}\n')
    program.chmod(0o755)
    with pytest.raises(profile.ProfilerError):
        profile.collect(program, tmp_path, "rmsnorm-silu", ncu.KERNEL, [0])
    (directory,) = said.read_text().splitlines()  # empty when ncu ran
    assert directory and directory != str(tmp_path / "tuned")


@pytest.mark.parametrize("bench", profile.CASES)
def test_every_case_is_replayed_in_one_way(bench):
    places = profile.planned(bench, Handle(for_arch("sm_90a")))
    assert sorted(p for of in places.values() for p in of) == list(range(len(profile.CASES[bench])))
    # Of clusters are rows that no SM has registers for, and none of those that one warp can have.
    cases = [*enumerate(profile.CASES[bench])]
    wide = {i for i, case in cases if bench.endswith("backward") and case.output == "fp32" and case.columns == 32768}
    narrow = {i for i, case in cases if not bench.endswith("backward") or case.columns <= 2048}
    assert wide <= {*places.get(ncu.RANGE, [])} and narrow <= {*places.get(ncu.KERNEL, [])}


def test_ncu_is_asked_for_the_kernels_that_are_launched():
    handle = Handle(for_arch("sm_90a"))
    (part,) = sizes.planner(profile.CASES["rmsnorm-silu"][0].graph(handle), handle).plans[0].parts
    asked = ncu.KERNEL.options[-1].removeprefix("regex:")
    assert re.search(rf"GF_KERNEL\(\w+\) {asked}\(", part.engine.source(part.facts, part.knobs))


@pytest.mark.parametrize("unit, text, value", [("us", "300.2", 300.2e-6), ("nsecond", "3", 3e-9), ("ms", "1", 1e-3)])
def test_units_may_be_others(unit, text, value):
    rows = f'"Kernel Name","ID","gpu__time_duration.sum"\n"","","{unit}"\n"rmsnorm","0","{text}"\n'
    assert ncu.parse(rows) == [{"gpu__time_duration.sum": pytest.approx(value)}]


def test_sizes_with_prefixes():
    head = '"Kernel Name","dram__bytes_read.sum","sm__cycles_elapsed.avg.per_second"\n'
    rows = head + '"","Mbyte","Ghz"\n"a","1,024.5","1.7"\n'
    assert ncu.parse(rows) == [
        {"dram__bytes_read.sum": 1024.5e6, "sm__cycles_elapsed.avg.per_second": pytest.approx(1.7e9)}
    ]


@pytest.mark.parametrize("unit", ["Ghz", "cycle/nsecond", "GHz"])
def test_clocks_come_in_several_units(unit):
    rows = f'"Kernel Name","ID","sm__cycles_elapsed.avg.per_second"\n"","","{unit}"\n"a","0","1.755"\n'
    assert ncu.figures(ncu.parse(rows)[0], 64)["ghz"] == 1.755


def test_nothing_is_made_of_nothing():
    figures = ncu.figures({}, 64)
    assert figures.pop("stalls") == {} and set(figures.values()) == {None}
    assert ncu.parse("==ERROR== The application returned an error code (1).\n") == []


def test_launches_that_are_too_few_are_not_guessed_at():
    with pytest.raises(profile.ProfilerError, match="2 launches of 3: which is which"):
        profile.entries([profile.Run(ncu.KERNEL, [ONE] * 3, RAW)])


def test_launches_of_a_case_are_told_apart():
    handle = Handle(for_arch("sm_90a"))
    case = profile.CASES["qk-norm-rope-training"][0]
    found = [{"place": 0, **one} for one in profile.launches(case, handle)]
    assert [one["launch"] for one in found] == ["1 of 3", "2 of 3", "3 of 3"]
    assert [one["elements"] for one in found] == [case.rows * heads * 128 for heads in (40, 32, 8)]
    case = profile.CASES["rmsnorm-channels"][0]
    (alone,) = profile.launches(case, handle)
    assert alone == {**vars(case), "bytes": case.moved, "elements": 1597440 * 96}
    raw = RAW.replace("\n[{", '\n"2",' + RAW.splitlines()[-2].partition(",")[2] + "\n[{")
    assert [e["launch"] for e in profile.entries([profile.Run(ncu.KERNEL, found, raw)])] == [f["launch"] for f in found]


def test_metrics_that_a_version_lacks_are_named():
    pipe = "sm__pipe_alu_cycles_active"
    said = f"==PROF== dram__throughput\n==ERROR== Failed to find metric regex:^{pipe}\\.avg\n"
    (name,) = ncu.unknown(said, ncu.METRICS)
    assert name.startswith(pipe) and ncu.unknown(RAW, ncu.METRICS) == []


FAKE = """#!{python}
import pathlib, sys
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1] if name in words else None
metrics = option("--metrics").split(",")
if "sm__pipe_xu_cycles_active.avg.pct_of_peak_sustained_active" in metrics:
    sys.exit(print("==ERROR== Failed to find metric sm__pipe_xu_cycles_active.avg.pct_of_peak_sustained_active") or 1)
ours = option("--profile-from-start"), option("--kernel-name")
if option("--replay-mode") == "kernel":
    raw, runs = {raw!r}, 1
    assert ours == ("off", "regex:row_program") and "gpu__time_duration.sum" in metrics
else:
    raw, runs = {ranges!r}, 8
    assert option("--replay-mode") == "app-range"
    assert ours == (None, None) and "gpu__time_duration.sum" not in metrics
pathlib.Path(option("--log-file")).write_text(raw)
print("something else")
assert words[-2] == "-c"
places = [int(n) for n in words[-1].partition("[")[2].strip("])").split(",")]
cases = ", ".join('{{"place": %d, "rows": %d, "elements": 1, "output": "bf16"}}' % (n, 100 + n) for n in places)
print(f"[{{cases}}]\\n" * runs)
"""


def fake(folder, text):
    program = folder / "ncu"
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_ncu_is_started_again_without_what_it_lacks(tmp_path, capsys):
    program = fake(tmp_path, FAKE.format(python=sys.executable, raw=RAW, ranges=IN_RANGES))
    places = {ncu.KERNEL: [0, 2], ncu.RANGE: [1]}
    runs = [profile.collect(program, tmp_path, "rmsnorm-backward", *kind) for kind in places.items()]
    assert capsys.readouterr().out.count("does not have sm__pipe_xu") == 2
    entries = profile.entries(runs)
    assert [(e["rows"], e["replay"]) for e in entries] == [(100, "kernel"), (101, "range"), (102, "kernel")]
    assert [e["us"] for e in entries] == [pytest.approx(300.224), None, pytest.approx(300.224)]


@pytest.mark.parametrize("replay", [ncu.KERNEL, ncu.RANGE], ids=lambda replay: replay.name)
@pytest.mark.parametrize("said", ["ERR_NVGPUCTRPERM - The user does not have permission", "LaunchFailed"])
def test_what_ncu_fails_of_is_said(replay, said, tmp_path):
    program = fake(tmp_path, f"#!/bin/sh\necho '==ERROR== {said}'\nexit 9\n")
    with pytest.raises(profile.ProfilerError, match=f"exit code 9.*{said}"):
        profile.collect(program, tmp_path, "rmsnorm-silu", replay, [0])


def test_ncu_is_looked_for_where_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(profile.ProfilerError, match="looked in PATH, .*toolkit/bin, /usr/local/cuda"):
        profile.find(tmp_path)
    for place in ("opt/nvidia/nsight-compute/2025.3.0", "usr/local/cuda-13.0/bin", "toolkit/bin"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "ncu").write_text("")
        assert profile.find(tmp_path) == tmp_path / place / "ncu"
