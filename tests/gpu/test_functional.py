"""The functional API on a GPU: every function is one generated kernel that does what float64 says."""

import pytest
import torch

from graphfuse import VariantPackError, functional
from graphfuse.functional import problem
from support import oracle
from support.functional_calls import (
    EPS,
    F8,
    F8_WIDE,
    FP4,
    NAMES,
    OPERATORS,
    Tensors,
    call,
    check,
    norm,
    operator_check,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = [name for name in NAMES if "fp4" in name]


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch):
    """Every call of the test is planned as one kernel, of queries and keys one each."""
    used, plan = [], problem.plan
    monkeypatch.setattr(problem, "plan", lambda *a: used.append((a[0], plan(*a))) or used[-1][1])
    yield
    for name, found in used:
        engines = found.plan.engine_and_knobs[0]
        engines = (engines,) if isinstance(engines, str) else engines
        assert engines == ("rmsnorm",) * (2 if name == "qk_rmsnorm" else 1), f"{name}\n{found.plan}"


def made(name, shape=(333, 1024), dtype=torch.bfloat16, weight=None, seed=0):
    return call(name, shape, dtype, weight, Tensors(DEVICE, seed))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_types(name, dtype):
    for weight in (dtype, torch.float32):
        c = made(name, dtype=dtype, weight=weight)
        check(c.run(), c.exact)


@pytest.mark.parametrize("hidden", [1, 111, 3584, 16384])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BLOCKS])
def test_hidden_sizes(name, hidden):
    c = made(name, (257, hidden))
    check(c.run(), c.exact)


