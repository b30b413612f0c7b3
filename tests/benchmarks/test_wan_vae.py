"""The bench of WAN's VAE: its ways, the time that they may take, what a record keeps of earlier ones."""

import argparse
import dataclasses
import json
import time

import pytest
import torch

from graphfuse.benchmarks.programs import autoencoders, vae_calls, wan_vae, wan_vae_cases
from graphfuse.benchmarks.programs.wan_vae_cases import BY_HAND, CASES, EAGER, OURS, TUNED, WAYS, VideoCase, VideoWay
from support import bench_record

SIZES = {"base_dim": 8, "num_res_blocks": 1}
DECODE, ENCODE = VideoCase("decode", 2, (), 2, 3), VideoCase("encode", 2, (), 2, 3)


def measured(case: VideoCase, ways: dict[str, VideoWay]) -> dict:
    pytest.importorskip("diffusers")
    return vae_calls.measure(case, ways, 2, device="cpu", sizes=SIZES)


@pytest.mark.parametrize("case", [DECODE, pytest.param(ENCODE, marks=pytest.mark.further)], ids=["decode", "encode"])
def test_ways_without_a_compiler_compute_the_same(case):
    found = measured(case, {title: WAYS[title] for title in (EAGER, BY_HAND, OURS)})
    assert all(0 < entry["error"] < 0.1 and entry["ms"]["median"] > 0 for entry in found.values()), found


def test_the_slowest_way_has_its_weights_channels_last_and_both_halves_compiled(monkeypatch):
    pytest.importorskip("diffusers")
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    vae = wan_vae_cases.model(torch.float32, "cpu", **SIZES)
    state = {name: value.clone() for name, value in vae.state_dict().items()}
    made = WAYS[TUNED].make(vae)
    assert compiled == [(half, {"mode": "max-autotune-no-cudagraphs"}) for half in (vae.encoder, vae.decoder)]
    weight = made.decoder.conv_in.weight
    assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())


def test_a_way_that_takes_too_long_or_fails_is_recorded_and_the_others_go_on():
    def slow(vae):
        try:
            time.sleep(10)
        except Exception:  # as compilers catch what they fail with
            pass
        return vae

    def broken(vae):
        raise RuntimeError

    found = measured(DECODE, {TUNED: VideoWay("slow", slow, 0.05), OURS: VideoWay("b", broken), EAGER: WAYS[EAGER]})
    assert found[TUNED] == {"failed": f"{TUNED} took more than 0.05 s"}
    assert found[OURS] == {"failed": "RuntimeError: "} and found[EAGER]["ms"]["low"] > 0


def test_ways_are_chosen_by_their_names():
    assert list(vae_calls.chosen((), None)) == list(WAYS)
    assert vae_calls.chosen(["compile_max_autotune"], None) == {TUNED: WAYS[TUNED]}
    assert vae_calls.chosen(["compile_max_autotune"], 7) == {TUNED: dataclasses.replace(WAYS[TUNED], seconds=7)}


def test_one_more_way_joins_those_of_a_record():
    order = list(map(str, CASES))
    first = vae_calls.merged([], order[0], {OURS: {"ms": 1}, EAGER: {"ms": 2}}, order)
    both = vae_calls.merged(first, order[0], {TUNED: {"ms": 3}}, order)
    assert list(both[0]["ways"]) == [EAGER, TUNED, OURS] and both[0]["ways"][OURS] == {"ms": 1}
    more = vae_calls.merged(both, order[2], {OURS: {"ms": 4}}, order)
    assert [case["name"] for case in more] == [order[0], order[2]]
    assert vae_calls.merged(more, order[2], {}, order[2:]) == more[1:]


def test_what_is_kept_of_a_record_keeps_its_commit(tmp_path, monkeypatch, capsys):
    entry = bench_record.wan_vae_model()["cases"][0]["ways"][OURS]
    monkeypatch.setattr(vae_calls, "measure", lambda case, ways, *more: {title: dict(entry) for title in ways})
    given = argparse.Namespace(
        cases=CASES[:1], order=list(map(str, CASES)), ways=["eager", "fuse"], seconds=None, rounds=2, top=0,
        record=tmp_path, resume=True,
    )  # fmt: skip
    for commit, ways in (("1" * 40, ["eager", "fuse"]), ("2" * 40, ["fuse"])):
        about = {"device": "NVIDIA H200", "commit": commit}
        monkeypatch.setattr(vae_calls.record, "environment", lambda checkout, about=about: about)
        given.ways = ways
        vae_calls.run(wan_vae.STUDY, given)
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    found = {way: entry["commit"][0] for way, entry in content["cases"][0]["ways"].items()}
    assert content["environment"]["commit"] == "2" * 40 and found == {EAGER: "1", OURS: "2"}
    assert vae_calls.commits(content).rows == [(str(CASES[0]), "1" * 12)]
    for case in content["cases"]:
        del case["ways"][EAGER]
    assert not vae_calls.commits(content).rows


def test_cases_that_do_not_run_quickly_are_refused_where_only_those_run(capsys):
    with pytest.raises(SystemExit):
        wan_vae.main(["--quick", "--only", str(CASES[1])])
    assert f"--only {CASES[1]}: there are {CASES[0]}; {CASES[2]}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--ways", "max"],
            "max: there are eager, eager_channels_last, compile, compile_graphfuse, compile_max_autotune, fuse",
        ),
        (["--seconds", "0"], "accepted: a number above 0"),
        (["--only", "decode", "dcode"], "dcode: there are decode-3x60x104"),
        (["--resume"], "give --record FOLDER"),
    ],
)
@pytest.mark.parametrize("program", [wan_vae, autoencoders])
def test_what_is_not_there_is_refused_with_what_is(program, arguments, said, capsys):
    with pytest.raises(SystemExit) as error:
        program.main(arguments)
    said = said.replace(str(CASES[0]), str(program.CASES[0]))
    assert error.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
