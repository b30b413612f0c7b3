"""The bench of models: what is made, what is compared, what a case leaves, what is judged."""

import copy
import dataclasses
import json
import subprocess
import sys
import time
import weakref

import pytest
import torch
from typer.testing import CliRunner

import graphfuse.torch as ours
from graphfuse import cli
from graphfuse.benchmarks import command, record, tables
from graphfuse.benchmarks.programs import model_check, model_counts, model_record, model_session, models, render
from graphfuse.benchmarks.programs.model_cases import CASES, DECODE, MODELS, PREFILL, STEP, WORKS, Block, cases
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED, WAYS, Running, Way, compiled
from graphfuse.benchmarks.results import Results
from graphfuse.runtime import timing
from support import bench_record
from support.small_models import SMALL

OWN = (OURS, OURS_COMPILED)
DECODERS = [model.name for model in MODELS.values() if model.is_decoder]
PLAIN = WAYS[0]
# Inductor takes seconds a case; what it is given is the same.
TRACED = dataclasses.replace(WAYS[1], make=compiled("aot_eager"))


def small(name: str):
    model = MODELS[name]
    if model.is_decoder:
        shapes = {PREFILL.name: (1, 16), DECODE.name: (3, 1), STEP.name: (2, 8)}
        return dataclasses.replace(model, fields={**model.fields, **SMALL}, shapes=shapes)
    if name == "dit":
        shapes = {work: (1, 16, 64) for work in model.shapes}
        return dataclasses.replace(model, arguments=(64, 4), shapes=shapes, conditions=((1, 64),))
    if name == "wan-dit":
        return dataclasses.replace(model, heads=2, head=32, inner=96, grid=(2, 2, 3), text=5)
    return dataclasses.replace(model, arguments=(16,), shapes={PREFILL.name: (1, 16, 2, 6, 8)})


def measured(name: str, ways, works=WORKS) -> dict[str, dict]:
    """Of each work, the entries of its ways."""
    model = small(name)
    todo = [case for case in cases({name: model}) if case.work in works]
    return {case.work: model_session.measure(case, model, ways, "cpu", 2)["peers"] for case in todo}


def way(name: str, make, **more) -> Way:
    return Way(name, name, make, **more)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_run_with_the_norms_replaced(name):
    pytest.importorskip("transformers", minversion="5.0")
    found = measured(name, (PLAIN, WAYS[2]))
    assert list(found) == list(WORKS)
    for work, entries in found.items():
        assert entries[EAGER]["ms"]["low"] > 0, work
        assert entries[EAGER]["distance"] < 0.02
        with_us = entries[OURS]
        if "absent" in with_us:
            assert not hasattr(ours, "fuse") and with_us == {"absent": "graphfuse.torch has no fuse"}
            continue
        assert with_us["ms"]["low"] > 0, with_us
        # All norms are: two of a layer at least, and the last one.
        assert 2 * WORKS[work].layers + 1 <= with_us["sites"][0] <= with_us["sites"][1]
        assert entries[EAGER]["ours_over"][OURS] > 0


@pytest.mark.parametrize(
    "name", ["wan-vae", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("dit", "wan-dit"))]
)
def test_blocks_run_every_way(name):
    if name == "wan-dit":
        pytest.importorskip("diffusers", minversion="0.35")
    for entries in measured(name, (PLAIN, TRACED, *WAYS[2:])).values():
        for each in WAYS:
            if reason := each.why_absent(None, 0):
                assert entries[each.name] == {"absent": reason}
            else:
                assert entries[each.name]["ms"]["low"] > 0, entries[each.name]
                assert entries[each.name]["distance"] < 0.02
                assert "kernels" not in entries[each.name] and "peak_mb" not in entries[each.name]


def test_a_decoding_step_is_compiled():
    pytest.importorskip("transformers", minversion="5.0")
    found = measured("qwen3-8b", (PLAIN, TRACED), (DECODE.name,))[DECODE.name]
    assert found[COMPILED]["ms"]["low"] > 0, found


@pytest.mark.some(2)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoding_step_is_that_of_a_growing_cache(name):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    module, (x,) = small(name).make(DECODE, "cpu")
    module, x = module.float(), x.float()
    growing = transformers.DynamicCache(config=module.model.config)
    for i, held in enumerate(module.held):
        growing.update(held.keys[:, :, :-1], held.values[:, :, :-1], i)
    with torch.no_grad():
        wanted = module.model(inputs_embeds=x, past_key_values=growing, use_cache=True).last_hidden_state
        found = module(x)
        assert torch.equal(found, module(x))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    keys = module.held[0].keys
    assert not torch.equal(keys[:, :, -2], keys[:, :, -1])


