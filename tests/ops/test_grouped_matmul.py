"""Products by expert against numpy, row by row."""

import numpy as np
import pytest
import torch

from graphfuse import GraphValidationError, VariantPackError, data_type, heur_mode, moe_grouped_matmul_mode
from support import graphs
from support.graphs import BF16, FLOAT, TORCH

MODE = moe_grouped_matmul_mode
EXPERTS, K, N, TOKENS, TOP_K = 3, 5, 4, 4, 2
ROUTED = TOKENS * TOP_K


def values(*shape, seed=0):
    return torch.randn(shape, generator=graphs.generator("cpu", seed))


def numbers(of, axis):
    return torch.tensor(of, dtype=torch.int32).reshape([-1 if a == axis else 1 for a in range(3)])


OFFSETS = {
    "with the end": [0, 3, 3, 8],
    "with rows of no group": [1, 3, 5, 6],
    "without": [0, 3, 3],
    "two batches": [0, 1, 3, 3, 4, 7, 8],
    "two batches, without": [0, 1, 3, 3, 4, 7],
}
ROUTES = [(0, 0), (3, 1), (1, 0), (2, 1), (0, 1), (1, 1), (3, 0), (2, 0)]
"""Token and slot of each row of the groups."""


def grouped(token, weight, offsets):
    """Rows of groups, float64."""
    groups = len(offsets) - (len(offsets) % EXPERTS == 1)
    ends = offsets[1 : groups + 1] if len(offsets) > groups else [*offsets[1:], len(token)]
    made = np.zeros((len(token), N))
    for g, (start, end) in enumerate(zip(offsets, ends, strict=False)):
        for r in range(start, end):
            made[r] = token[r].double().numpy() @ weight[g % EXPERTS].double().numpy()
    inside = range(offsets[0], ends[-1])
    return made, inside


def expected(mode, pack, offsets):
    token, weight = pack["token"][0], pack["weight"]
    if mode is MODE.GATHER:
        token = torch.stack([token[t] for t, _ in ROUTES])
    made, inside = grouped(token, weight, offsets)
    if mode is MODE.SCATTER:
        found = np.zeros((ROUTED, N))
        for r in inside:
            found[ROUTES[r][0] * TOP_K + ROUTES[r][1]] = made[r]
        return found
    if mode is MODE.COMBINE:
        found = np.zeros((TOKENS, N))
        for r in inside:
            t, slot = ROUTES[r]
            found[t] += pack["top_k_scores"][0, t, slot].item() * made[r]
        return found
    return made


def packed(mode, offsets, dtype=FLOAT):
    rows = TOKENS if mode is MODE.GATHER else ROUTED
    pack = {"token": values(1, rows, K).to(TORCH[dtype]), "weight": values(EXPERTS, K, N, seed=1).to(TORCH[dtype])}
    pack["first_token_offset"] = numbers(offsets, 0)
    if mode is not MODE.NONE:
        pack["token_index"] = numbers([t for t, _ in ROUTES], 1)
    if mode in (MODE.SCATTER, MODE.COMBINE):
        pack["token_ks"] = numbers([slot for _, slot in ROUTES], 1)
    if mode is MODE.COMBINE:
        pack["top_k_scores"] = values(1, TOKENS, TOP_K, seed=2)
    return pack


