"""`graphfuse bench`: what is refused, what is listed, how a run goes."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from graphfuse import cli
from graphfuse.benchmarks import command, record
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.results import Results
from graphfuse.benchmarks.rmsnorm_silu import BENCH, RmsNormSiluCase
from graphfuse.benchmarks.sizes import OUTPUTS
from support import bench_record
from support.bench_runs import wall_clock

SMALL = [RmsNormSiluCase(33, 64, output) for output in OUTPUTS]


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, ["bench", *arguments])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no-such-bench"], "rmsnorm-silu"),
        (["--peers", "nobody"], "flashinfer"),
        (["--output", "fp64"], "nvfp4"),
        (["--rows", "7"], "399360"),
        (["--quick", "--columns", "128"], "fewer filters"),
        (["--quick", "--resume"], "give --record"),
        (["--quick", "--record", __file__], "--record"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.output


def test_listing_needs_no_gpu():
    done = invoke("rmsnorm-silu", "--list", "--quick", "--output", "nvfp4", "--peers", "flashinfer")
    assert done.exit_code == 0
    assert done.output.count("  case nvfp4 ") == 4 and done.output.count("  peer ") == 3


def test_without_a_bench_all_are_listed():
    done = invoke("--list")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[: len(BENCHES) + 3]] == [*BENCHES, "models", "followers", "wan-vae"]
    assert all(f"{b.title}; {len(b.cases)} cases" in line for b, line in zip(BENCHES.values(), lines, strict=False))
    told = json.loads(invoke("--list", "--json").stdout)
    assert list(told["benches"]) == list(BENCHES) and told["programs"] == ["models", "followers", "wan-vae"]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"{half", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "no record of a bench"),
        (b'{"environment": {}, "peers": {}}', "no record of a bench"),
    ],
)
def test_a_file_that_is_no_record_is_not_gone_on_with(tmp_path, content, said):
    about = {"device": "NVIDIA H200", "commit": "abc"}
    record.path(tmp_path, BENCH.name, about).write_bytes(content)
    with pytest.raises(command.ResumeError, match=f"rmsnorm-silu-.*{said}.*no --resume"):
        command.kept(tmp_path, BENCH, about, ())


def test_what_is_chosen_of_no_bench_is_refused():
    done = invoke("--list", "--rows", "1560")
    assert done.exit_code == 2 and "name it: graphfuse bench BENCH --list" in " ".join(done.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-c", "from graphfuse.cli import app; app()", "bench", "--quick"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and done.stderr.startswith("graphfuse bench needs a GPU: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name",
    [
        "autoencoders",
        "build_time",
        "compile_cost",
        "compiled_functions",
        "cudnn_calls",
        "every_size",
        "heuristics",
        "host_cost",
        "in_a_model",
        "llama",
        "profile",
        "ranking",
        "torch_products",
        "wan_block",
        "wan_vae",
    ],
)
def test_without_a_gpu_the_other_benches_say_so(name):
    program = [sys.executable, "-m", f"graphfuse.benchmarks.programs.{name}"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{name} needs a GPU: ")


def test_the_command_line_is_light():
    code = "import sys, graphfuse.cli; print({'torch', 'numpy', 'graphfuse.benchmarks'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_run_says_how_it_goes_and_what_came_out(capsys):
    from rich.console import Console

    console = Console(width=command.WIDTH)
    peers = (graphfuse.PEER, torch_eager.RMSNORM_SILU, stream.PEER)
    with command._progress(console) as progress:
        entries = list(command._measure(BENCH, SMALL, peers, 90, "cpu", wall_clock(), progress))
    command._report(BENCH, Results(bench_record.record() | {"cases": entries}), console)
    out = capsys.readouterr().out
    assert "[3/3, 0.0 min left] nvfp4 33x64: " in out and "of stream" in out
    assert "dependent launch, graphfuse: not recorded" in out
    assert "targets" in out and "torch eager: torch converts nothing to FP4 (1 of 3 cases)" in out