@pytest.mark.parametrize("shape", [(1, 1024), (9, 37, 1024), (2, 3, 5, 7, 1024), (0, 1024), (1024,)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, shape):
    c = made(name, shape)
    check(c.run(), c.exact)


@pytest.mark.parametrize("kind", [torch.float32, F8, F8_WIDE], ids=str)
@pytest.mark.parametrize("name", ["rmsnorm", "fused_add_rmsnorm", "rmsnorm_silu_gate", "fused_rmsnorm_silu"])
def test_formats(name, kind):
    c = made(name)
    want = c.exact if c.returned else {"residual": c.exact["residual"], "out": c.exact["input"]}
    results = c.run(out=torch.empty(333, 1024, dtype=kind, device=DEVICE))
    assert results["out"].dtype is kind
    check(results, want)


def values(c) -> torch.Tensor:
    """The float32 values that a quantizing call rounds: those of the function that stores them."""
    given = {name: c.tensors[name].clone() for name in ("input", "residual", "weight") if name in c.tensors}
    out = torch.empty(given["input"].shape, device=DEVICE)
    (functional.fused_add_rmsnorm if "residual" in given else functional.rmsnorm)(**given, eps=EPS, out=out)
    return out


@pytest.mark.parametrize("kind", [F8, F8_WIDE], ids=str)
@pytest.mark.parametrize("name", ["rmsnorm_quant", "fused_add_rmsnorm_quant"])
def test_static_bytes(name, kind):
    for factor in (0.05, 3e-4):  # the second one saturates
        c = made(name)
        scale = torch.full((1,), factor, device=DEVICE)
        want = oracle.fp8_search(values(c) * (1 / scale), "e4m3" if kind is F8 else "e5m2")
        results = c.run(out=torch.empty(333, 1024, dtype=kind, device=DEVICE), scale=scale)
        assert torch.equal(results["out"].view(torch.uint8), want)


@pytest.mark.parametrize("kind", [F8, F8_WIDE], ids=str)
@pytest.mark.parametrize("name", ["rmsnorm_quant_dynamic", "fused_add_rmsnorm_quant_dynamic"])
def test_dynamic_bytes(name, kind):
    c = made(name)
    for n in {"input", "residual"} & {*c.tensors}:
        c.tensors[n][3] = 0
    y, largest = values(c), torch.full((1,), 448.0 if kind is F8 else 57344.0, device=DEVICE)
    scale = (y.abs().amax(-1, keepdim=True) * (1 / largest)).clamp(min=1 / (largest.item() * 512))
    results = c.run(out=torch.empty(333, 1024, dtype=kind, device=DEVICE))
    assert torch.equal(results["scale"], scale)
    want = oracle.fp8_search(y * (1 / scale), "e4m3" if kind is F8 else "e5m2")
    assert torch.equal(results["out"].view(torch.uint8), want)


@pytest.mark.parametrize("scaled", [None, 3.5])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_bytes(name, format, swizzled, scaled):
    rows, hidden = 333, 1056  # neither fills whole tiles
    c = made(name, (rows, hidden))
    y = values(c) if scaled is None else values(c) * scaled
    change = {"block_size": 16 if format == "nvfp4" else 32, "is_sf_swizzled_layout": swizzled}
    change |= {} if scaled is None else {"global_scale": torch.full((1,), scaled, device=DEVICE)}
    change |= {"y_fp4": torch.empty(rows, hidden, dtype=F8, device=DEVICE)} if format == "mxfp8" else {}
    results = c.run(**change)
    check(results, c.exact)
    codes, scales = quantized(y, format)
    assert torch.equal(results["y_fp4"].view(torch.uint8), codes)
    found = results["block_scale"].view(torch.uint8)
    assert torch.equal(from_tiles(found, *scales.shape) if swizzled else found, scales)


def quantized(y, format):
    if format == "mxfp8":
        return oracle.mxfp8_search(y, "e4m3")
    return oracle.nvfp4_search(y) if format == "nvfp4" else oracle.mxfp4_search(y)


def from_tiles(found, rows, blocks):
    tiles = found.view(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    r, b = torch.arange(rows, device=DEVICE)[:, None], torch.arange(blocks, device=DEVICE)
    return tiles[r // 128, b // 4, r % 32, r % 128 // 32, b % 4]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_scales_in_both_layouts(format):
    c = made("add_rmsnorm_fp4quant", (333, 1056))
    codes, scales = quantized(values(c), format)
    size = 16 if format == "nvfp4" else 32
    for _ in range(2):
        tensors = {name: t.clone() for name, t in c.tensors.items()}
        found = functional.add_rmsnorm_fp4quant(**tensors, **c.options, block_size=size, output_both_sf_layouts=True)
        elements, tiles, rows = (t.view(torch.uint8) for t in found)
        assert torch.equal(elements, codes) and torch.equal(rows, scales)
        assert torch.equal(from_tiles(tiles, *scales.shape), scales)


def test_the_norm_beside_the_blocks():
    c = made("add_rmsnorm_fp4quant")
    y = values(c)
    results = c.run(y_out=torch.empty_like(c.tensors["input"]))
    assert torch.equal(results["y_out"], y.bfloat16())
    assert torch.equal(results["y_fp4"].view(torch.uint8), oracle.nvfp4_search(y)[0])  # of what is not rounded


@pytest.mark.parametrize("name", NAMES)
def test_rows_apart(name):
    """Rows of wider tensors; what lies between them stays."""
    c = made(name)
    full = {n: t for n, t in c.tensors.items() if t.dim() == 2}
    wide = {n: torch.full((t.shape[0], 1088), 7.0).to(DEVICE, t.dtype) for n, t in full.items()}
    given = {n: memory[:, 32:1056].copy_(c.tensors[n]) for n, memory in wide.items()}
    check(c.run(**given), c.exact)
    for memory in wide.values():
        assert (memory[:, :32].float() == 7).all() and (memory[:, 1056:].float() == 7).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_of_a_packed_tensor(head_dim, dtype, in_place):
    """[tokens, heads of q, k and v, head_dim], of which nothing but q and k changes, if anything."""
    packed = torch.randn(999, 12, head_dim, device=DEVICE).to(dtype)
    q, k, weights = packed[:, :8], packed[:, 8:10], torch.randn(2, head_dim, device=DEVICE).to(dtype)
    want, before = {"q": norm(q, weights[0]), "k": norm(k, weights[1])}, packed.clone()
    q_out, k_out = functional.qk_rmsnorm(q, k, *weights, EPS, *((q, k) if in_place else ()))
    check({"q": q_out, "k": k_out}, want)
    assert (q_out.data_ptr() == q.data_ptr()) is in_place
    assert torch.equal(packed[:, 10:], before[:, 10:]) and (in_place or torch.equal(packed, before))


def test_heads_interleaved():
    packed = torch.randn(999, 4, 3, 128, device=DEVICE).bfloat16()  # each head's q, k and v side by side
    q, k, weight = packed[:, :, 0], packed[:, :, 1], torch.randn(128, device=DEVICE).bfloat16()
    want = {"q": norm(q, weight), "k": norm(k, weight)}
    q_out, k_out = functional.qk_rmsnorm(q, k, weight, weight, EPS)
    check({"q": q_out, "k": k_out}, want)


@pytest.mark.parametrize(
    ("name", "outs"),
    [
        ("rmsnorm", {"out": "input"}),
        ("gemma_rmsnorm", {"out": "input"}),
        ("qk_rmsnorm", {"q_out": "q", "k_out": "k"}),
        ("fused_rmsnorm_silu", {"out": "input"}),
        ("rmsnorm_silu_gate", {"out": "gate"}),
        ("rmsnorm_silu_gate", {"out": "input"}),
    ],
)
def test_outputs_onto_inputs(name, outs):
    for seed in range(3):
        wanted, c = made(name, seed=seed).run(), made(name, seed=seed)
        c.run(**{out: c.tensors[of] for out, of in outs.items()})
        assert all(same(c.tensors[of], wanted[out]) for out, of in outs.items())


def test_partial_overlaps_are_refused_and_nothing_written():
    memory = torch.zeros(700, 1024, device=DEVICE).bfloat16()
    weight = torch.ones(1024, device=DEVICE).bfloat16()
    for other in (memory[1:334], memory[:333]):
        with pytest.raises(VariantPackError, match="output '(input|residual)' overlaps"):
            functional.fused_add_rmsnorm(memory[:333], other, weight)
    with pytest.raises(VariantPackError, match="'out'.*overlaps.*'input'"):
        functional.rmsnorm(memory[:333], weight, out=memory[1:334])
    torch.cuda.synchronize()
    assert not memory.any()


@pytest.mark.parametrize("name", NAMES)
def test_row_r_is_the_same_in_any_batch(name):
    whole = made(name, (300, 1024))
    inputs = {n: t.clone() for n, t in whole.tensors.items()}
    results = whole.run()
    rowwise = [n for n, t in results.items() if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[0] == 300]
    for count in (1, 255, 256):
        part = {n: t[:count].clone() if n in rowwise else t for n, t in inputs.items()}
        if name == "qk_rmsnorm":
            part["k"] = part["k"].clone()
        got = getattr(functional, name)(**part, **whole.options)
        got = dict(zip(whole.returned, got if isinstance(got, tuple) else (got,), strict=False)) | part
        for n in rowwise:
            assert same(got[n], results[n][:count]), n


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fused_rmsnorm_silu"])  # as FlashInfer's
def test_enable_pdl(name):
    wanted = made(name).run(enable_pdl=False)
    for enable in (None, True):
        for _ in range(3):
            got = made(name).run(enable_pdl=enable)
            assert all(same(got[n], t) for n, t in wanted.items() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", NAMES)
def test_streams_and_capture(name):
    """On the current stream, and replayed with what its tensors hold by then."""
    function, c = getattr(functional, name), made(name)
    c.run(**{n: t.clone() for n, t in c.tensors.items()})  # what is compiled is compiled before
    graph, static = torch.cuda.CUDAGraph(), {n: t.clone() for n, t in c.tensors.items()}
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = function(**static, **c.options)
    for seed in (1, 2):
        other = made(name, seed=seed)
        for n, t in other.tensors.items():
            static[n].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        results = result if isinstance(result, tuple) else (result,)
        check(static | dict(zip(c.returned, results, strict=False)), other.exact)


# The operators of both kinds, each function once; those that return FP4, which torch cannot compare on every device,
# with bytes given.
CHECKED = {n: v for n, v in OPERATORS.items() if n.endswith("-given" if v[0] in BLOCKS else "-new")}


@pytest.mark.parametrize(("name", "kinds"), CHECKED.values(), ids=CHECKED)
def test_opcheck(name, kinds):
    operator_check(name, kinds, Tensors(DEVICE))


@pytest.mark.parametrize(
    ("name", "backend"),
    # Not inductor for FP4, of which torch promises little.
    [("fused_add_rmsnorm", "inductor"), ("qk_rmsnorm", "inductor"), ("add_rmsnorm_fp4quant", "aot_eager")],
)
def test_one_graph_for_all_row_counts(name, backend):
    function = getattr(functional, name)

    def around(tensors):
        tensors = {n: t * 2 for n, t in tensors.items()}
        result = function(**tensors, eps=EPS)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        return (*results, *(t for n, t in tensors.items() if n in ("input", "residual")))

    torch._dynamo.reset()
    fast = torch.compile(around, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for n, rows in enumerate((5, 7, 64, 1000, 2)):
            with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
                tensors = made(name, (rows, 4, 256), seed=n).tensors
                got = fast({k: t.clone() for k, t in tensors.items()})
            for a, b in zip(got, around(tensors), strict=True):
                assert same(a, b)


def test_a_block_of_a_model_compiled_by_inductor():
    """Residual sum and norm in place, gate and FP8 in one function: one graph, the bytes of the functions alone."""

    def block(x, residual, weight, gate, scale):
        functional.fused_add_rmsnorm(x, residual, weight)
        y = functional.rmsnorm_silu_gate(x, weight, gate)
        out = torch.empty(y.shape, dtype=F8, device=y.device)
        functional.rmsnorm_quant(out, y, weight, scale)
        return out, functional.rmsnorm_quant_dynamic(y, weight)

    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, dynamic=True)
    weight, scale = torch.randn(512, device=DEVICE).bfloat16(), torch.full((1,), 0.02, device=DEVICE)
    for n, rows in enumerate((5, 7, 333, 4096)):
        # Not slices of one tensor: for operators that write two of those torch 2.13's inductor makes wrong code,
        # whoever's they are.
        x, residual, gate = (torch.randn(rows, 512, device=DEVICE).bfloat16() for _ in range(3))
        other = [t.clone() for t in (x, residual)]
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = fast(x, residual, weight, gate, scale)
        want = block(*other, weight, gate, scale)
        for a, b in zip((got[0], *got[1], x, residual), (want[0], *want[1], *other), strict=True):
            assert same(a, b)


def test_silu_to_nvfp4():
    x, weight = torch.randn(333, 1024, device=DEVICE).bfloat16(), torch.randn(1024, device=DEVICE).bfloat16()
    y = functional.fused_rmsnorm_silu(x, weight, out=torch.empty(333, 1024, device=DEVICE))
    codes, scales = functional.fused_rmsnorm_silu(x, weight, out=torch.empty(333, 512, dtype=FP4, device=DEVICE))
    want = oracle.nvfp4_search(y)
    assert torch.equal(codes.view(torch.uint8), want[0]) and torch.equal(scales.view(torch.uint8), want[1])
