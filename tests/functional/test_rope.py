"""qk_norm_rope as a function: values, layouts, calls like earlier ones, in place, refusals, operators."""

import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError, functional
from graphfuse.functional import qk_norm_rope, qk_norm_rope_cache
from support import oracle

EPS = 1e-5
pytestmark = pytest.mark.emulate


@pytest.fixture(autouse=True, params=["cpu", "emulator"])
def device(request, plan_on):
    plan_on(request.param)
    return request.param


def drawn(tokens=(5,), queries=3, keys=2, columns=64, rotary=64, dtype=torch.bfloat16, table=torch.float32, seed=0):
    """What a call is given, by argument: slices of one packed tensor."""
    source = torch.Generator().manual_seed(seed)
    packed = torch.randn(*tokens, queries + 2 * keys, columns, generator=source).to(dtype)
    weights = torch.randn(2, columns, generator=source).to(dtype)
    return {
        "q": packed[..., :queries, :],
        "k": packed[..., queries : queries + keys, :],
        "q_weight": weights[0],
        "k_weight": weights[1],
        "cos_sin_cache": torch.randn(13, rotary, generator=source).to(table),
        "positions": torch.randint(13, tokens, generator=source),
        "eps": EPS,
    }


def without_weights(arguments):
    return arguments | {"q_weight": None, "k_weight": None}


def exact(q, k, q_weight, k_weight, cos_sin_cache, positions, eps, is_neox=True):
    cos, sin = cos_sin_cache.double()[positions.long()].unsqueeze(-2).chunk(2, -1)
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = oracle.rmsnorm(x, weight, eps)[0]
        made.append(oracle.rotated(y, *(t.expand(*y.shape[:-1], -1) for t in (cos, sin)), not is_neox))
    return made


def hold(arguments, **more):
    made = qk_norm_rope(**arguments, **more)
    for got, want in zip(made, exact(**arguments, **{n: v for n, v in more.items() if n == "is_neox"}), strict=True):
        assert got.shape == want.shape
        tolerance = {torch.float32: 1e-5, torch.float16: 2**-10}.get(got.dtype, 2**-7)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)
    return made


SHAPES = {
    "tokens": {},
    "batch": dict(tokens=(2, 3)),
    "no dimension for tokens": dict(tokens=()),
    "one token": dict(tokens=(1,)),
    "no tokens": dict(tokens=(0,)),
    "as many tokens as positions": dict(tokens=(13,)),
    "one key": dict(keys=1),
    "a part": dict(columns=128, rotary=32),
    "no kernel": dict(columns=20, rotary=6),
}


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.filterwarnings("ignore::graphfuse.ReferenceEngineWarning")
def test_values(shape, is_neox):
    for seed in range(2):
        q_out, k_out = hold(drawn(**shape, seed=seed), is_neox=is_neox)
        assert q_out.is_contiguous() and k_out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types(dtype, table):
    made = drawn(dtype=dtype, table=table)
    hold(made | {"positions": made["positions"].int()})


def test_weights_of_each_head():
    made = drawn()
    hold(made | {"q_weight": torch.randn(3, 64).bfloat16(), "k_weight": torch.randn(2, 64).bfloat16()})
    hold(made | {"k_weight": torch.randn(2, 64).bfloat16()})


def test_without_weights(device):
    for tokens in (5, 9, 5):
        hold(without_weights(drawn((tokens,))))
        hold(drawn((tokens,)))
    hold(without_weights(drawn()), is_neox=False)
    found = str(functional.explain(qk_norm_rope, **without_weights(drawn())))
    assert device == "cpu" or found.split("0: emulator: ")[1].split(", 0 bytes")[0].count("rows[") == 1


def test_in_place():
    for _ in range(3):
        apart, given = drawn(), drawn()
        want = qk_norm_rope(**apart)
        made = qk_norm_rope(**given, q_out=given["q"], k_out=given["k"])
        assert made[0] is given["q"] and made[1] is given["k"]
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


