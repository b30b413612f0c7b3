"""Tables and plots of the docs are those of the records."""

import copy
from pathlib import Path

import pytest

from graphfuse import record
from graphfuse.benchmarks import host_record, in_a_model, llama, plot, profile, render
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.results import Results
from support import bench_record

ROOT = Path(__file__).resolve().parents[2]


def test_docs_are_as_their_records():
    for name in render.FILES:
        text = (ROOT / name).read_text()
        assert "<!-- bench:" in text
        assert render.rendered(text, ROOT / "docs" / "records") == text, f"{name}: run make bench-docs"


@pytest.mark.parametrize("kind", BENCHES)
def test_plots_are_of_their_records(kind):
    results = Results.read(ROOT / "docs" / "records" / f"{kind}-{render.DEVICE}.json")
    for output in results.outputs if results else ():
        assert f"record {plot.digest(results)}" in (ROOT / "docs" / plot.name(kind, output)).read_text()


def test_marked_places_follow_the_record(tmp_path):
    text = "before\n<!-- bench:rmsnorm-silu/sizes -->\n<!-- /bench -->\nafter\n"
    empty = render.rendered(text, tmp_path)
    assert render.NONE in empty and empty.startswith("before\n") and empty.endswith("after\n")
    content = bench_record.record()
    record.write(tmp_path, "rmsnorm-silu", content["environment"], content)
    once = render.rendered(empty, tmp_path)
    assert "| bytes moved | bf16 | fp8_e4m3 | nvfp4 |" in once and render.NONE not in once
    assert render.rendered(once, tmp_path) == once
    other = copy.deepcopy(content)
    other["cases"][0]["peers"]["graphfuse"]["us"]["median"] *= 2
    record.write(tmp_path, "rmsnorm-silu", content["environment"], other)
    assert render.rendered(once, tmp_path) != once


@pytest.mark.parametrize("name", render.FILES)
def test_the_docs_own_places_render(name, tmp_path):
    for bench in BENCHES:
        content = bench_record.record(bench)
        record.write(tmp_path, bench, content["environment"], content)
    programs = {"host-cost": bench_record.host_cost, "in-a-model": bench_record.chains}
    for kind, make in (programs | {"llama": bench_record.llama_model}).items():
        record.write(tmp_path, kind, content["environment"], make())
    for bench in profile.CASES:
        record.write(tmp_path, f"{bench}-profile", content["environment"], bench_record.profile())
    text = render.rendered((ROOT / name).read_text(), tmp_path)
    assert render.NONE not in text and "commit 0123456789ab" in text
    for bench in BENCHES.values():  # in the overview, and in a section
        plots = [plot.name(bench.name, output) for output in {case.output for case in bench.cases}]
        said = [bench.title] if name == "README.md" else [*plots, *(t.text for t in bench.targets)]
        assert all(one in text for one in said), bench.name
    if "bench:rmsnorm-silu-profile" in text:
        assert "| nvfp4 399360x1024 | 300.2 | 1.75 | 52 % | 58 | 3.38 | 20.75 | 57 / 42 / 68 / - % |" in text
        assert (
            "| bf16 399360x1024 | - | - | 52 % |" in text
            and "not selected 30 %, long scoreboard 25 %, wait 20 % |" in text
        )
        assert "- cuDNN, mode A: in 80 of 80 cases" in text and "- FlashInfer: in none of 80 cases" in text
    if "bench:host-cost" in text:
        assert "| graph.execute | 8.00 (2.00×) | 8.00 (2.00×) | 8.00 (2.00×) | 8.00 (2.00×) |" in text
        assert "| Quack | absent: quack-kernels is not installed | - | - | - |" in text
        assert "| functional.rmsnorm | 8.00 (9.00) | 10.00 (11.00) | 1.25 |" in text
        assert "| functional.rmsnorm, random shapes and addresses | 100,000 | 4,096 | 0 |" in text
        assert "flashinfer-python 1.0" in text and "quack-kernels None" not in text
        assert "| bf16 1x2048 | 100.00 ± 3.00 | 2.00 ± 0.06 | 2.25 ± 0.07 | 2.50 ± 0.07 |" in text
        assert "| bf16 8192x8192 | -0.24 % | -0.49 % |" in text
        assert "| training step, 4 x 512 tokens | 4.00 (3.60 to 4.40) | 5.00 (4.50 to 5.50) |" in text
        assert all(f"| {t.text} |" in text for t in (*in_a_model.BENCH.targets, *host_record.TARGETS, *llama.TARGETS))


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_a_record_of_it_makes_its_section(bench, tmp_path):
    content = bench_record.record(bench.name)
    text = f"<!-- bench:{bench.name}/section -->\n<!-- /bench -->\n<!-- bench:overview -->\n<!-- /bench -->\n"
    assert render.rendered(text, tmp_path).count(render.NONE) == 2
    record.write(tmp_path, bench.name, content["environment"], content)
    once = render.rendered(text, tmp_path)
    assert f"\n## {bench.title}\n" in once and "not measured" not in once
    assert all(peer.title in once for peer in bench.peers)
    for output in {case.output for case in bench.cases}:
        count = sum(case.output == output for case in bench.cases)
        assert f"| {bench.title} | {output} | {count} |" in once
    assert render.rendered(once, tmp_path) == once


@pytest.mark.parametrize("name", ["rmsnorm-silu", "rmsnorm-backward"])
def test_the_same_record_gives_the_same_plots(name, tmp_path):
    pytest.importorskip("matplotlib")
    results = Results(bench_record.record(name))
    (tmp_path / "again").mkdir()
    files = plot.write(results, name, tmp_path)
    assert [f.name for f in files] == [f"{name}-{o}.svg" for o in results.outputs]
    for file, again in zip(files, plot.write(results, name, tmp_path / "again"), strict=True):
        text = file.read_text()
        assert text == again.read_text() and plot.digest(results) in text
    # Every peer that has times is named.
    assert all(results.title(peer) in files[0].read_text() for peer in results.record["peers"])
    assert "FlashInfer" not in files[-1].read_text() or name != "rmsnorm-silu"  # which has no NVFP4 here


def test_points_of_equal_bytes_are_one():
    results = Results(bench_record.record())
    points = plot.points(results, "bf16", "graphfuse")
    assert len({round(mb, 1) for mb, _ in points}) == len(points) < 40
    assert [mb for mb, _ in points] == sorted(mb for mb, _ in points)