def run(mode, pack, dtype=FLOAT):
    g = graphs.new()
    tensors = {name: g.tensor_like(t, name=name) for name, t in pack.items()}
    y = g.moe_grouped_matmul(**tensors, mode=mode, top_k=TOP_K).set_output().set_name("y").set_data_type(dtype)
    g.validate()
    out = torch.full(y.get_dim(), 7.0).to(TORCH[dtype])
    graphs.run(g, pack | {"y": out})
    return out


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("mode", MODE)
def test_forward(mode, offsets):
    pack = packed(mode, offsets)
    np.testing.assert_allclose(run(mode, pack)[0], expected(mode, pack, offsets), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once():
    pack = packed(MODE.NONE, OFFSETS["with the end"], BF16)
    exact = torch.from_numpy(expected(MODE.NONE, pack, OFFSETS["with the end"]))
    torch.testing.assert_close(run(MODE.NONE, pack, BF16)[0].double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("mode", [MODE.GATHER, MODE.SCATTER, MODE.COMBINE])
@pytest.mark.parametrize("wrong", [-1, TOKENS, 1000])
def test_numbers_of_no_token(mode, wrong):
    """They take zeros, and put nothing anywhere."""
    pack = packed(mode, OFFSETS["with the end"])
    right = run(mode, pack)[0]
    pack["token_index"][0, 2, 0] = wrong
    got, (token, slot) = run(mode, pack)[0], ROUTES[2]
    if mode is MODE.COMBINE:
        rest = [t for t in range(TOKENS) if t != token]
        assert torch.equal(got[rest], right[rest]) and not torch.equal(got[token], right[token])
        return
    at = 2 if mode is MODE.GATHER else token * TOP_K + slot
    assert (got[at] == 0).all() and torch.equal(got[torch.arange(ROUTED) != at], right[torch.arange(ROUTED) != at])


def test_rows_of_no_group_may_hold_anything():
    pack = packed(MODE.NONE, OFFSETS["with rows of no group"])
    pack["token"][0, 0] = float("nan")
    np.testing.assert_allclose(
        run(MODE.NONE, pack)[0][1:],
        expected(MODE.NONE, pack, OFFSETS["with rows of no group"])[1:],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("explicit", [False, True])
def test_backward(explicit):
    offsets = [0, 3, 3, 6] if explicit else [0, 3, 3]
    pack = {"doutput": values(1, ROUTED, N), "token": values(1, ROUTED, K, seed=1)}
    pack["first_token_offset"] = numbers(offsets, 0)
    g = graphs.new()
    y = g.moe_grouped_matmul_bwd(*(g.tensor_like(t, name=name) for name, t in pack.items()))
    y.set_output().set_name("y")
    if explicit:
        y.set_dim([EXPERTS, K, N])
    g.validate()
    assert y.get_dim() == [EXPERTS, K, N] and y.get_stride() == [K * N, 1, K]
    out = torch.empty(EXPERTS, N, K).mT
    if explicit:
        pack["token"][0, 6:] = float("nan")
    graphs.run(g, pack | {"y": out})
    ends = offsets[1:] if explicit else [*offsets[1:], ROUTED]
    for e, (start, end) in enumerate(zip(offsets, ends, strict=False)):
        rows, of = (pack[name][0, start:end].double() for name in ("token", "doutput"))
        np.testing.assert_allclose(out[e], np.einsum("rk,rn->kn", rows, of), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_autograds():
    token, weight = values(1, ROUTED, K), values(EXPERTS, K, N, seed=1).double().requires_grad_()
    loss, offsets = values(1, ROUTED, N, seed=2), [0, 2, 5, 8]
    rows = [token[0, a:b].double() @ w for a, b, w in zip(offsets, offsets[1:], weight, strict=False)]
    (torch.cat(rows) * loss[0]).sum().backward()
    g = graphs.new()
    given = {"doutput": loss, "token": token, "first_token_offset": numbers(offsets, 0)}
    y = g.moe_grouped_matmul_bwd(**{name: g.tensor_like(t, name=name) for name, t in given.items()})
    y.set_output().set_name("y").set_dim([EXPERTS, K, N]).set_stride([K * N, N, 1])
    out = torch.empty(EXPERTS, K, N)
    graphs.run(g, given | {"y": out})
    torch.testing.assert_close(out.double(), weight.grad, rtol=1e-5, atol=1e-5)


GIVEN = {"token": (1, 8, 5), "weight": (3, 5, 4), "first_token_offset": (4, 1, 1)}
ROWS = {"token_index": (1, 8, 1), "token_ks": (1, 8, 1)}
WRONG = {
    "rank": ({"token": (8, 5)}, {}, r"token and weight must be .*got \[8, 5\] and \[3, 5, 4\]"),
    "K": ({"weight": (3, 6, 4)}, {}, r"token and weight must be"),
    "offsets": ({"first_token_offset": (5, 1, 1)}, {}, r"first_token_offset must be .* the 3 experts; got \[5, 1, 1\]"),
    "one expert": ({"weight": (1, 5, 4), "first_token_offset": (1, 1, 1)}, {}, "first_token_offset must be"),
    "no index": ({}, {"mode": MODE.GATHER}, "mode GATHER needs token_index; it reads token_index"),
    "needless": ({"token_index": (1, 8, 1)}, {}, "mode NONE would not read token_index; it reads none of these"),
    "no slots": ({"token_index": (1, 8, 1)}, {"mode": MODE.SCATTER, "top_k": 2}, "mode SCATTER needs token_ks"),
    "scores": (ROWS | {"top_k_scores": (1, 8, 1)}, {"mode": MODE.SCATTER, "top_k": 2}, "would not read top_k_scores"),
    "rows": (ROWS | {"token_ks": (1, 7, 1)}, {"mode": MODE.SCATTER, "top_k": 2}, r"token_ks must be .*\[1, 8, 1\]"),
    "top_k": (ROWS, {"mode": MODE.SCATTER}, "top_k is 0; accepted in mode SCATTER: 1 to the 3 experts"),
    "slots": (
        ROWS,
        {"mode": MODE.SCATTER, "top_k": 3},
        "token has 8 rows; accepted in mode SCATTER: a multiple of top_k",
    ),
    "shape of scores": (
        ROWS | {"top_k_scores": (1, 4, 3)},
        {"mode": MODE.COMBINE, "top_k": 2},
        r"top_k_scores must be \[1, tokens, 2\], got \[1, 4, 3\]",
    ),
}


def drawn(g, shapes):
    made = {port: g.tensor(list(shape), name=port) for port, shape in shapes.items()}
    for port in made.keys() & {"first_token_offset", "token_index", "token_ks"}:
        made[port].set_data_type(data_type.INT32)
    return made


@pytest.mark.parametrize("port", ["first_token_offset", "token_index", "token_ks"])
def test_types_of_numbers(port):
    g = graphs.new()
    given = {"token_index": (1, ROUTED, 1), "token_ks": (1, ROUTED, 1), "token": (1, ROUTED, K)}
    tensors = drawn(g, GIVEN | given)
    tensors[port].set_data_type(FLOAT)
    g.moe_grouped_matmul(**tensors, mode=MODE.SCATTER, top_k=TOP_K, name="m").set_output()
    with pytest.raises(GraphValidationError, match=rf"'m' .*: {port} is FLOAT; accepted: INT32 or INT64"):
        g.validate()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [-1, 3, 3, 8], [0, 3, 3, 9]])
def test_groups_that_cannot_be(offsets, back):
    """On the CPU, where they are known before the work begins."""
    g = graphs.new()
    pack = {"token": values(1, ROUTED, K), "weight": values(EXPERTS, K, N), "first_token_offset": numbers(offsets, 0)}
    if back:
        pack["doutput"] = values(1, ROUTED, N)
        del pack["weight"]
    tensors = {port: g.tensor_like(t, name=port) for port, t in pack.items()}
    made = (g.moe_grouped_matmul_bwd if back else g.moe_grouped_matmul)(**tensors, name="m").set_output().set_name("o")
    if back:
        made.set_dim([EXPERTS, K, N])
    g.build([heur_mode.FALLBACK])
    out = torch.empty_strided(made.get_dim(), made.get_stride())
    with pytest.raises(VariantPackError, match=r"'m' .*first_token_offset is \[.*; accepted: ascending .* from 0 to 8"):
        g.execute(pack | {"o": out})


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    shapes, options, message = WRONG[name]
    g = graphs.new()
    tensors = drawn(g, GIVEN | shapes)
    g.moe_grouped_matmul(**tensors, **options, name="m").set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'm' \(moe_grouped_matmul\): .*{message}"):
        g.validate()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 8, 4), (1, 7, 5), (3, 1, 1)), r"token and doutput must be .*got \[1, 7, 5\] and \[1, 8, 4\]"),
        (((1, 8, 4), (1, 8, 5), (3, 1)), r"first_token_offset must be .*got \[3, 1\]"),
    ],
)
def test_what_backward_refuses(shapes, message):
    g = graphs.new()
    ports = "doutput", "token", "first_token_offset"
    g.moe_grouped_matmul_bwd(**drawn(g, dict(zip(ports, shapes, strict=True))), name="m").set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'm' \(moe_grouped_matmul_bwd\): .*{message}"):
        g.validate()
