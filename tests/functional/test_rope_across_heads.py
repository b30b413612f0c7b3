"""qk_norm_rope_across_heads as a function, and angles of a grid: values, layouts, kernels, refusals, operators."""

import math

import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError, functional
from graphfuse.functional import cos_sin_of_grid, qk_norm_rope_across_heads
from support import oracle

EPS = 1e-5
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])


@pytest.fixture(params=["cpu", "emulator"])
def device(request, plan_on):
    plan_on(request.param)
    return request.param


def drawn(tokens=(5,), queries=3, keys=3, columns=64, rotary=64, dtype=torch.bfloat16, table=torch.float32, seed=0):
    """What a call is given, by argument: parts of one packed tensor."""
    source = torch.Generator().manual_seed(seed)
    packed = torch.randn(*tokens, queries + 2 * keys, columns, generator=source).to(dtype)
    return {
        "q": packed[..., :queries, :],
        "k": packed[..., queries : queries + keys, :],
        "q_weight": torch.randn(queries * columns, generator=source).to(dtype),
        "k_weight": torch.randn(keys * columns, generator=source).to(dtype),
        "cos_sin_cache": torch.randn(13, rotary, generator=source).to(table),
        "positions": torch.randint(13, tokens, generator=source),
        "eps": EPS,
    }


def exact(q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox=False):
    """In float64: a row of all heads of a token is divided by its root mean square, then each head is rotated."""
    cos, sin = cos_sin_cache.double()[positions.long()].unsqueeze(-2).chunk(2, -1)
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        rows = x.double().flatten(-2)
        rows = rows / (rows.square().sum(-1, keepdim=True) / rows.shape[-1] + eps).sqrt()
        y = (rows if weight is None else rows * weight.double()).unflatten(-1, x.shape[-2:])
        made.append(oracle.rotated(y, *(t.expand(*y.shape[:-1], -1) for t in (cos, sin)), not is_neox))
    return made


def hold(arguments, **more):
    made = qk_norm_rope_across_heads(**arguments, **more)
    wanted = exact(**arguments, **{n: v for n, v in more.items() if n == "is_neox"})
    for got, want in zip(made, wanted, strict=True):
        assert got.shape == want.shape
        tolerance = {torch.float32: 1e-5, torch.float16: 2**-10}.get(got.dtype, 2**-7)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)
    return made


def kernels(arguments, **more) -> int:
    """Kernels of a call, for whatever devices run some."""
    plan = str(functional.explain(qk_norm_rope_across_heads, **arguments, **more)).split("0: emulator: ")[1]
    assert "reference" not in plan.split(", 0 bytes")[0]
    return plan.split(", 0 bytes")[0].count("rows[")


SHAPES = {
    "tokens": {},
    "samples": dict(tokens=(2, 3)),
    "no dimension for tokens": dict(tokens=()),
    "one token": dict(tokens=(1,)),
    "no tokens": dict(tokens=(0,)),
    "one head": dict(queries=1, keys=1),
    "fewer keys": dict(keys=1),
    "a part": dict(columns=128, rotary=32),
    "of WAN": dict(queries=12, keys=12, columns=128, rotary=128),
    "no kernel": dict(columns=20, rotary=6),
}


@NEOX
@pytest.mark.emulate
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.filterwarnings("ignore::graphfuse.ReferenceEngineWarning")
def test_values(shape, is_neox, device):
    for seed in range(2):
        q_out, k_out = hold(drawn(**shape, seed=seed), is_neox=is_neox)
        assert q_out.is_contiguous() and k_out.is_contiguous()


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
def test_types(dtype, table, device):
    made = drawn(dtype=dtype, table=table)
    hold(made | {"positions": made["positions"].int()})
    hold(made | {"q_weight": made["q_weight"].float(), "k_weight": made["k_weight"].float()})
    hold(made | {"q_weight": made["q_weight"].float(), "k_weight": made["k_weight"].half()})
    hold(made | {"q_weight": None, "k_weight": None})


@NEOX
@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_kernel_for_queries_and_one_for_keys(dtype, is_neox, plan_on):
    plan_on("emulator")
    for shape in (dict(), dict(tokens=(2, 3)), dict(columns=128, rotary=32), dict(tokens=(1,)), dict(keys=2)):
        assert kernels(drawn(**shape, dtype=dtype), is_neox=is_neox) == 2
    assert kernels(drawn(dtype=dtype) | {"q_weight": None, "k_weight": None}, is_neox=is_neox) == 2


@NEOX
@pytest.mark.emulate
@pytest.mark.parametrize("tokens", [139, 140, 144])
def test_other_counts_of_a_class(tokens, is_neox, plan_on):
    """They share a plan, which is made for the most."""
    plan_on("emulator")
    hold(drawn(tokens=(tokens,)), is_neox=is_neox)


