"""The bench as users start it: real peers, the real clock, a record."""

import collections
import json
import subprocess
import sys

import pytest

import graphfuse
from graphfuse.benchmarks.programs import profile

pytestmark = pytest.mark.gpu

BENCH = [sys.executable, "-c", "from graphfuse.cli import app; app()", "bench"]


def test_a_quick_run_leaves_a_record(tmp_path):
    command = [*BENCH, "--quick", "--rows", "1560", "--record", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("rmsnorm-silu-part-*.json")
    cases = json.loads(file.read_text())["cases"]
    assert len(cases) == 6
    for case in cases:
        peers = case["peers"]
        assert {"graphfuse", "cudnn_oss", "cudnn_a", "flashinfer", "torch_compile", "torch_eager"} < set(peers)
        measured = {name for name, entry in peers.items() if "us" in entry}
        always = {"graphfuse", "stream"} | ({"torch_eager", "torch_compile"} if case["output"] != "nvfp4" else set())
        assert always <= measured, peers
        assert all(entry["us"]["low"] > 0 for entry in peers.values() if "us" in entry)
        assert "this" not in peers["graphfuse"]["knobs_from"]  # as what a user tuned is said to be
        linked = {name: peers[name]["dependent_launch"] for name in measured}
        assert linked["graphfuse"] is False and linked["stream"] is False, linked
        assert linked.get("graphfuse_dependent", True), linked
        # Everybody else says why not.
        assert all(peers[name].get("absent") or peers[name].get("error") for name in set(peers) - measured)
    assert "targets" in done.stdout


@pytest.mark.parametrize("name", ["add-rmsnorm", "add-rmsnorm-fp8", "qk-norm"])
def test_the_other_benches_measure_who_is_there(name, tmp_path):
    done = subprocess.run(
        [*BENCH, name, "--quick", "--rows", "128", "--record", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob(f"{name}-part-*.json")
    (case,) = json.loads(file.read_text())["cases"]
    ours = {"graphfuse", "graphfuse_dependent"} | ({"graphfuse_one_kernel"} if name == "qk-norm" else set())
    measured = {peer: entry for peer, entry in case["peers"].items() if "us" in entry}
    assert ours | {"torch_compile", "torch_eager", "stream"} <= set(measured), case["peers"]
    kernels = {peer: measured[peer]["note"].count("rows[") for peer in ours}
    assert kernels == {peer: 2 if name == "qk-norm" and peer != "graphfuse_one_kernel" else 1 for peer in ours}
    for peer, entry in measured.items():
        linked = entry["dependent_launch"]  # the second kernel of a plan begins early in any case
        assert linked in (None, peer.endswith("_dependent") or kernels.get(peer) == 2), (peer, entry)
    # Nobody who is there is wrong.
    assert not [entry for entry in case["peers"].values() if "error" in entry], case["peers"]


@pytest.mark.parametrize(
    "name, rows", [("norm-add-norm", 16), ("layernorm", 4096), ("softmax", 8192), ("silu-mul-fp8", 1)]
)
def test_the_benches_of_other_families_measure_who_is_there(name, rows, tmp_path):
    command = [*BENCH, name, "--quick", "--rows", str(rows), "--record", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob(f"{name}-part-*.json")
    for case in json.loads(file.read_text())["cases"]:
        measured = {peer: entry for peer, entry in case["peers"].items() if "us" in entry}
        assert {"graphfuse", "torch_compile", "torch_eager", "stream"} <= set(measured), case["peers"]
        assert measured["graphfuse"]["note"].count("rows[") == 1
        if name == "norm-add-norm":
            assert measured["graphfuse_norm_add_then_norm"]["note"].count("rows[") == 2
            assert "graphfuse_norm_then_add_norm" in measured
        assert not [entry for entry in case["peers"].values() if "error" in entry], case["peers"]


def test_the_training_phase_is_measured_beside_the_inference_phase(tmp_path):
    command = [*BENCH, "rmsnorm-training", "--quick", "--columns", "1024", "--record", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("rmsnorm-training-part-*.json")
    cases = json.loads(file.read_text())["cases"]
    assert [case["output"] for case in cases] == ["bf16", "fp32"]
    for case in cases:
        measured = {peer: entry for peer, entry in case["peers"].items() if "us" in entry}
        assert {"graphfuse", "graphfuse_inference", "stream"} <= set(measured), case["peers"]
        assert measured["graphfuse"]["note"] == measured["graphfuse_inference"]["note"]
        assert not [entry for entry in case["peers"].values() if "error" in entry], case["peers"]


def test_a_finished_run_is_not_measured_again(tmp_path):
    few = ["--quick", "--rows", "1560", "--columns", "64", "--peers", "graphfuse", "--record", str(tmp_path)]
    env = ["env", "GIT_COMMIT=0123456789"]  # a commit that is not dirty
    for expected in ("3 of 3", "0 of 3"):
        done = subprocess.run([*env, *BENCH, *few, "--resume"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{expected} cases to measure" in done.stdout
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    done = subprocess.run(["env", "GIT_COMMIT=another", *BENCH, *few, "--resume"], capture_output=True, text=True)
    assert done.returncode == 2 and f"{file} is not gone on with: its commit is 0123456789" in done.stderr
    assert file.read_text() == before and "Traceback" not in done.stderr


@pytest.mark.parametrize("bench", profile.CASES)
def test_what_is_profiled_runs_and_says_what_it_is(bench):
    ran = collections.defaultdict(list)
    for places in profile.planned(bench, graphfuse.create_handle("cuda")).values():
        done = subprocess.run(profile.start(bench, places), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("[{"))
        for launch in json.loads(line):
            ran[launch["place"]].append(launch)
    assert sorted(ran) == list(range(len(profile.CASES[bench])))
    for place, case in enumerate(profile.CASES[bench]):
        for launch in ran[place]:
            assert (vars(case) | {"bytes": case.moved}).items() <= launch.items()
            assert launch["note"].startswith("rows") and launch["knobs_from"]
        whole, *parts = (launch["elements"] for launch in ran[place])
        if bench == "qk-norm-rope-cache":  # Q and K, and V beside them
            assert len(parts) == 1 and whole + sum(parts) == case.rows * case.columns
        else:
            assert whole == (sum(parts) or case.rows * case.columns)  # a forward, and a backward for each of its parts
