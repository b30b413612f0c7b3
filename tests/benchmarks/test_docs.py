"""Tables and plots of the docs are those of the records."""

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest

from graphfuse.benchmarks import record
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.programs import host_record, in_a_model, llama, plot, profile, render
from graphfuse.benchmarks.results import Results
from support import bench_record

ROOT = Path(__file__).resolve().parents[2]


def test_docs_are_as_their_records():
    texts = {file.name: file.read_text() for file in render.files()}
    assert sum("<!-- bench:" in text for text in texts.values()) > len(BENCHES)
    for name, text in texts.items():
        assert render.rendered(text, ROOT / "docs" / "records") == text, f"{name}: run make bench-docs"
        assert render.NONE not in text, f"{name}: a place without a record"


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_every_bench_has_a_page_with_its_title(bench):
    text = (render.FOLDER / f"{bench.name}.md").read_text()
    assert text.startswith(f"# {bench.title}\n") and text.count("\n# ") == 0
    assert f"<!-- bench:{bench.name}/" in text


def test_a_bench_without_a_page_gets_one(tmp_path):
    made = render.add_pages(tmp_path)
    assert {file.stem for file in made} == set(BENCHES)
    text = (tmp_path / "softmax.md").read_text()
    assert text.startswith(f"# {BENCHES['softmax'].title}\n") and render.MARKED.search(text)[2] == "softmax/section"
    (tmp_path / "softmax.md").write_text("# by hand\n")
    assert not render.add_pages(tmp_path)
    assert (tmp_path / "softmax.md").read_text() == "# by hand\n"


@pytest.mark.parametrize("kind", BENCHES)
def test_plots_are_of_their_records(kind):
    results = Results.read(ROOT / "docs" / "records" / f"{kind}-{render.DEVICE}.json")
    for output in results.outputs if results else ():
        assert f"record {plot.digest(results.record)}" in (render.FOLDER / plot.name(kind, output)).read_text()


def test_pictures_by_kind_of_kernel_are_of_their_records():
    files = [*(ROOT / "docs" / "records").glob("wan-vae-*.json")]
    assert files
    for file in files:
        record = json.loads(file.read_text())
        picture = (render.FOLDER / plot.kinds_name("wan-vae", record)).read_text()
        assert f"record {plot.digest(record)}" in picture
        assert all(
            f"{case['name']}: {way}" in picture
            for case in record["cases"]
            for way, w in case["ways"].items()
            if "kinds" in w
        )
        assert plot.kinds_name("wan-vae", record) in (render.FOLDER / "wan-vae.md").read_text()


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


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> dict[str, str]:
    """Every document with tables of made-up records, by its name."""
    folder = tmp_path_factory.mktemp("records")
    for bench in BENCHES:
        content = bench_record.record(bench)
        record.write(folder, bench, content["environment"], content)
    programs = {
        "host-cost": bench_record.host_cost,
        "in-a-model": bench_record.chains,
        "llama": bench_record.llama_model,
        "models": bench_record.models,
        "followers": bench_record.followers,
        "compile-cost": bench_record.compile_cost_model,
        "cudnn-calls": bench_record.cudnn_calls_model,
        "torch-products": bench_record.torch_products_model,
        "wan-block": bench_record.wan_block_model,
        "ranking": bench_record.ranking,
        "all-reduce": bench_record.all_reduce,
        "tensor-parallel": bench_record.tensor_parallel,
        "autoencoders": bench_record.autoencoders_model,
        "every-size": bench_record.every_size_model,
        "compiled-functions": bench_record.compiled_functions_model,
    }
    for kind, make in programs.items():
        record.write(folder, kind, content["environment"], make())
    here, other = content["environment"], content["environment"] | {"device": "NVIDIA H100 80GB HBM3"}
    for bench in BENCHES:
        record.write(folder, bench, other, bench_record.record(bench) | {"environment": other})
        record.write(folder, f"{bench}-part", here, bench_record.record(bench) | {"environment": here})
    for kind in ("followers", "models"):
        record.write(folder, f"{kind}-part", here, programs[kind]())
    for where in (here, other):
        record.write(folder, "wan-vae", where, bench_record.wan_vae_model() | {"environment": where})
    for bench in profile.CASES:
        record.write(folder, f"{bench}-profile", content["environment"], bench_record.profile())
    texts = {file.name: render.rendered(file.read_text(), folder) for file in render.files()}
    assert not [name for name, text in texts.items() if render.NONE in text]
    return texts