def test_in_place(device):
    for _ in range(3):
        apart, given = drawn(), drawn()
        want = qk_norm_rope_across_heads(**apart)
        made = qk_norm_rope_across_heads(**given, q_out=given["q"], k_out=given["k"])
        assert made[0] is given["q"] and made[1] is given["k"]
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


@pytest.mark.emulate
def test_outputs_of_other_types(device):
    made = drawn()
    outs = [torch.empty(5, 3, 64, dtype=kind) for kind in (torch.float8_e4m3fn, torch.float32)]
    qk_norm_rope_across_heads(**made, q_out=outs[0], k_out=outs[1])
    q, k = exact(**made)
    torch.testing.assert_close(outs[0].double(), q, rtol=2**-4, atol=2**-9)
    torch.testing.assert_close(outs[1].double(), k, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::graphfuse.ReferenceEngineWarning")
def test_heads_that_are_no_rows_in_memory(device):
    """Heads with gaps between them, heads before tokens, positions that samples share."""
    made = drawn((2, 5))
    for x in ("q", "k"):
        wide = torch.nn.functional.pad(made[x], (0, 8))[..., :64]
        hold(made | {x: wide})
        hold(made | {x: made[x].transpose(1, 2).contiguous().transpose(1, 2)})
    hold(made | {"positions": torch.arange(5).expand(2, 5)})
    outs = {f"{x}_out": torch.empty(2, 3, 5, 64, dtype=torch.bfloat16).transpose(1, 2) for x in "qk"}
    hold(made, **outs)


def test_later_calls_are_told_apart(device):
    """By tokens, heads, the table's length, layouts and pairs, in any order."""
    for turn in range(2):
        for tokens in (5, 13, 40, 3):
            hold(drawn((tokens,), seed=turn))
            hold(drawn((tokens,), 4, 1, seed=turn), is_neox=True)
            hold(drawn((2, tokens), 2, 2, seed=turn))
        made = drawn(seed=turn)
        hold(made | {"cos_sin_cache": torch.randn(5, 64), "positions": torch.tensor([0, 1, 2, 3, 4])})
        hold(made | {"q": made["q"].contiguous(), "cos_sin_cache": torch.randn(20, 80)[:, :64]})


def test_it_is_no_norm_of_each_head(device):
    """As qk_norm_rope's is; of one head both are the same."""
    one, several = drawn(queries=1, keys=1), drawn()
    for a, b in zip(qk_norm_rope_across_heads(**one), functional.qk_norm_rope(**one, is_neox=False), strict=True):
        torch.testing.assert_close(a, b)
    bare = several | {"q_weight": None, "k_weight": None}
    for a, b in zip(qk_norm_rope_across_heads(**bare), functional.qk_norm_rope(**bare, is_neox=False), strict=True):
        assert not torch.allclose(a, b, rtol=1e-2)


@pytest.mark.emulate
def test_a_position_that_the_table_does_not_have(device):
    made = drawn(columns=128)
    made["positions"][:2] = torch.tensor([13, -1])
    for y in qk_norm_rope_across_heads(**made):
        assert y[:2, :, :64].isnan().all() and not y[2:].isnan().any() and not y[..., 64:].isnan().any()


A = drawn()
REFUSED = {
    "a weight of each head": (
        dict(q_weight=torch.ones(64)),
        VariantPackError,
        r"q_weight has shape \(64,\); accepted: \(192,\)",
    ),
    "weights of heads": (
        dict(k_weight=torch.ones(3, 64)),
        VariantPackError,
        r"k_weight has shape \(3, 64\); accepted: \(192,\)",
    ),
    "one weight": (
        dict(k_weight=None),
        VariantPackError,
        "k_weight is None and q_weight is a tensor; accepted: tensors for both, or for none",
    ),
    "rows": (
        dict(q=torch.ones(192)),
        VariantPackError,
        r"q has shape \(192,\); accepted: \(\.\.\., heads, head_dim\)",
    ),
    "keys of other tokens": (dict(k=A["k"][:4]), VariantPackError, r"k has shape \(4, 3, 64\); accepted: \(5, 3, 64\)"),
    "a wide table": (dict(cos_sin_cache=torch.ones(13, 66)), VariantPackError, "rotary_dim even and 2 to 64"),
    "positions": (
        dict(positions=A["positions"].float()),
        VariantPackTypeError,
        "positions is of torch.float32; accepted: int64, int32",
    ),
    "of other tokens": (
        dict(positions=A["positions"][:4]),
        VariantPackError,
        r"positions has shape \(4,\); accepted: \(5,\)",
    ),
    "is_neox": (dict(is_neox=1), VariantPackTypeError, "is_neox is int; accepted: True, False"),
    "float64": (dict(q=A["q"].double()), VariantPackTypeError, "q is of torch.float64; accepted: bfloat16"),
}


@pytest.mark.parametrize("change, error, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(change, error, said, device):
    with pytest.raises(error, match=said):
        qk_norm_rope_across_heads(**A | change)


def test_heads_without_a_kernel_are_told_of(plan_on):
    plan_on("emulator")
    made = drawn(columns=96, rotary=96)
    assert kernels(made) == 2
    found = str(functional.explain(qk_norm_rope_across_heads, **made, is_neox=True))
    assert "pairs of columns that lie apart, in parts of 96 columns; accepted: a power of two up to 512" in found


def test_as_operators():
    made, packet = drawn(), torch.ops.graphfuse.qk_norm_rope_across_heads
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    outs = {f"{x}_out": torch.empty(5, 3, 64).bfloat16() for x in "qk"}
    bare = {"q_weight": None, "k_weight": None}
    calls = (packet.default, {}), (packet.default, {"is_neox": True}), (packet.default, bare), (packet.out, outs)
    for operator, more in calls:
        found = torch.library.opcheck(operator, (), made | more, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}


def test_under_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **a: qk_norm_rope_across_heads(**a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n, tokens in enumerate((5, 9, 2)):
        made = drawn((tokens,))
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = compiled(**made)
        assert all(torch.equal(a, b) for a, b in zip(got, qk_norm_rope_across_heads(**made), strict=True))


def test_angles_of_a_grid():
    """Number by number: a token's place along an axis, times the pair's turn."""
    extents, columns, base = (2, 3, 4), (6, 4, 2), 100.0
    made = cos_sin_of_grid(extents, columns, base)
    assert made.shape == (24, 12) and made.dtype is torch.float32
    for token in range(24):
        place = token // 12, token // 4 % 3, token % 4
        turns = [(axis, base ** (-2 * i / count)) for axis, count in enumerate(columns) for i in range(count // 2)]
        for pair, (axis, turn) in enumerate(turns):
            angle = place[axis] * turn
            assert made[token, pair] == pytest.approx(math.cos(angle), abs=1e-6)
            assert made[token, 6 + pair] == pytest.approx(math.sin(angle), abs=1e-6)


def test_angles_of_large_grids_are_those_of_float64():
    made = cos_sin_of_grid((70000, 1), (2, 2))
    angles = torch.arange(70000, dtype=torch.float64)
    torch.testing.assert_close(made[:, 0], angles.cos().float(), rtol=0, atol=1e-6)
    half = cos_sin_of_grid((3,), (4,), dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16 and cos_sin_of_grid((0, 3), (2, 2)).shape == (0, 4)
    assert cos_sin_of_grid((2, 2), (0, 4))[2].equal(cos_sin_of_grid((2,), (4,))[0])
    assert cos_sin_of_grid((2, 3), (4, 4), device="meta").shape == (6, 8)


WRONG = {
    "axes": (((2, 3), (4,)), r"extents is \(2, 3\); accepted: as many numbers as columns \(4,\) has, 0 and more"),
    "none": (((), ()), r"extents is \(\)"),
    "negative": (((-1,), (4,)), r"extents is \(-1,\)"),
    "odd": (((2, 3), (4, 3)), r"columns is \(4, 3\); accepted: even numbers, 0 and more, not all 0"),
    "no columns": (((2,), (0,)), r"columns is \(0,\)"),
}


@pytest.mark.parametrize("given, said", WRONG.values(), ids=WRONG)
def test_grids_that_are_refused(given, said):
    with pytest.raises(VariantPackError, match=said):
        cos_sin_of_grid(*given)


@pytest.mark.emulate
def test_a_video_as_wan_has_it(device):
    """With complex numbers, a factor for each pair, of frames, rows and columns one after another."""
    frames, height, width, heads, columns = 2, 3, 2, 4, 128
    share = 2 * (columns // 6)
    of_axes = columns - 2 * share, share, share
    tokens = frames * height * width
    made = drawn((1, tokens), heads, heads, columns)
    table = cos_sin_of_grid((frames, height, width), of_axes)
    got = qk_norm_rope_across_heads(**made | {"cos_sin_cache": table, "positions": torch.arange(tokens)[None]})
    factors = []
    for f in range(frames):
        for h in range(height):
            for w in range(width):
                turns = [(n, torch.arange(0, c, 2).double() / c) for n, c in zip((f, h, w), of_axes, strict=True)]
                angles = torch.cat([n / 10000.0**power for n, power in turns])
                factors.append(torch.polar(torch.ones_like(angles), angles))
    for y, x, weight in zip(got, (made["q"], made["k"]), (made["q_weight"], made["k_weight"]), strict=True):
        rows = torch.nn.functional.rms_norm(x.double().flatten(2), (heads * columns,), weight.double(), EPS)
        pairs = torch.view_as_complex(rows.view(1, tokens, heads, columns // 2, 2))
        want = torch.view_as_real(pairs * torch.stack(factors)[None, :, None]).flatten(3)
        torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=1e-5)
