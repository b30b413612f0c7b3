"""Records: what is written, and when a run goes on from one."""

import functools
import json
import os

import pytest

from graphfuse.base import settings
from graphfuse.benchmarks import command, record, session
from graphfuse.benchmarks.rmsnorm_silu import BENCH
from graphfuse.benchmarks.untuned import untuned
from support import bench_record


def test_a_record_is_whole_and_compact(tmp_path):
    content = bench_record.record()
    file = record.write(tmp_path, "rmsnorm-silu", content["environment"], content)
    assert json.loads(file.read_text()) == content
    assert [p.name for p in tmp_path.iterdir()] == ["rmsnorm-silu-nvidia-h200.json"]
    assert len(file.read_text().splitlines()) < 20 * 120


def test_a_run_goes_on_only_where_it_would_be_the_same(tmp_path):
    content = bench_record.record()
    about = content.pop("environment")
    kept = functools.partial(command.kept, tmp_path, BENCH)
    assert kept(about, BENCH.peers) == []
    file = record.write(tmp_path, BENCH.name, about, content)
    assert kept(about | {"date": "2030-01-01"}, BENCH.peers) == content["cases"]
    assert kept(about | {"device": "NVIDIA H100"}, BENCH.peers) == []  # whose file is another
    before = file.read_text()
    for other, peers, said in (
        ({"commit": "another"}, BENCH.peers, "its commit is 0123456789abcdef, here it is another; accepted"),
        ({"driver": "9"}, BENCH.peers, "its driver is 1.2, here it is 9"),
        ({}, BENCH.peers[:3], "here they are graphfuse, graphfuse_dependent, cudnn_oss;"),
    ):
        with pytest.raises(command.ResumeError, match=f"{file.name} is not gone on with: .*{said}"):
            kept(about | other, peers)
    assert file.read_text() == before
    dirty = about | {"commit": "0123-dirty"}
    record.write(tmp_path, BENCH.name, dirty, content)
    with pytest.raises(command.ResumeError, match="sources of 0123-dirty may have changed"):
        kept(dirty, BENCH.peers)


def test_a_part_is_no_whole(tmp_path):
    whole = bench_record.record()
    about, cases = whole.pop("environment"), whole["cases"]
    old = record.write(tmp_path, BENCH.name, about | {"commit": "old"}, whole)
    before = old.read_text()
    few = command.keep(tmp_path, BENCH, about, whole | {"cases": cases[:3]})
    assert few.name == "rmsnorm-silu-part-nvidia-h200.json" and old.read_text() == before
    # A run that was stopped goes on from the part, not from the whole one of another commit.
    assert command.kept(tmp_path, BENCH, about, BENCH.peers) == cases[:3]
    some = {name: whole["peers"][name] for name in ("graphfuse", "stream")}
    assert command.keep(tmp_path, BENCH, about, whole | {"peers": some}) == few and old.read_text() == before
    assert command.keep(tmp_path, BENCH, about, whole) == old
    assert json.loads(old.read_text()) == {"environment": about, **whole} and not few.exists()


def test_what_the_user_tuned_does_not_count(monkeypatch, tmp_path):
    """In this process and those that compile for it; its environment stays as it is."""
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path))
    before = dict(os.environ)
    with untuned() as empty:
        assert settings.tuning_dir() == empty != tmp_path and not [*empty.iterdir()]
        assert os.environ == before
        with session.processes(1) as pool:
            assert pool.submit(settings.tuning_dir).result() == empty
    assert settings.tuning_dir() == tmp_path
    with pytest.raises(ZeroDivisionError), untuned():
        raise ZeroDivisionError
    assert settings.tuning_dir() == tmp_path