def test_places_of_all_benches_render(rendered):
    for bench in BENCHES.values():
        assert f"| {bench.title} |" in rendered["README.md"]
        line = f"| [{bench.title}]({bench.name}.md) |"
        assert f"[{bench.name}-nvidia-h200.json](../records/" in rendered["index.md"].split(line)[1].split("\n")[0]


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_the_page_of_a_bench_renders(bench, rendered):
    text = rendered[f"{bench.name}.md"]
    plots = [plot.name(bench.name, output) for output in {case.output for case in bench.cases}]
    assert "commit 0123456789ab" in text
    assert all(one in text for one in [*plots, *(t.text for t in bench.targets)])


def test_places_of_other_records_render(rendered):
    text = rendered["rmsnorm-silu.md"]
    assert "| nvfp4 399360x1024 | 300.2 | 1.75 | 52 % | 58 | 3.38 | 20.75 | 57 / 42 / 68 / - % |" in text
    assert "| bf16 399360x1024 | - | - | 52 % |" in text
    assert "not selected 30 %, long scoreboard 25 %, wait 20 % |" in text
    assert "- cuDNN, mode A: in 80 of 80 cases" in text and "- FlashInfer: in none of 80 cases" in text
    text = rendered["host-cost.md"]
    assert "| graph.execute | 8.00 (2.00×) | 8.00 (2.00×) | 8.00 (2.00×) | 8.00 (2.00×) |" in text
    assert "| Quack | absent: quack-kernels is not installed | - | - | - |" in text
    assert "| functional.rmsnorm | 8.00 (9.00) | 10.00 (11.00) | 1.25 |" in text
    assert "| functional.rmsnorm, random shapes and addresses | 100,000 | 4,096 | 0 |" in text
    assert "flashinfer-python 1.0" in text and "quack-kernels None" not in text
    assert all(f"| {t.text} |" in text for t in host_record.TARGETS)
    assert "| 1 | 18 | 1.10 | 1.10 | 1.10 |\n| 2 | 18 | 1.20 | 1.20 | 1.20 |" in rendered["tuning.md"]
    text = rendered["in-a-model.md"]
    assert "| bf16 1x2048 | 100.00 ± 3.00 | 2.00 ± 0.06 | 2.25 ± 0.07 | 2.50 ± 0.07 |" in text
    assert "| bf16 8192x8192 | -0.24 % | -0.49 % |" in text
    assert all(f"| {t.text} |" in text for t in in_a_model.BENCH.targets)
    text = rendered["llama.md"]
    assert "| training step, 4 x 512 tokens | 4.00 (3.60 to 4.40) | 5.00 (4.50 to 5.50) |" in text
    assert all(f"| {t.text} |" in text for t in llama.TARGETS)
    text = rendered["cudnn-calls.md"]
    assert "| host time of graph.execute, us | ≤ 8 | 9.000 | not met | - |" in text
    assert "| 512x4096x4096 | 27.0 (24.3 to 29.7) | 28.0 (25.2 to 30.8) |" in text
    text = rendered["torch-products.md"]
    assert "| time over torch's, at worst | ≤ 1.1 | 1.080 | met | matmul 8x8x8 bfloat16 |" in text
    assert (
        "| matmul 8x8x8 bfloat16 | torch + rows | 27.0 (24.3 to 29.7) | 25.0 (22.5 to 27.5) | 1.080 | 0.9 | 300 |"
        in text
    )
    assert "| a problem that ended early | an error | - | - | - |" in text and "| sdpa | torch | 2 | 1 | True |" in text
    text = rendered["ranking.md"]
    assert "| rmsnorm 512x4096 | 4.0 (1.00) | 5.0 (1.25) | - |" in text
    assert "| matmul 512x64x64 | - | 20.0 (1.00) | - |" in text
    text = rendered["all-reduce.md"]
    assert "| 6 x 6144 | 5.00 | 2.00 | 9.00 |" in text
    assert "| times as fast as the best peer, at worst | ≥ 1 | 1.800 | met |" in text
    text = rendered["tensor-parallel.md"]
    assert "| decode: times as fast as torch.compile, with our backend, at worst | ≥ 1.15 | 1.500 | met |" in text
    assert "| qwen3-8b/prefill-1x4096 | 3.000 (2.700 to 3.300) | RuntimeError: none | 2.000 (1.800 to 2.200) |" in text
    text = rendered["compiled-functions.md"]
    assert "| a function | 30.0 (27.0 to 33.0) | 20.0 (18.0 to 22.0) | 0.667 | region |" in text
    assert "| a wrong one | - | - | - | far from eager mode |" in text and "| 1.500 | met | - |" in text
    text = rendered["wan-block.md"]
    assert "| times as fast as torch, at worst | ≥ 1.25 | 1.500 | met | 1x192x4x240x416 |" in text
    assert "| times as fast as torch.compile (max-autotune), at worst | ≥ 1.05 | 1.020 | not met |" in text
    assert "| 1x192x4x240x416 | 100 (90 to 110) | 110 (99 to 121) |" in text
    text = rendered["wan-vae.md"]
    assert "| decode: times as fast as eager, at worst | ≥ 2.1 | 2.500 | met |" in text
    assert "| first decode, kernels kept, seconds | ≤ 2 | 3.000 | not met | - |" in text
    assert "| decode-3x60x104 | fuse | 100.0 (100.0 to 100.0) | 100.0 (100.0 to 100.0) | 0.0200 | 1.00 | 1.0 |" in text
    text = rendered["autoencoders.md"]
    assert "| decode: times as fast as torch.compile, at worst | ≥ 1 | 2.500 | met |" in text


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_a_record_of_it_makes_its_section(bench, tmp_path):
    content = bench_record.record(bench.name)
    text = f"<!-- bench:{bench.name}/section -->\n<!-- /bench -->\n<!-- bench:overview -->\n<!-- /bench -->\n"
    assert render.rendered(text, tmp_path).count(render.NONE) == 2
    record.write(tmp_path, bench.name, content["environment"], content)
    once = render.rendered(text, tmp_path)
    assert "\n## Targets\n" in once and "not measured" not in once
    assert all(peer.title in once for peer in bench.peers)
    for output in {case.output for case in bench.cases}:
        count = sum(case.output == output for case in bench.cases)
        assert f"| {bench.title} | {output} | {count} |" in once
    assert render.rendered(once, tmp_path) == once


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["rmsnorm-silu", "rmsnorm-backward"])
def test_the_same_record_gives_the_same_plots(name, tmp_path):
    pytest.importorskip("matplotlib")
    results = Results(bench_record.record(name))
    (tmp_path / "again").mkdir()
    files = plot.write(results, name, tmp_path)
    assert [f.name for f in files] == [f"{name}-{o}.svg" for o in results.outputs]
    for file, again in zip(files, plot.write(results, name, tmp_path / "again"), strict=True):
        text = file.read_text()
        assert text == again.read_text() and plot.digest(results.record) in text
    # Every peer that has times is named.
    assert all(results.title(peer) in files[0].read_text() for peer in results.record["peers"])
    assert "FlashInfer" not in files[-1].read_text() or name != "rmsnorm-silu"  # which has no NVFP4 here


def test_points_of_equal_bytes_are_one():
    results = Results(bench_record.record())
    points = plot.points(results, "bf16", "graphfuse")
    assert len({round(mb, 1) for mb, _ in points}) == len(points) < 40
    assert [mb for mb, _ in points] == sorted(mb for mb, _ in points)


def test_records_are_of_commits_that_anyone_can_check_out():
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this is no clone with its history")
    known = {*git("rev-list", "HEAD").splitlines()}
    files = [*(ROOT / "docs" / "records").glob("*.json")]
    commits = {c: file.name for file in files for c in re.findall(r'"commit": "(.*?)"', file.read_text())}
    assert files and not {c: name for c, name in commits.items() if git("rev-parse", f"{c}^{{commit}}") not in known}
