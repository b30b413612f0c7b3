"""Attention of FP8 and MXFP8, and its gradients, against float64 that is rounded where the op says."""

import math

import pytest
import torch

import graphfuse
from graphfuse import GraphNotSupportedError, GraphValidationError, data_type, diagonal_alignment, tensor_reordering
from support import attended, graphs
from support.graphs import BF16, E4M3, FLOAT, TORCH

E5M2, E8M0 = data_type.FP8_E5M2, data_type.FP8_E8M0
B, H, KV, ROWS, COLUMNS, D, DV = 2, 4, 2, 6, 9, 16, 8
SCALE = 0.3
LENGTHS = [4, 6], [9, 5]
SEQUENCES = {
    f"seq_len_{of}": torch.tensor(n).int().reshape(-1, 1, 1, 1) for of, n in zip(("q", "kv"), LENGTHS, strict=True)
}
SINK = torch.linspace(-1, 1, H).reshape(1, H, 1, 1)
TORCH = TORCH | {E5M2: torch.float8_e5m2}
SCALES = {"q": 0.5, "k": 2.0, "v": 0.25, "s": 1 / 256, "o": 0.75, "dO": 0.125, "dP": 1 / 64}
"""Descales, of which that of what is made is the inverse of its scale."""

# name: (tensors by port, options, what they mean to masks)
VARIANTS = {
    "plain": ({}, {}, {}),
    "causal": ({}, {"use_causal_mask": True}, {"right": 0}),
    "band": ({}, {"left_bound": 3, "right_bound": 1}, {"left": 3, "right": 1}),
    "padding": (
        SEQUENCES,
        {"use_padding_mask": True, "right_bound": 0, "diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT},
        {"lengths": LENGTHS, "right": 0, "bottom_right": True},
    ),
    "sink": ({"sink_token": SINK}, {}, {"sink": SINK}),
}


def values(*shape, seed=0):
    return torch.randn(shape, generator=graphs.generator("cpu", seed))


def narrow(t, dtype):
    most = torch.finfo(TORCH[dtype]).max
    return t.float().clamp(-most, most).to(TORCH[dtype])


def one(value):
    return torch.full((1, 1, 1, 1), value)


def seen(lengths=None, left=None, right=None, bottom_right=False, sink=None):
    """Whether each score counts, [B, 1, ROWS, COLUMNS]."""
    found = torch.zeros(B, 1, ROWS, COLUMNS, dtype=torch.bool)
    for b in range(B):
        last, end = (ROWS, COLUMNS) if lengths is None else (lengths[0][b], lengths[1][b])
        for i in range(last):
            at = i + (end - last if bottom_right else 0)
            for j in range(end):
                found[b, 0, i, j] = (right is None or j <= at + right) and (left is None or j > at - left)
    return found


def softmax(q, k, means):
    """P and its log-sum-exp, float64, heads of q throughout."""
    scores = q @ k.repeat_interleave(H // k.shape[1], 1).mT * SCALE
    scores = scores.masked_fill(~seen(**means), -math.inf)
    sink = means.get("sink")
    beside = scores if sink is None else torch.cat((scores, sink.double().expand(B, H, ROWS, 1)), -1)
    stats = beside.logsumexp(-1, keepdim=True)
    return torch.where(stats == -math.inf, 0.0, (scores - stats).exp()).nan_to_num(0.0), stats


def inputs(dtype):
    """FP8 tensors by port, and what they mean in float64."""
    shapes = {"q": (H, ROWS, D), "k": (KV, COLUMNS, D), "v": (KV, COLUMNS, DV)}
    given = {n: narrow(values(B, *shape, seed=s) / SCALES[n], dtype) for s, (n, shape) in enumerate(shapes.items())}
    return given, {n: t.double() * SCALES[n] for n, t in given.items()}


def spoiled(pack, means):
    """NaN beyond ends of sequences."""
    pack = {n: t.clone() for n, t in pack.items()}
    for n, t in pack.items() if "lengths" in means else ():
        for b, end in enumerate(LENGTHS[n[0] in "kv"]):
            t.view(torch.uint8)[b, :, end:] = 0x7F
    return pack


def hold(got, exact, step):
    """All but a few are exact: a number between two of FP8's may go either way, which moves results by `step`."""
    close = (got.double() - exact).abs() <= 2e-5 * exact.abs().clamp(min=1)
    assert close.double().mean() > 0.9 and ((got.double() - exact).abs() <= step).all()


def run(g, pack, made):
    """Runs the graph, with outputs by name: (tensor, type)."""
    for name, (t, dtype) in made.items():
        t.set_output().set_name(name).set_data_type(dtype)
    g.validate()
    out = {name: torch.full(t.get_dim(), 3.0).to(TORCH[dtype]) for name, (t, dtype) in made.items()}
    graphs.run(g, pack | out)
    return out


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", VARIANTS)
def test_fp8(name, dtype):
    extra, options, means = VARIANTS[name]
    given, exact = inputs(dtype)
    p, stats = softmax(exact["q"], exact["k"], means)
    rounded = narrow(p / SCALES["s"], dtype).double() * SCALES["s"]
    o = rounded @ exact["v"].repeat_interleave(H // KV, 1)
    pack = spoiled(given, means) | extra | {f"descale_{n}": one(SCALES[n]) for n in "qkvs"}
    pack |= {"scale_s": one(1 / SCALES["s"]), "scale_o": one(1 / SCALES["o"])}
    g = graphs.new()
    tensors = {n: g.tensor_like(t, name=n).set_is_pass_by_value(False) for n, t in pack.items()}
    made = g.sdpa_fp8(**tensors, attn_scale=SCALE, generate_stats=True, **options)
    out = run(g, pack, dict(zip(("O", "Stats", "Amax_S", "Amax_O"), ((t, FLOAT) for t in made), strict=True)))
    hold(out["O"], o / SCALES["o"], o.abs().max() / SCALES["o"] / 8)
    inside = torch.ones_like(stats, dtype=torch.bool) if "lengths" not in means else stats > -math.inf
    torch.testing.assert_close(out["Stats"].double()[inside], stats[inside], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["Amax_S"].double(), p.abs().amax().reshape(1, 1, 1, 1), rtol=1e-5, atol=0)
    torch.testing.assert_close(out["Amax_O"].double(), o.abs().amax().reshape(1, 1, 1, 1), rtol=0.02, atol=0)


def test_fp8_is_near_attention():
    """Of what the tensors mean, without any rounding in between: the oracle of sdpa."""
    given, exact = inputs(E4M3)
    pack = given | {f"descale_{n}": one(SCALES[n]) for n in "qkvs"} | {"scale_s": one(256.0), "scale_o": one(1.0)}
    g = graphs.new()
    tensors = {n: g.tensor_like(t, name=n).set_is_pass_by_value(False) for n, t in pack.items()}
    o = g.sdpa_fp8(**tensors, attn_scale=SCALE, use_causal_mask=True)[0]
    out = run(g, pack, {"O": (o, BF16)})["O"]
    wanted = attended.attention(*exact.values(), SCALE, right=0)["O"]
    torch.testing.assert_close(out.double(), wanted, rtol=0.07, atol=0.05)


@pytest.mark.parametrize("name", VARIANTS)
def test_fp8_backward(name):
    extra, options, means = VARIANTS[name]
    given, exact = inputs(E4M3)
    p, stats = softmax(exact["q"], exact["k"], means)
    v = exact["v"].repeat_interleave(H // KV, 1)
    given["o"] = narrow(p @ v / SCALES["o"], E4M3)
    given["dO"] = narrow(values(B, H, ROWS, DV, seed=3) / SCALES["dO"], E5M2)
    loss, o = (given[n].double() * SCALES[n] for n in ("dO", "o"))
    inner = (loss * o).sum(-1, keepdim=True)
    ds = p * (loss @ v.mT - inner) * SCALE
    p8 = narrow(p / SCALES["s"], E4M3).double() * SCALES["s"]
    ds8 = narrow(ds / SCALES["dP"], E5M2).double() * SCALES["dP"]

    def of_heads(t):
        return t.unflatten(1, (KV, -1)).sum(2)

    wanted = {"dQ": ds8 @ exact["k"].repeat_interleave(H // KV, 1)}
    wanted |= {"dK": of_heads(ds8.mT @ exact["q"]), "dV": of_heads(p8.mT @ loss)}
    pack = spoiled(given, means) | {"stats": stats.float()} | extra
    pack |= {f"descale_{n}": one(s) for n, s in SCALES.items()}
    factors = {"dQ": 2.0, "dK": 0.5, "dV": 4.0}
    pack |= {f"scale_{n}": one(s) for n, s in factors.items()}
    pack |= {"scale_s": one(1 / SCALES["s"]), "scale_dP": one(1 / SCALES["dP"])}
    g = graphs.new()
    tensors = {n: g.tensor_like(t, name=n).set_is_pass_by_value(False) for n, t in pack.items()}
    given_out = {"dSink_token": g.tensor([1, H, 1, 1], name="dSink_token")} if "sink_token" in extra else {}
    made = g.sdpa_fp8_backward(**tensors, attn_scale=SCALE, **options, **given_out)
    ports = "dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"
    made = dict(zip(ports, made, strict=True)) | given_out
    out = run(g, pack, {port: (t, FLOAT) for port, t in made.items()})
    for port, exactly in wanted.items():
        hold(out[port], exactly * factors[port], exactly.abs().max() * factors[port] / 4)
        torch.testing.assert_close(out[f"amax_{port}"].double().max(), exactly.abs().max(), rtol=0.05, atol=0)
    torch.testing.assert_close(out["amax_dP"].double().max(), ds.abs().max(), rtol=1e-4, atol=0)
    if given_out:
        sunk = -(torch.exp(SINK.double() - stats) * inner).sum((0, 2), keepdim=True)
        torch.testing.assert_close(out["dSink_token"].double(), sunk, rtol=1e-4, atol=1e-5)


# MXFP8

BIG = {"q": (B, H, 40, 64), "k": (B, KV, 70, 64), "v": (B, KV, 70, 48), "dO": (B, H, 40, 48)}


def blocks(t, axis):
    """FP8 elements and the exponents of their blocks of 32, in uint8, and what they mean in float64."""
    count = -(-t.shape[axis] // 32)
    scale = torch.randint(124, 130, [count if a == axis else e for a, e in enumerate(t.shape)])
    scale = scale.to(torch.uint8)
    wide = torch.exp2(scale.double() - 127).repeat_interleave(32, axis).narrow(axis, 0, t.shape[axis])
    elements = narrow(t / wide, E4M3)
    return elements, scale, elements.double() * wide


def tiled(scale, axis):
    """Scales in tiles of 128 rows and 4 blocks, as cuDNN has them in memory."""
    moved = scale.movedim(axis, -1)
    rows, count = math.prod(moved.shape[:-1]), moved.shape[-1]
    flat = torch.zeros(-(-rows // 128) * 128, -(-count // 4) * 4, dtype=torch.uint8)
    flat[:rows, :count] = moved.reshape(rows, count)
    found = torch.empty(flat.numel(), dtype=torch.uint8)
    tiles = flat.shape[1] // 4
    for r in range(flat.shape[0]):
        for c in range(flat.shape[1]):
            found[(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = flat[r, c]
    return found


def scales(g, pack, port, scale, axis, reordered):
    t = g.tensor(list(scale.shape), data_type=E8M0, name=port)
    if reordered:
        t.set_reordering_type(tensor_reordering.F8_128x4)
    pack[port] = tiled(scale, axis) if reordered else scale.view(torch.float8_e8m0fnu)
    return t


def operand(g, pack, port, data, axis, reordered):
    """The tensors of one operand and its scales, by port, and what it means."""
    elements, scale, exact = blocks(data, axis)
    pack[port] = elements
    given = {port: g.tensor_like(elements, name=port)}
    return given | {f"descale_{port}": scales(g, pack, f"descale_{port}", scale, axis, reordered)}, exact


@pytest.mark.parametrize("reordered", [False, True])
def test_mxfp8(reordered):
    torch.manual_seed(0)
    g, pack, tensors, exact = graphs.new(), {}, {}, {}
    for s, (port, axis) in enumerate({"q": 3, "k": 3, "v": 2}.items()):
        given, exact[port] = operand(g, pack, port, values(*BIG[port], seed=s), axis, reordered)
        tensors |= given
    made = g.sdpa_mxfp8(**tensors, attn_scale=SCALE, generate_stats=True, use_causal_mask_bottom_right=True)
    out = run(g, pack, dict(zip(("O", "Stats", "Amax_O"), ((t, FLOAT) for t in made), strict=True)))
    wanted = attended.attention(*exact.values(), SCALE, right=0, bottom_right=True)
    for port in ("O", "Stats"):
        torch.testing.assert_close(out[port].double(), wanted[port], rtol=2e-5, atol=2e-5)
    assert out["Amax_O"].max() == out["O"].abs().max()


@pytest.mark.parametrize("reordered", [False, True])
def test_mxfp8_backward(reordered):
    torch.manual_seed(1)
    g, pack, tensors, exact = graphs.new(), {}, {}, {}
    data = {port: values(*shape, seed=s) for s, (port, shape) in enumerate(BIG.items())}
    for port, axis in {"q": 3, "k": 3, "v": 3, "dO": 3, "q_T": 2, "k_T": 2, "dO_T": 2}.items():
        given, exact[port] = operand(g, pack, port, data[port.removesuffix("_T")], axis, reordered)
        tensors |= given
    k, v, k_rows = (exact[n].repeat_interleave(H // KV, 1) for n in ("k", "v", "k_T"))
    scores = exact["q"] @ k.mT * SCALE
    stats = scores.logsumexp(-1, keepdim=True)
    p = (scores - stats).exp()
    pack |= {"o_f16": (p @ v).bfloat16(), "dO_f16": data["dO"].bfloat16(), "stats": stats.float()}
    tensors |= {n: g.tensor_like(pack[n], name=n) for n in ("o_f16", "dO_f16", "stats")}
    inner = (pack["o_f16"].double() * pack["dO_f16"].double()).sum(-1, keepdim=True)
    ds = p * (exact["dO"] @ v.mT - inner) * SCALE
    wanted = {
        "dQ": ds @ k_rows,
        "dK": (ds.mT @ exact["q_T"]).unflatten(1, (KV, -1)).sum(2),
        "dV": (p.mT @ exact["dO_T"]).unflatten(1, (KV, -1)).sum(2),
    }
    made = g.sdpa_mxfp8_backward(**tensors, attn_scale=SCALE)
    ports = "dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV"
    out = run(g, pack, dict(zip(ports, ((t, FLOAT) for t in made), strict=True)))
    for port, exactly in wanted.items():
        torch.testing.assert_close(out[port].double(), exactly, rtol=1e-4, atol=1e-4)
        assert out[f"amax_{port}"].max() == out[port].abs().max()


def test_scales_that_fill_tiles():
    """Extents of whole tiles, as cuDNN asks for: 128 rows and 4 blocks."""
    torch.manual_seed(2)
    outs = []
    for whole in (False, True):
        torch.manual_seed(2)
        g, pack, tensors = graphs.new(), {}, {}
        for s, (port, axis) in enumerate({"q": 3, "k": 3, "v": 2}.items()):
            elements, scale, _ = blocks(values(*BIG[port], seed=s), axis)
            if whole:
                rows = 5 - axis
                room = [
                    -(-e // 4) * 4 if a == axis else -(-e // 128) * 128 if a == rows else e
                    for a, e in enumerate(scale.shape)
                ]
                full = torch.full(room, 255, dtype=torch.uint8)
                full[tuple(map(slice, scale.shape))] = scale
                scale = full
            pack[port] = elements
            tensors[port] = g.tensor_like(elements, name=port)
            tensors[f"descale_{port}"] = scales(g, pack, f"descale_{port}", scale, axis, True)
        outs.append(run(g, pack, {"O": (g.sdpa_mxfp8(**tensors, attn_scale=SCALE)[0], FLOAT)})["O"])
    assert torch.equal(*outs)


# Errors


def shaped(g, shapes, dtypes):
    return {n: g.tensor(list(shape), data_type=dtypes.get(n, E4M3), name=n) for n, shape in shapes.items()}


FP8 = {"q": (2, 4, 6, 16), "k": (2, 2, 9, 16), "v": (2, 2, 9, 8)}
ONES = dict.fromkeys((*(f"descale_{n}" for n in "qkvs"), "scale_s", "scale_o"), (1, 1, 1, 1))
MX = FP8 | {"descale_q": (2, 4, 6, 1), "descale_k": (2, 2, 9, 1), "descale_v": (2, 2, 1, 8)}
WRONG = {
    "type": ("sdpa_fp8", FP8 | ONES, {"k": BF16}, {}, "k is BFLOAT16; accepted: FP8_E4M3 or FP8_E5M2"),
    "scale": ("sdpa_fp8", FP8 | ONES | {"scale_s": (1, 4, 1, 1)}, {}, {}, r"scale_s must have one element, got .*4"),
    "heads": ("sdpa_fp8", FP8 | ONES | {"k": (2, 3, 9, 16)}, {}, {}, "k has 3 heads"),
    "bands": (
        "sdpa_fp8",
        FP8 | ONES,
        {},
        {"sliding_window": 2, "left_bound": 2},
        "sliding_window_length and diagonal_band_left_bound are both given",
    ),
    "blocks": (
        "sdpa_mxfp8",
        MX | {"descale_v": (2, 2, 9, 1)},
        {},
        {},
        r"descale_v must be \[2, 2, 1, 8\] or \[2, 2, 4, 128\], an element for each 32 along axis 2, .*got \[2, 2, 9",
    ),
    "type of scales": ("sdpa_mxfp8", MX, {"descale_k": FLOAT}, {}, "descale_k is FLOAT; accepted: FP8_E8M0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    op, shapes, dtypes, options, message = WRONG[name]
    g = graphs.new()
    types = {n: FLOAT if op == "sdpa_fp8" else E8M0 for n in shapes if "scale" in n} | dtypes
    made = getattr(g, op)(**shaped(g, shapes, types), **options, name="a")
    made[0].set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'a' \({op}\): .*{message}"):
        g.validate()


def test_twins_have_the_shape_of_what_they_are_of():
    g = graphs.new()
    dtypes = {"o_f16": BF16, "dO_f16": BF16, "stats": FLOAT}
    shapes = {
        "q": (1, 1, 32, 32),
        **dict.fromkeys(("q_T", "k", "k_T", "v", "o_f16", "dO_f16", "dO", "dO_T"), (1, 1, 32, 32)),
    }
    shapes |= {"k_T": (1, 1, 32, 64), "stats": (1, 1, 32, 1)}
    shapes |= {f"descale_{n}": (1, 1, 32, 1) for n in ("q", "k", "v", "dO")}
    shapes |= {f"descale_{n}_T": (1, 1, 1, 32) for n in ("q", "k", "dO")}
    dtypes |= {n: E8M0 for n in shapes if n.startswith("descale")}
    g.sdpa_mxfp8_backward(**shaped(g, shapes, dtypes), name="a")[0].set_output()
    with pytest.raises(GraphValidationError, match=r"k_T must be \[1, 1, 32, 32\], as k, got \[1, 1, 32, 64\]"):
        g.validate()


def test_functions_of_scores_are_not_offered():
    g = graphs.new()
    with pytest.raises(GraphNotSupportedError, match=r"node 'a' \(sdpa_fp8\): fn is <.*; instead: bias, a mask"):
        g.sdpa_fp8(**shaped(g, FP8 | ONES, dict.fromkeys(ONES, FLOAT)), fn=lambda graph, score: score, name="a")


def test_read_back():
    g = graphs.new()
    options = {"left_bound": 3, "use_padding_mask": True, "generate_stats": True}
    lengths = {n: g.tensor_like(t, name=n) for n, t in SEQUENCES.items()}
    g.sdpa_fp8(**shaped(g, FP8 | ONES, dict.fromkeys(ONES, FLOAT)), **lengths, **options)[0].set_output()
    g.sdpa_mxfp8(**shaped(g, MX, {n: E8M0 for n in MX if "scale" in n}), name="b")[0].set_output()
    g.validate()
    found: dict = {}
    exec(str(g), found)
    found["graph"].validate()
    assert g.key() == graphfuse.pygraph.from_json(g.to_json()).key() == found["graph"].key()