def test_the_same_model_each_time():
    first, again = (small("dit").make(STEP, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True))
    gammas = [p for n, p in small("wan-vae").make(PREFILL, "cpu")[0].named_parameters() if "norm" in n]
    assert len(gammas) == 4 and all(p.std() > 0.1 for p in gammas)


def test_sizes_are_of_the_models():
    assert len(CASES) == 3 * len(DECODERS) + 4 and len(set(map(str, CASES))) == len(CASES)
    assert {str(c): c.size for c in CASES}["llama-3-8b/prefill"] == "1x4096"
    assert {str(c): c.size for c in CASES}["wan-dit/prefill"] == "1x32760x1536"
    assert {c.layers for c in CASES if c.work == STEP.name} == {4}
    widths = {name: MODELS[name].fields["hidden_size"] for name in DECODERS}
    assert widths == {
        "llama-3-8b": 4096,
        "gemma-2-9b": 3584,
        "gemma-3-12b": 3840,
        "qwen3-8b": 4096,
        "gpt-oss-20b": 2880,
        "olmo-2-7b": 4096,
    }


class Scaled(torch.autograd.Function):
    """What it is given, and another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient


def other_weight(case, module):
    with torch.no_grad():
        module.blocks[0].norm2.gamma.mul_(1.05)
    return Running(module)


def other_gradient(case, module):
    return Running(lambda x, condition: Scaled.apply(module(x, condition)))


def no_gradient(case, module):
    module.blocks[1].up.weight.requires_grad_(False)
    return Running(module)


def nothing(case, module):
    return Running(lambda *inputs: module(*inputs) * float("nan"))


def another_shape(case, module):
    return Running(lambda *inputs: module(*inputs)[0])


@pytest.mark.parametrize(
    "name, work, make, said",
    [
        ("wan-vae", PREFILL, other_weight, "wrong output: 0.0"),
        ("dit", STEP, other_gradient, "wrong gradient of blocks."),
        ("dit", STEP, no_gradient, "gradient of blocks.1.up.weight: only one of it and the unmodified model has that"),
        ("dit", PREFILL, nothing, "wrong output: nan of its size"),
        ("dit", PREFILL, another_shape, "output has shape (16, 64); expected: (1, 16, 64)"),
    ],
)
def test_a_wrong_replacement_ends_the_case(name, work, make, said):
    entries = measured(name, (PLAIN, way("planted", make)), (work.name,))[work.name]
    assert {tuple(entry) for entry in entries.values()} == {("error",)}
    assert all(f"the case ended, planted is wrong: {said}" in entry["error"] for entry in entries.values())


def test_the_bound_is_about_the_unmodified_models_distance():
    exact = {"output": torch.ones(64)}
    found = {"output": torch.full((64,), 1.02)}
    assert model_check.wrong(found, exact, {"output": 0.013}) is None
    assert "0.02 of its size away from float32's, the unmodified model's 0.012; accepted: 0.0189" in model_check.wrong(
        found, exact, {"output": 0.012}
    )


def test_what_fails_fails_alone():
    def broken(case, module):
        raise RuntimeError("no kernel\nhere")

    def slow(case, module):
        try:
            time.sleep(10)
        except Exception:  # as compilers catch what they fail with
            pass
        return Running(module)

    nowhere = way("nowhere", slow, distributions=("no-such-package",))
    ways = (PLAIN, way("broken", broken), way("slow", slow, seconds=0.05), nowhere)
    before = time.monotonic()
    entries = measured("wan-vae", ways)[PREFILL.name]
    assert entries["broken"] == {"error": "RuntimeError: no kernel"}
    assert entries["slow"] == {"error": "slow took more than 0.05 s"} and time.monotonic() - before < 8
    assert entries["nowhere"] == {"absent": "no-such-package is not installed"}
    assert entries[EAGER]["ms"]["low"] > 0


def test_a_model_that_is_not_there_or_cannot_run():
    model = Block("none", "none", "NoSuchBlock", (), {PREFILL.name: (1, 2)})
    (case,) = cases({"none": model})
    assert "NoSuchBlock" in model_session.measure(case, model, (PLAIN,), "cpu", 2)["peers"][EAGER]["error"]
    decoder = dataclasses.replace(MODELS["llama-3-8b"], config="NoSuchConfig")
    (case, *_) = cases({"llama-3-8b": decoder})
    absent = model_session.measure(case, decoder, (PLAIN,), "cpu", 2)["peers"][EAGER]["absent"]
    assert absent.startswith("transformers ")


def test_a_limit_is_lifted_where_nothing_is_late():
    with model_counts.limited(0.02, "this"):
        pass
    time.sleep(0.03)
    with pytest.raises(model_counts.OutOfTime, match="that took more than 0.02 s"), model_counts.limited(0.02, "that"):
        time.sleep(5)


def test_kernels_are_counted_without_copies():
    events = [
        {"cat": "cpu_op", "name": "aten::add"},
        {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>(int)", "dur": 2.5},
        {"cat": "kernel", "name": "row_program", "dur": 3.0},
        {"cat": "gpu_memcpy", "name": "Memcpy"},
        {"cat": "gpu_user_annotation", "name": "row_program"},
        {"cat": "kernel", "name": "row_program", "dur": 1.0},
        {"cat": "kernel", "name": "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "dur": 20.0},
        {"cat": "kernel", "name": "void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)", "dur": 10.0},
        {"cat": "kernel", "name": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>(Params)", "dur": 7.0},
        {"cat": "kernel", "name": "triton_red_fused_convert_element_type_mean_mm_0", "dur": 4.0},
        {"name": "process_name", "ph": "M"},
    ]
    assert model_counts.counted(events) == {
        "kernels": 7,
        "our_kernels": 2,
        "gpu_ms": {"ours": 0.004, "inductor's": 0.004, "attention": 0.007, "products": 0.03, "other": 0.0025},
    }


@pytest.mark.gpu
def test_kernels_and_memory_of_a_call():
    x, weight = torch.randn(1 << 20, device="cuda").view(-1, 1024), torch.ones(1024, device="cuda")

    def call():
        ours.rms_norm(x * 2, weight)

    call()
    counts = model_counts.launched(call)
    assert (counts["kernels"], counts["our_kernels"]) == (2, 1)
    assert counts["gpu_ms"]["ours"] > 0 < counts["gpu_ms"]["other"] and not counts["gpu_ms"]["products"]
    assert model_counts.peak_mb(call) == pytest.approx(8.4, abs=0.1)


@pytest.mark.gpu
def test_a_captured_call_keeps_what_it_works_on():
    seen = []

    def captured():
        x = torch.ones(1 << 22, device="cuda")
        seen.append(weakref.ref(x))
        return timing.capture([lambda: x.mul_(1.0)], least_calls=1)

    sampled = captured()
    torch.cuda.empty_cache()
    assert seen[0]() is not None and sampled.sample() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-8b", "dit"])
def test_cases_on_a_gpu(name):
    if reason := small(name).why_not():
        pytest.skip(reason)
    model = small(name)
    for case in cases({name: model}):
        for way, entry in model_session.measure(case, model, WAYS, "cuda", 2)["peers"].items():
            assert "absent" in entry or entry["ms"]["low"] > 0, (case, entry)
            assert "absent" in entry or entry["kernels"] >= entry["our_kernels"] > (-1, 0)[way in OWN]


def test_targets_are_of_the_slowest_decoder():
    r = Results(bench_record.models())
    verdicts = [target.verdict(r) for target in model_record.TARGETS]
    assert [round(v.value, 2) for v in verdicts] == [1.25, 1.6, 1.25, 1.6, 1.25] and all(v.met for v in verdicts)
    by_name = {model_record.name(case): case for case in r.record["cases"]}
    by_name["dit/prefill"]["peers"][COMPILED]["ours_over"][OURS_COMPILED] = 2.0  # no decoder
    by_name["olmo-2-7b/prefill"]["peers"][COMPILED]["ours_over"][OURS_COMPILED] = 1.0
    verdict = model_record.TARGETS[0].verdict(r)
    assert (verdict.value, verdict.met, verdict.where) == (1.0, False, "olmo-2-7b/prefill")
    for case in r.record["cases"]:
        case["peers"][COMPILED] = {"error": "torch.compile took more than 120 s"}
    assert model_record.TARGETS[0].verdict(r).met is None and model_record.TARGETS[1].verdict(r).met


def test_tables_tell_what_is_missing():
    content = bench_record.models()
    case = content["cases"][0]
    del case["peers"][OURS]["kernels"], case["peers"][OURS]["sites"]
    case["peers"][OURS_COMPILED] = {"absent": "torch.compile has no backend 'graphfuse'"}
    del case["peers"][COMPILED]["ours_over"][OURS_COMPILED]
    r = Results(content)
    times, costs = tables.markdown(model_record.times(r)), tables.markdown(model_record.costs(r))
    first = "| Llama-3-8B | prefill, 2 layers, 1x4096 |"
    eager, compiled_, fused = (f"{ms:.3f} ({0.9 * ms:.3f} to {1.1 * ms:.3f})" for ms in (4.0, 3.0, 2.5))
    assert f"{first} {eager} | {compiled_} | {fused} | - | - | 1.600× |" in times
    assert f"{first} 50, 123 MB, 1.5 s | 50, 123 MB, 1.5 s | 123 MB, 1.5 s | - | 9 kernels | - |" in costs
    assert "| 7 of 9, 9 kernels | 9 kernels |" in costs
    assert "torch.compile, our backend: torch.compile has no backend 'graphfuse' (1 of 22 cases)" in tables.absences(r)
    del content["peers"][OURS_COMPILED]  # not asked for
    assert model_record.times(Results(content)).columns[-2:] == (
        "graphfuse_compile over torch.compile",
        "eager, fused over eager",
    )


def test_the_page_of_its_record(tmp_path):
    text = (render.FOLDER / "models.md").read_text()
    content = bench_record.models()
    content["cases"][1]["peers"][OURS] = {"error": "late"}
    record.write(tmp_path, "models", content["environment"], content)
    once = render.rendered(text, tmp_path)
    assert once.startswith("# Models\n") and "commit 0123456789ab" in once and "transformers 5.0" in once
    assert all(f"| {t.text} |" in once for t in model_record.TARGETS)
    assert "| Gemma-2-9B | decode, 2 layers, 64x1 | 4.000 (3.600 to 4.400) |" in once
    assert "- eager, fused: failed: late (1 of 22 cases)\n<!-- /bench -->" in once


def test_one_model_at_a_time_becomes_one_record(tmp_path, monkeypatch, capsys):
    environment = bench_record.environment()
    monkeypatch.setattr(record, "environment", lambda root: dict(environment))
    known = {name: small(name) for name in ("dit", "wan-vae")}

    def measure(case, *how):
        return model_session.measure(case, known[case.model], *how)

    program = dataclasses.replace(models.PROGRAM, measure=measure)

    def run(only, resume):
        return program.run(program.chosen([only], False), (PLAIN,), tmp_path, resume, 2, "cpu")

    run("wan-vae", resume=False)
    results = run("dit/prefill", resume=True)
    (file,) = tmp_path.iterdir()
    assert file.name == "models-part-nvidia-h200.json"
    content = json.loads(file.read_text())
    assert content == results.record
    assert [model_record.name(case) for case in content["cases"]] == ["dit/prefill", "wan-vae/prefill"]
    assert run("wan-vae", resume=True).record["cases"] == content["cases"]
    out = capsys.readouterr().out
    assert "1 of 1 cases to measure, at most 2 min" in out and "0 of 1 cases" in out
    assert "dit/prefill: eager " in out and str(file) in out
    environment["driver"] = "2.0"
    with pytest.raises(command.ResumeError, match="its driver is 1.2, here it is 2.0"):
        run("dit", resume=True)


def test_failures_are_of_this_run():
    r = Results(bench_record.models())
    assert models.PROGRAM.failures(r, CASES) == []
    r.record["cases"][0]["peers"][OURS] = {"error": "late"}
    assert models.PROGRAM.failures(r, CASES) == [str(CASES[0])] and models.PROGRAM.failures(r, CASES[1:]) == []
    copied = copy.deepcopy(r.record["cases"][0])
    assert model_record.line(copied).endswith("graphfuse failed: late, graphfuse_compile 2.400 ms")


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["models", "--help"], 0, "--only"),
        (["models", "--list", "--only", "dit", "--ways", "eager"], 0, "at most 4 min: 2 cases of 2.2 min at most"),
        (["models", "--only", "llama"], 2, "llama: there are llama-3-8b, "),
        (["models", "--ways", "magic"], 2, "magic: there are eager, "),
        (["models", "--quick", "--record", "x"], 2, "leaves no record"),
        (["models", "--resume"], 2, "give --record"),
        (["models", "--record", __file__], 2, "is no folder"),
        (["models", "--rounds", "1"], 2, "two rounds"),
        (["--quick", "models"], 2, "comes first"),
        (["--list", "no-such-bench"], 2, "models"),
    ],
)
def test_the_command_line(arguments, code, said):
    done = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert done.exit_code == code and said in done.output


def test_the_list_as_json():
    done = CliRunner().invoke(cli.app, ["bench", "models", "--list", "--json", "--only", "wan-vae"])
    found = json.loads(done.stdout)
    assert [case["name"] for case in found["cases"]] == ["wan-vae/prefill"] and list(found["peers"]) == [
        each.name for each in WAYS
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = CliRunner().invoke(cli.app, ["bench", "models"])
    assert done.exit_code == 3 and done.output.startswith("models needs a GPU: ")
    program = [sys.executable, "-m", "graphfuse.benchmarks.programs.models"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("models needs a GPU: ")