def test_later_calls_are_told_apart(device):
    """By tokens, heads, the table's length, layouts and pairs, in any order; a table longer or shorter than the tokens
    are many is never read as if it were as long."""
    for turn in range(2):
        for tokens in (5, 13, 40, 3):
            hold(drawn((tokens,), seed=turn))
            hold(drawn((tokens,), 4, 1, seed=turn), is_neox=False)
        made = drawn(seed=turn)
        hold(made | {"cos_sin_cache": torch.randn(5, 64), "positions": torch.tensor([0, 1, 2, 3, 4])})
        hold(made | {"q": made["q"].contiguous(), "cos_sin_cache": torch.randn(20, 80)[:, :64]})
        hold(made | {"positions": made["positions"].repeat_interleave(2)[::2]})
        hold(made | {"positions": made["positions"][:1].expand(5)})


def test_a_later_call_takes_the_fast_path(device):
    first = drawn()
    qk_norm_rope(**first)
    last = qk_norm_rope.last()
    for seed in (1, 2):
        made = drawn(seed=seed)
        values = [made[name] for name in first]
        got = last(*values, True, None, None, None)
        for a, b in zip(got, exact(**made), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=1e-5)


def test_a_position_that_the_table_does_not_have():
    made = drawn(columns=128)
    made["positions"][:2] = torch.tensor([13, -1])
    q_out, k_out = qk_norm_rope(**made)
    for y in (q_out, k_out):
        assert y[:2, :, :64].isnan().all() and not y[2:].isnan().any() and not y[..., 64:].isnan().any()


A = drawn()
REFUSED = {
    "positions of another type": (
        dict(positions=A["positions"].float()),
        VariantPackTypeError,
        "positions is of torch.float32; accepted: int64, int32",
    ),
    "positions of another shape": (
        dict(positions=A["positions"][:4]),
        VariantPackError,
        r"positions has shape \(4,\); accepted: \(5,\)",
    ),
    "an odd table": (
        dict(cos_sin_cache=torch.ones(13, 63)),
        VariantPackError,
        r"cos_sin_cache has shape \(13, 63\); accepted: \(positions, rotary_dim\), rotary_dim even and 2 to 64",
    ),
    "a wide table": (dict(cos_sin_cache=torch.ones(13, 66)), VariantPackError, r"cos_sin_cache has shape \(13, 66\)"),
    "a table of three dimensions": (dict(cos_sin_cache=torch.ones(13, 1, 64)), VariantPackError, "cos_sin_cache has"),
    "keys of other tokens": (dict(k=A["k"][:4]), VariantPackError, r"k has shape \(4, 2, 64\); accepted: \(5, 2, 64\)"),
    "queries without heads": (
        dict(q=A["q"][0, 0]),
        VariantPackError,
        r"q has shape \(64,\); accepted: \(\.\.\., heads",
    ),
    "a weight": (
        dict(k_weight=torch.ones(3, 64)),
        VariantPackError,
        r"k_weight has shape \(3, 64\); accepted: \(64,\)",
    ),
    "one weight": (
        dict(q_weight=None),
        VariantPackError,
        "q_weight is None and k_weight is a tensor; accepted: tensors for both, or for none",
    ),
    "is_neox": (dict(is_neox=None), VariantPackTypeError, "is_neox is NoneType; accepted: True, False"),
    "an output of another type": (
        dict(q_out=torch.empty(5, 3, 64, dtype=torch.float64)),
        VariantPackTypeError,
        "q_out is of torch.float64",
    ),
}


