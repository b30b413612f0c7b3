"""Programs of regions as text: read, refused, and taken along into other processes."""

import math
import os
import subprocess
import sys

import pytest
import torch

from graphfuse.base.errors import GraphfuseError, GraphNotSupportedError, SerializedError, VariantPackError
from graphfuse.torch.regions.graphs import RegionGraphs
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.program import Program, ProgramStep
from support.regions import FULL, HALF, PROGRAM, C, T, own, rows

pytestmark = pytest.mark.torch


def test_a_program_is_its_text():
    assert Program.read(PROGRAM.text) == PROGRAM and Program.read(PROGRAM.text).text == PROGRAM.text
    infinite = Program(
        PROGRAM.inputs, (*PROGRAM.steps, ProgramStep("max", {"input0": "@1", "input1": -math.inf})), PROGRAM.outputs
    )
    assert Program.read(infinite.text) == infinite


DAMAGED = [
    ("", "JSONDecodeError"),
    ("[]", "TypeError"),
    ("{}", "KeyError: 'inputs'"),
    ('{"inputs":3,"steps":[],"outputs":[]}', "TypeError"),
    ('{"inputs":[],"steps":[],"outputs":[]}', "it has no inputs"),
    (PROGRAM.text[:-3], "JSONDecodeError"),
    (PROGRAM.text.replace('"in1"', '"x"'), "its inputs are ['in0', 'x']; accepted: in0, in1"),
    (PROGRAM.text.replace('"op":"mul"', '"op":"mull"'), "step 1: op 'mull', which the op table lacks"),
    (PROGRAM.text.replace('"@0"', '"@7"'), "step 1: mul reads '@7' as b, which nothing before it makes"),
    (PROGRAM.text.replace('"@1"', "true"), "step 2: mul reads True as a"),
    (PROGRAM.text.replace('"ADD"', '"ADDS"'), "step 0: reduction has mode 'ADDS'; accepted: ADD, "),
    (PROGRAM.text.replace('"nn"', '"nx"'), "in0 has axes 'nx'; accepted: 2 of n, 1 and -"),
    (PROGRAM.text.replace('"axes":"nn"', '"axes":"-n"'), "accepted: what has all rows and columns"),
    (PROGRAM.text.replace('"step":2', '"step":9'), "its outputs are of steps [9, 0]; accepted: different ones of 3"),
    (PROGRAM.text.replace('"FLOAT"', '"FLOTE"'), "has data type 'FLOTE'"),
    (PROGRAM.text.replace('"dtype":"BFLOAT16","inputs"', '"dtype":"B16","inputs"'), "mul makes 'B16'"),
    (PROGRAM.text.replace('"input":', '"inputt":'), "step 0: reduction is given inputt; accepted: input, mode"),
    (PROGRAM.text.replace('"b":"@0"', '"a":"@0"'), "step 1: mul lacks b"),
    (PROGRAM.text.replace('"op"', '"oq"'), "TypeError"),
]


@pytest.mark.parametrize(("text", "why"), DAMAGED, ids=[why for _, why in DAMAGED])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_damaged_texts(text, why, device):
    with pytest.raises(SerializedError) as error:
        region([rows(FULL).to(device), rows(HALF, 1, (C,)).to(device)], text)
    assert why in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_do_not_fit(device):
    x, w = rows(FULL).to(device), rows(HALF, 1, (C,)).to(device)
    for given in ([], [x], [x, w, w], [x, w[:3]], [x.view(2, 2, C), w]):
        with pytest.raises(VariantPackError):
            region(given, PROGRAM.text)
    with pytest.raises(GraphfuseError, match="in0 is of torch.int32"):
        region([x.int(), w], PROGRAM.text)


def test_graphs_of_a_text_are_made_once():
    assert RegionGraphs.of(PROGRAM.text) is RegionGraphs.of(PROGRAM.text)


# Other processes


class OfRegion(torch.nn.Module):
    def forward(self, x, w):
        return region([x, w], PROGRAM.text)


def test_an_exported_program_in_another_process(tmp_path):
    x, w = rows(FULL, shape=(6, C)), rows(HALF, 1, (C,))
    varies = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(OfRegion(), (x, w), dynamic_shapes=(varies, None))
    path, given, results = (tmp_path / name for name in ("program.pt2", "given.pt", "results.pt"))
    torch.export.save(program, path)
    x = rows(FULL, 2, (9, C))
    torch.save((x, w), given)
    text = f"""
import torch
import graphfuse.torch
program = torch.export.load({str(path)!r})
torch.save(program.module()(*torch.load({str(given)!r})), {str(results)!r})
"""
    subprocess.run([sys.executable, "-c", text], check=True)
    for one, other in zip(torch.load(results), own(x, w), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.further
@pytest.mark.skipif(torch.cuda.is_available(), reason="of tensors on a CPU")
def test_a_program_compiled_ahead_of_time(tmp_path):
    """By AOTInductor, for any number of rows."""
    varies = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(OfRegion(), (rows(FULL), rows(HALF, 1, (C,))), dynamic_shapes=(varies, None))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    run = torch._inductor.aoti_load_package(path)
    for count in (T, 9):
        x, w = rows(FULL, 2, (count, C)), rows(HALF, 1, (C,))
        for one, other in zip(run(x, w), own(x, w), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_differentiated(strict):
    run = RegionOperator.of(PROGRAM.text).run

    class OfFunction(torch.nn.Module):
        def forward(self, x, w):
            return run(x, w)

    x, w = rows(FULL), rows(HALF, 1, (C,))
    call = torch.export.export(OfFunction(), (x, w), strict=strict).module()
    grads = [
        torch.autograd.grad(f(leaf, w)[0].sum(), leaf)[0] for f in (call, own) for leaf in [rows(FULL).requires_grad_()]
    ]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.05)
    with pytest.raises(GraphNotSupportedError, match="is differentiated by torch.func"):
        torch.func.grad(lambda x: call(x, w)[1].sum())(x)
    with pytest.raises(GraphNotSupportedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: call(x, w)[1], (x,), (x,))


@pytest.mark.further
def test_a_second_process_with_what_inductor_kept(tmp_path):
    text = f"""
import torch
import graphfuse.torch
from torch._dynamo.utils import counters
from torch.nn import functional as F
function = lambda x, w: F.gelu(F.rms_norm(x, ({C},), w, 1e-6))
x, w = torch.linspace(-1, 1, 4 * {C}).view(4, {C}), torch.ones({C})
compiled = torch.compile(function, backend="graphfuse", options={{"decline": False}})
torch.testing.assert_close(compiled(x, w), function(x, w))
assert "region" in str(graphfuse.torch.compile_report()) or graphfuse.torch.compile_report().replaced
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        hits.append(done.stdout.split())
    assert hits[0] == ["0", "0"] and "1" in hits[1]
