"""The bench of what stands around norms: its functions, what is wrong, what a case leaves, what is judged."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from graphfuse import cli
from graphfuse.benchmarks import record, tables
from graphfuse.benchmarks.programs import (
    follower_cases,
    follower_functions,
    follower_session,
    followers,
    model_check,
    render,
)
from graphfuse.benchmarks.programs.follower_cases import BOTH, CASES, FORWARD, FUNCTIONS, FollowerCase
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS_COMPILED, Running, Way
from graphfuse.benchmarks.results import Results
from support import bench_record

SMALL = {"rows": 24, "columns": 256}


def behind(backend: str, **options):
    """A way's `make` without a compiler, which takes seconds; what it is given is the same."""
    return lambda case, function: Running(torch.compile(function, backend=backend, **options))


PLAIN, TRACED, WITH_US = (
    dataclasses.replace(way, make=make)
    for way, make in zip(
        followers.BENCH.peers,
        (followers.BENCH.peers[0].make, behind("aot_eager"), behind("graphfuse", options={"then": "aot_eager"})),
        strict=True,
    )
)


def measured(name: str, work: str, ways, rounds=2) -> dict[str, dict]:
    return follower_session.measure(FollowerCase(name, work, **SMALL), ways, "cpu", rounds)["peers"]


@pytest.mark.some(8, 12)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_right_in_every_way(name):
    for work in (FORWARD, BOTH)[: 1 + FUNCTIONS[name].has_gradients]:
        entries = measured(name, work, (PLAIN, TRACED, WITH_US))
        for way, entry in entries.items():
            assert "error" not in entry, (work, way, entry["error"])
            assert entry["us"]["low"] > 0 and entry["rounds"] == 2 and entry["distance"] < 0.06
            assert entry["ours_over"][OURS_COMPILED]["median"] > 0
        assert entries[OURS_COMPILED]["became"] or name.startswith(("l2", "softmax", "log-", "masked-", "cross-"))


def test_functions_and_sizes():
    assert len(FUNCTIONS) >= 24 and len(set(map(str, CASES))) == len(CASES)
    assert {case.rows for case in CASES} == {1024, 4096, 32768} and {case.columns for case in CASES} == {4096}
    assert {one.dtype for one in FUNCTIONS.values()} == {"bfloat16", "float16"}
    assert [name for name, one in FUNCTIONS.items() if one.is_dynamic] == ["rms-gelu-dynamic"]
    assert set(follower_functions.RUNS) == set(FUNCTIONS)
    assert set(follower_functions.KEPT) == {name for name, one in FUNCTIONS.items() if one.drops}
    assert len({one.title for one in FUNCTIONS.values()}) == len(FUNCTIONS)
    assert str(CASES[0]) == "rms/forward/1024x4096" and "rms/both/4096x4096" in map(str, CASES)


def test_the_same_tensors_each_time():
    function, case = FUNCTIONS["masked-softmax"], FollowerCase("masked-softmax", BOTH, **SMALL)
    first, again, other = (follower_functions.tensors(function, case, seed, "cpu") for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first) and not torch.equal(first["x"], other["x"])
    assert 0.1 < first["m"].float().mean() < 0.25 and first["x"].requires_grad and not first["m"].requires_grad


def way(name: str, make) -> Way:
    return Way(name, name, make)


def scaled(case, function):
    return Running(lambda x, w: 1.05 * function(x, w))


def without_a_gradient(case, function):
    return Running(lambda x, w: function(x, w.detach()) + 0 * w)


def never_dropped(case, function):
    return Running(lambda **given: function(**given, dropout=lambda t: t))


def failing(case, function):
    raise RuntimeError("no kernel\nhere")


@pytest.mark.parametrize(
    "name, work, make, said",
    [
        ("rms", FORWARD, scaled, "wrong output 0: 0.0498"),
        ("rms", BOTH, without_a_gradient, "wrong gradient of w: 1 of its size"),
        ("rms-dropout", FORWARD, never_dropped, "0 of all elements are dropped, not 0.1"),
        ("rms", FORWARD, failing, "RuntimeError: no kernel"),
    ],
)
def test_a_way_that_is_wrong_or_fails_is_not_timed(name, work, make, said):
    entries = measured(name, work, (PLAIN, way("planted", make)))
    assert entries["planted"].keys() == {"error"} and said in entries["planted"]["error"]
    assert entries[EAGER]["us"]["low"] > 0