@pytest.mark.parametrize("change, error, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(change, error, said):
    with pytest.raises(error, match=said):
        qk_norm_rope(**A | change)


def test_outputs_that_overlap_are_refused():
    made = drawn()
    memory = torch.empty(6, 3, 64).bfloat16()
    with pytest.raises(VariantPackError, match="overlaps"):
        qk_norm_rope(**made, q_out=memory[:5], k_out=memory[1:, :2])


def test_as_operators():
    made, packet = drawn(), torch.ops.graphfuse.qk_norm_rope
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    outs = {"q_out": torch.empty(5, 3, 64).bfloat16(), "k_out": torch.empty(5, 2, 64).bfloat16()}
    bare = {"q_weight": None, "k_weight": None}
    calls = (packet.default, {}), (packet.default, {"is_neox": False}), (packet.default, bare), (packet.out, outs)
    for operator, more in calls:
        found = torch.library.opcheck(operator, (), made | more, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}


def test_under_torch_compile():
    compiled = torch.compile(lambda **a: qk_norm_rope(**a), fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        made = drawn((tokens,))
        assert all(torch.equal(a, b) for a, b in zip(compiled(**made), qk_norm_rope(**made), strict=True))


def test_explain_tells_of_one_kernel(device):
    made = drawn()
    found = str(functional.explain(qk_norm_rope, **made))
    assert ("0: emulator: rows[" if device == "emulator" else "reference") in found


CACHES = {
    "slots": lambda dtype: torch.full((20, 2, 64), 7.0).to(dtype),
    "pages": lambda dtype: torch.full((5, 4, 2, 64), 7.0).to(dtype),
    "keys beside values": lambda dtype: torch.full((2, 5, 4, 2, 64), 7.0).to(dtype)[1],
    "heads outermost": lambda dtype: torch.full((2, 20, 64), 7.0).to(dtype).transpose(0, 1),
}


def cached(form="pages", dtype=torch.bfloat16, **options):
    made = drawn(**options)
    made["v"] = torch.randn(made["k"].shape, generator=torch.Generator().manual_seed(9)).to(made["k"].dtype)
    made["k_cache"], made["v_cache"] = CACHES[form](dtype), CACHES[form](dtype)
    numbers = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    made["slot_mapping"] = numbers[: made["positions"].numel()].reshape(made["positions"].shape)
    return made


def hold_cached(made, **more):
    """The cache is as it was but for the slots that are named."""
    plain = {name: made[name] for name in drawn()}
    before = {name: made[name].flatten(0, -3).clone() for name in ("k_cache", "v_cache")}
    q, k = exact(**plain, **more)
    got = qk_norm_rope_cache(**made, **more)
    torch.testing.assert_close(got.double(), q, rtol=2**-7, atol=1e-5)
    rows = {"k_cache": k.flatten(0, -3), "v_cache": made["v"].double().flatten(0, -3)}
    for name, values in rows.items():
        cache = made[name].flatten(0, -3)
        slots = made["slot_mapping"].flatten().tolist()
        named = {slot: values[n] for n, slot in enumerate(slots) if 0 <= slot < len(cache)}
        tolerance = 2**-3 if cache.dtype is torch.float8_e4m3fn else 2**-7
        for slot in range(len(cache)):
            if slot in named:
                torch.testing.assert_close(cache[slot].double(), named[slot], rtol=tolerance, atol=2**-9)
            else:
                assert torch.equal(cache[slot].float(), before[name][slot].float())


@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("form", CACHES)
def test_a_cache(form, is_neox):
    for tokens in ((5,), (7,), (2, 3), (1,), (0,)):
        hold_cached(cached(form, tokens=tokens), is_neox=is_neox)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_slots_of_no_number_are_skipped(dtype, integers):
    made = cached(dtype=dtype)
    made["slot_mapping"][1], made["slot_mapping"][3] = -1, 20
    made["slot_mapping"] = made["slot_mapping"].to(integers)
    hold_cached(made)


SCALES = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor(0.05)}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["half-split", "interleaved"])
def test_scales_of_a_cache(dtype, is_neox):
    """Beyond the largest number there is they saturate. Queries have no scale."""
    largest = torch.finfo(dtype).max
    for scales in (SCALES, {"v_scale": SCALES["v_scale"]}, {"k_scale": SCALES["k_scale"]}, {}):
        for tokens in (5, 3):
            made = cached(dtype=dtype, tokens=(tokens,))
            made["v"] = made["v"] * 20
            q, k = exact(**{name: made[name] for name in drawn()}, is_neox=is_neox)
            got = qk_norm_rope_cache(**made, **scales, is_neox=is_neox)
            torch.testing.assert_close(got.double(), q, rtol=2**-7, atol=1e-5)
            for name, values in (("k", k), ("v", made["v"].double())):
                want = (values / scales.get(f"{name}_scale", torch.ones(1)).double()).clamp(-largest, largest)
                found = made[f"{name}_cache"].double().flatten(0, -3)[made["slot_mapping"]]
                unit = torch.finfo(dtype).eps
                torch.testing.assert_close(found, want, rtol=0.51 * unit + 1e-5, atol=0.51 * unit * 2**-6)


