"""The kernel cache across processes, and what a build costs."""

import json
import subprocess
import sys

import pytest

from support import example_scripts

pytestmark = pytest.mark.gpu

JOB = """
import hashlib, json, time, torch, graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase
from graphfuse.runtime import cache
digests = []
for rows, columns in ((8, 512), (16, 512), (8, 96)):
    graph = graphfuse.pygraph(intermediate_data_type=data_type.FLOAT)
    x = graph.tensor([rows, columns], data_type=data_type.BFLOAT16, name="x")
    weight = graph.tensor([1, columns], data_type=data_type.BFLOAT16, name="weight")
    y = graph.rmsnorm(x, weight, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    graph.swish(y).set_output().set_data_type(data_type.BFLOAT16).set_name("out")
    graph.build([heur_mode.OPENSOURCE])
    source = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(rows, columns, device="cuda", generator=source).bfloat16()
    w = torch.ones(1, columns, device="cuda").bfloat16()
    out = torch.empty_like(a)
    graph.execute({"x": a, "weight": w, "out": out})
    digests.append(hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
print(json.dumps({"digests": digests, **vars(cache.statistics())}))
"""


def finish(process: subprocess.Popen) -> dict:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def test_a_second_process_compiles_nothing(python, tmp_path):
    first = finish(python(JOB, GRAPHFUSE_CACHE_DIR=str(tmp_path)))
    second = finish(python(JOB, GRAPHFUSE_CACHE_DIR=str(tmp_path)))
    # Another row count, for which the same knobs are chosen, is the same kernel, in memory already.
    assert (first["compiled"], first["memory_hits"], first["disk_hits"]) == (2, 1, 0)
    assert (second["compiled"], second["memory_hits"], second["disk_hits"]) == (0, 1, 2)
    assert first["digests"] == second["digests"]


def test_eight_processes_race_on_a_cold_cache(python, tmp_path):
    racing = [python(JOB, GRAPHFUSE_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    results = [finish(process) for process in racing]
    assert len({tuple(r["digests"]) for r in results}) == 1
    assert finish(python(JOB, GRAPHFUSE_CACHE_DIR=str(tmp_path)))["compiled"] == 0


def test_the_build_time_benchmark_measures_what_it_says(tmp_path):
    """One process compiles, the next finds the kernel on disk. The times themselves are the benchmark's record."""
    command = [sys.executable, "-m", "graphfuse.benchmarks.programs.build_time", "--repeats", "1", "--record", tmp_path]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (file,) = tmp_path.glob("build-time-*.json")
    medians = json.loads(file.read_text())["medians_ms"]
    assert medians["cold"]["compiled"] == 1 and medians["warm"]["compiled"] == 0


@pytest.mark.parametrize("path", example_scripts.EXAMPLES, ids=lambda p: p.stem)
def test_examples(path, tmp_path):
    example_scripts.run(path, cwd=tmp_path)