@pytest.mark.parametrize("name", ["rms-dropout", "dropout-add-rms"])
def test_what_was_dropped_is_seen(name):
    function, case = FUNCTIONS[name], FollowerCase(name, FORWARD, **SMALL)
    given, drawn = follower_functions.tensors(function, case, 0, "cpu"), torch.Generator().manual_seed(1)
    mask = torch.rand(given["x"].shape, generator=drawn) > follower_cases.RATE
    dropped = {"dropout": lambda t: t * mask / (1 - follower_cases.RATE)}
    found = follower_session.values(lambda **given: follower_functions.RUNS[name](**given, **dropped), given)
    kept = follower_functions.KEPT[name]([*found.values()], given)
    assert (kept == mask).float().mean() > 0.98  # an x that is lost in the sum cannot be seen
    assert model_check.distances(found, follower_session.Reference(function, given).of(found))["output 0"] < 0.02


def test_targets_and_tables():
    r = Results(bench_record.followers())
    found = [target.verdict(r) for target in followers.TARGETS]
    assert [(round(v.value, 3), v.met) for v in found] == [(0.8, True), (0.8, True), (1.25, False), (1.25, True)]
    entry = r.record["cases"][0]
    entry["peers"][COMPILED]["ours_over"][OURS_COMPILED]["median"] = 1.03
    verdict = followers.TARGETS[0].verdict(r)
    assert (round(verdict.value, 2), verdict.met, verdict.where) == (1.03, False, str(CASES[0]))
    entry["peers"][OURS_COMPILED] |= {"became": [], "left": ["the operator would move 4 bytes"]}
    text = tables.markdown(followers.times(FORWARD)(r))
    assert "| 1.030 (0.784 to 0.816) | the operator would move 4 bytes |" in text
    assert followers.line(entry).endswith("graphfuse_compile 16.00 us, ours over torch.compile 1.030")
    entry["peers"] = {COMPILED: {"error": "late"}}
    assert followers.line(entry).endswith(": torch_compile failed: late")


def test_the_page_of_its_record(tmp_path):
    content = bench_record.followers()
    record.write(tmp_path, "followers-part", content["environment"], content)
    once = render.rendered((render.FOLDER / "followers.md").read_text(), tmp_path)
    assert "commit 0123456789ab" in once and all(f"| {t.text} |" in once for t in followers.TARGETS)
    assert "| RMSNorm → GELU | 4096 | 40.0 (36.0 to 44.0) | 20.0 (18.0 to 22.0) |" in once


def test_a_record_is_gone_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "environment", lambda root: bench_record.environment())
    asked = []

    def measure(case, *how):
        asked.append(str(case))
        return follower_session.measure(dataclasses.replace(case, **SMALL), *how) | vars(case)

    program = dataclasses.replace(followers.PROGRAM, measure=measure)
    for only, resume in (("rms/forward/4096x4096", False), ("rms/forward/1024x4096", True)):
        results = program.run(program.chosen([only], False), (PLAIN,), tmp_path, resume, 2, "cpu")
    assert asked == ["rms/forward/4096x4096", "rms/forward/1024x4096"]
    (file,) = tmp_path.iterdir()
    assert file.name == "followers-part-nvidia-h200.json" and json.loads(file.read_text()) == results.record
    assert [followers.name(case) for case in results.record["cases"]] == asked[::-1]
    assert "rms/forward/1024x4096: eager " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--help"], 0, "--only"),
        (["--list", "--only", "rms-gelu", "--ways", "eager"], 0, "6 cases of 1.5 min at most"),
        (["--list", "--quick"], 0, f"{len(FUNCTIONS)} cases of "),
        (["--only", "gelu"], 2, "gelu: there are rms, "),
        (["--ways", "graphfuse"], 2, "graphfuse: there are eager, torch_compile, graphfuse_compile"),
        (["--quick", "--record", "x"], 2, "leaves no record"),
    ],
)
def test_the_command_line_of_followers(arguments, code, said):
    done = CliRunner().invoke(cli.app, ["bench", "followers", *arguments])
    assert done.exit_code == code and said in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("work", [FORWARD, BOTH])
def test_a_case_on_a_gpu(work):
    entry = follower_session.measure(FollowerCase("rms-gelu", work, 256, 4096), followers.BENCH.peers, "cuda", 2)
    assert all(one["us"]["low"] > 0 for one in entry["peers"].values()), entry
