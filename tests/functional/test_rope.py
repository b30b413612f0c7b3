"""qk_norm_rope as a function: values, layouts, calls like earlier ones, in place, refusals, operators."""

import pytest
import torch

from graphfuse import VariantPackError, VariantPackTypeError, functional
from graphfuse.functional import qk_norm_rope
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
    for operator, more in ((packet.default, {}), (packet.default, {"is_neox": False}), (packet.out, outs)):
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