def test_another_scale_at_each_call():
    """It is read from memory, and not kept from call to call."""
    made = cached(dtype=torch.float8_e4m3fn)
    for scale in (0.5, 0.01, 2.0):
        scales = dict.fromkeys(SCALES, torch.tensor([scale]))
        qk_norm_rope_cache(**made, **scales)
        found = made["v_cache"].double().flatten(0, -3)[made["slot_mapping"]]
        torch.testing.assert_close(found, (made["v"].double() / scale).clamp(-448, 448), rtol=2**-4 + 1e-5, atol=1e-3)


CACHE = cached()
REFUSED_CACHES = {
    "other heads": (
        dict(k_cache=torch.ones(5, 4, 3, 64)),
        VariantPackError,
        r"k_cache has shape \(5, 4, 3, 64\); accepted: \(slots, \*\(2, 64\)\) or \(pages, page_size",
    ),
    "pages that do not follow": (
        dict(v_cache=torch.ones(5, 6, 2, 64)[:, :4]),
        VariantPackError,
        r"v_cache has shape \(5, 4, 2, 64\) and stride .*; accepted: a stride of 512 between pages",
    ),
    "slots of another shape": (
        dict(slot_mapping=torch.ones(4).long()),
        VariantPackError,
        r"slot_mapping has shape \(4",
    ),
    "slots of another type": (
        dict(slot_mapping=torch.ones(5)),
        VariantPackTypeError,
        "slot_mapping is of torch.float32",
    ),
    "values of another shape": (dict(v=torch.ones(5, 3, 64)), VariantPackError, r"v has shape \(5, 3, 64\)"),
    "a scale for each head": (
        dict(k_scale=torch.ones(2)),
        VariantPackError,
        r"k_scale has shape \(2,\); accepted: \(1,\) or \(\)",
    ),
    "a scale that is a number": (dict(v_scale=0.5), VariantPackTypeError, "v_scale must be a torch tensor, got float"),
    "a scale of another type": (
        dict(v_scale=torch.ones(1).bfloat16()),
        VariantPackTypeError,
        "v_scale is of torch.bfloat16; accepted: float32",
    ),
    "one weight": (dict(k_weight=None), VariantPackError, "k_weight is None and q_weight is a tensor"),
    "one cache for both": (dict(v_cache=CACHE["k_cache"]), VariantPackError, "overlaps"),
}


@pytest.mark.parametrize("change, error, said", REFUSED_CACHES.values(), ids=REFUSED_CACHES)
def test_what_is_refused_of_a_cache(change, error, said):
    with pytest.raises(error, match=said):
        qk_norm_rope_cache(**CACHE | change)


def test_a_cache_as_operators():
    made, packet = cached(), torch.ops.graphfuse.qk_norm_rope_cache
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for operator, more in (
        (packet.default, {}),
        (packet.default, SCALES),
        (packet.out, {"q_out": torch.empty(5, 3, 64).bfloat16()}),
    ):
        assert set(torch.library.opcheck(operator, (), made | more, test_utils=checks).values()) == {"SUCCESS"}


def test_kernels_of_a_cache(device):
    """One for queries and keys, one for values."""
    for scales in ({}, SCALES):
        found = str(functional.explain(qk_norm_rope_cache, **cached(dtype=torch.float8_e4m3fn), **scales))
        assert device == "cpu" or found.split("0: emulator: ")[1].split(", 0 bytes")[0].count("rows[") == 2
