"""What sdpa takes beside a band, and sdpa_backward, against float64 row by row and autograd."""

import math

import pytest
import torch

import graphfuse
from graphfuse import GraphTypeError, GraphValidationError, VariantPackError, diagonal_alignment, heur_mode
from support import attended, graphs

B, H, KV, ROWS, COLUMNS, D, DV = 2, 6, 2, 5, 7, 8, 3
CAUSAL = {"diagonal_band_right_bound": 0}
BOTTOM_RIGHT = {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT, **CAUSAL}
SCALE = 0.3
LENGTHS = [3, 5], [6, 2]
"""Of q, of k. The second has fewer columns than rows."""


def values(*shape, seed=0):
    return torch.randn(shape, generator=graphs.generator("cpu", seed))


def numbers(*of, dtype=torch.int32):
    return torch.tensor(of, dtype=dtype).reshape(-1, 1, 1, 1)


def padded(form="each"):
    if form == "each":
        return {"seq_len_q": numbers(*LENGTHS[0]), "seq_len_kv": numbers(*LENGTHS[1])}
    starts = [numbers(0, n[0], n[0] + n[1], dtype=torch.int64) for n in LENGTHS]
    return {"cu_seq_len_q": starts[0], "cu_seq_len_kv": starts[1]}


PADDED = {"use_padding_mask": True}
BIAS, SINK = values(1, H, ROWS, COLUMNS, seed=7), values(1, H, 1, 1, seed=8)
MASK = (values(B, 1, ROWS, COLUMNS, seed=9) > -0.5).float()

# name: (tensors by port, options, what they mean)
VARIANTS = {
    "bias": ({"bias": BIAS}, {}, {"bias": BIAS}),
    "bias of a column": ({"bias": BIAS[:, :1, :1]}, {}, {"bias": BIAS[:, :1, :1]}),
    "alibi": ({}, {"use_alibi_mask": True, **CAUSAL}, {"alibi": True, "right": 0}),
    "padding": (padded(), PADDED, {"lengths": LENGTHS}),
    "padding by starts": (padded("starts"), PADDED, {"lengths": LENGTHS}),
    "padding, causal": (padded(), {**PADDED, **CAUSAL}, {"lengths": LENGTHS, "right": 0}),
    "padding, bottom right": (
        padded(),
        {**PADDED, **BOTTOM_RIGHT, "sliding_window_length": 2},
        {"lengths": LENGTHS, "right": 0, "left": 2, "bottom_right": True},
    ),
    "sink": ({"sink_token": SINK}, CAUSAL, {"sink": SINK, "right": 0}),
    "sink, padding": (padded() | {"sink_token": SINK}, PADDED, {"sink": SINK, "lengths": LENGTHS}),
    "dropout": (
        {"dropout_mask": MASK, "dropout_scale": torch.full((1, 1, 1, 1), 1.5)},
        CAUSAL,
        {"kept": MASK.double().expand(B, H, ROWS, COLUMNS) * 1.5, "right": 0},
    ),
    "all": (
        padded() | {"bias": BIAS, "sink_token": SINK},
        {**PADDED, **BOTTOM_RIGHT, "use_alibi_mask": True},
        {"bias": BIAS, "sink": SINK, "lengths": LENGTHS, "right": 0, "bottom_right": True, "alibi": True},
    ),
}


def inputs():
    return {"q": values(B, H, ROWS, D), "k": values(B, KV, COLUMNS, D, seed=1), "v": values(B, 1, COLUMNS, DV, seed=2)}


def spoiled(pack, lengths):
    """NaN beyond each sequence's end, where nothing may be read."""
    pack = {name: t.clone() for name, t in pack.items()}
    for name, t in pack.items():
        for b, end in enumerate(lengths[name in ("k", "v")]):
            t[b, :, end:] = math.nan
    return pack


def drawn(g, pack):
    return {name: g.tensor_like(t, name=name) for name, t in pack.items()}


def hold(got, exact):
    for name, t in got.items():
        torch.testing.assert_close(t.double(), exact[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def forward(pack, options, shape=(B, H, ROWS, DV)):
    g = graphs.new()
    given = {name: g.tensor([*shape[:3], 1], name=name) for name in ("score_max", "score_sum_exp")}
    made = dict(
        zip(
            ("O", "Stats"),
            g.sdpa(**drawn(g, pack), attn_scale=SCALE, generate_stats=True, **options, **given),
            strict=True,
        )
    )
    for name, t in (made | given).items():
        t.set_output().set_name(name)
    out = {name: torch.full((*shape[:3], shape[3] if name == "O" else 1), 7.0) for name in made | given}
    graphs.run(g, pack | out)
    return out


@pytest.mark.parametrize("name", VARIANTS)
def test_forward(name):
    extra, options, means = VARIANTS[name]
    plain = inputs()
    exact = attended.attention(*plain.values(), SCALE, **means)
    if "lengths" in means:
        plain = spoiled(plain, LENGTHS)
    hold(forward(plain | extra, options), exact)


@pytest.mark.parametrize("name", VARIANTS)
def test_backward(name):
    extra, options, means = VARIANTS[name]
    plain, loss = inputs(), values(B, H, ROWS, DV, seed=3)
    exact = attended.attention(*plain.values(), SCALE, loss=loss, **means)
    pack = plain | {"o": exact["O"].float(), "dO": loss, "stats": exact["Stats"].float()}
    if "lengths" in means:
        pack = spoiled(pack, LENGTHS)
    pack |= extra
    wanted = {f"d{n.upper()}": plain[n].shape for n in "qkv"}
    named = {port: extra[of].shape for port, of in (("dBias", "bias"), ("dSink_token", "sink_token")) if of in extra}
    g = graphs.new()
    given = {port: g.tensor(list(shape), name=port) for port, shape in named.items()}
    made = dict(zip(wanted, g.sdpa_backward(**drawn(g, pack), attn_scale=SCALE, **options, **given), strict=True))
    for port, t in (made | given).items():
        t.set_output().set_name(port)
    out = {port: torch.full(shape, 7.0) for port, shape in (wanted | named).items()}
    graphs.run(g, pack | out)
    names = {"dQ": "dq", "dK": "dk", "dV": "dv", "dBias": "dbias", "dSink_token": "dsink"}
    hold({names[port]: t for port, t in out.items()}, exact)


def test_block_mask():
    """300 x 1100 scores: 3 x 9 tiles, of which the ninth is in a second byte."""
    pack = {"q": values(1, 2, 300, 4), "k": values(1, 1, 1100, 4, seed=1), "v": values(1, 1, 1100, 2, seed=2)}
    bits = torch.randint(0, 256, (1, 2, 3, 2), generator=graphs.generator("cpu", 4), dtype=torch.uint8)
    bits[0, 0, 1] = 0
    full = dict(pack, q=pack["q"][:, :, ::37])  # rows are alike: a few of each tile will do
    got = forward(pack | {"block_mask": bits}, {}, (1, 2, 300, 2))
    rows = range(0, 300, 37)
    bias = torch.zeros(1, 2, len(rows), 1100)
    for h in range(2):
        for n, i in enumerate(rows):
            for j in range(1100):
                if not int(bits[0, h, i // 128, j // 1024]) >> (j // 128 % 8) & 1:
                    bias[0, h, n, j] = -math.inf
    scores = (full["q"].double() @ full["k"].double().mT) * SCALE + bias.double()
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    exact = torch.where(nothing, 0.0, torch.softmax(scores, -1)) @ full["v"].double()
    exact = torch.where(nothing, 0.0, exact)
    torch.testing.assert_close(got["O"][:, :, ::37].double(), exact, rtol=2e-5, atol=2e-5)
    assert nothing.any() and (got["Stats"][:, :, ::37][nothing] == -math.inf).all()


@pytest.mark.parametrize("both", [True, False])
def test_paged(both):
    """Pages of 3 and of 2 rows in any order; what is behind a sequence in its table is no page."""
    plain = inputs()
    exact = attended.attention(*plain.values(), SCALE, lengths=LENGTHS)
    pack, order = dict(plain), torch.Generator().manual_seed(5)
    for name, size in (("k", 3), ("v", 2))[: 2 if both else 1]:
        each = -(-COLUMNS // size)
        heads, width = plain[name].shape[1], plain[name].shape[3]
        pages = torch.full((B * each, heads, size, width), math.nan)
        table = torch.randperm(B * each, generator=order).reshape(B, 1, each, 1).int()
        for b in range(B):
            for j in range(LENGTHS[1][b]):
                pages[table[b, 0, j // size, 0], :, j % size] = plain[name][b, :, j]
            table[b, 0, -(-LENGTHS[1][b] // size) :] = -77
        pack |= {name: pages, f"paged_attention_{name}_table": table}
    options = {**PADDED, "paged_attention_max_seq_len_kv": COLUMNS} if both else PADDED
    hold(forward(pack | padded(), options), exact)


def test_dropout_of_a_key_drops_what_the_op_dropout_does():
    pack, key = inputs(), {"seed": numbers(11), "offset": numbers(3)}
    g = graphs.new()
    ones = g.tensor([B, H, ROWS, COLUMNS], name="ones")
    float_key = [g.tensor([1, 1, 1, 1], name=name) for name in key]
    g.dropout(ones, *float_key, probability=0.4).set_output().set_name("kept")
    kept = torch.empty(B, H, ROWS, COLUMNS)
    graphs.run(g, {"ones": torch.ones_like(kept), "kept": kept} | {n: t.float() for n, t in key.items()})
    assert 0 < (kept == 0).double().mean() < 1
    g = graphs.new()
    seed, offset = (g.tensor_like(t, name=name) for name, t in key.items())
    dump = g.tensor(list(kept.shape), name="dump").set_output()
    given = {"attn_scale": SCALE, "dropout": (0.4, seed, offset), "rng_dump": dump}
    o = g.sdpa(**drawn(g, pack), **given)[0].set_output().set_name("O")
    out, dumped = torch.empty(B, H, ROWS, DV), torch.empty_like(kept)
    graphs.run(g, pack | key | {"O": out, "dump": dumped})
    assert o.get_dim() == list(out.shape) and torch.equal(dumped, (kept != 0).float())
    exact = attended.attention(*pack.values(), SCALE, kept=kept.double(), loss=values(B, H, ROWS, DV, seed=3))
    hold({"O": out}, exact)
    g, dumped = graphs.new(), torch.empty_like(kept)
    pack |= {"o": exact["O"].float(), "dO": values(B, H, ROWS, DV, seed=3), "stats": exact["Stats"].float()}
    seed, offset = (g.tensor_like(t, name=name) for name, t in key.items())
    dump = g.tensor(list(kept.shape), name="dump").set_output()
    given = {"attn_scale": SCALE, "dropout": (0.4, seed, offset), "rng_dump": dump}
    g.sdpa_backward(**drawn(g, pack), **given)[2].set_output().set_name("dv")
    made = torch.empty_like(pack["v"])
    graphs.run(g, pack | key | {"dv": made, "dump": dumped})
    hold({"dv": made}, exact)
    assert torch.equal(dumped, (kept != 0).float())


@pytest.mark.parametrize("asked", [{"unfuse_fma": True}, {"max_total_seq_len_q": 9}, {"max_total_seq_len_kv": 9}])
def test_options_that_change_no_result(asked):
    pack = inputs()
    made = [forward(pack, options)["O"] for options in ({}, asked)]
    assert torch.equal(*made)


def test_stats_of_base_2():
    pack = inputs()
    stats = [forward(pack, {"stats_use_log2": two})["Stats"] for two in (False, True)]
    torch.testing.assert_close(stats[1], stats[0] / math.log(2))


def test_all_options_are_read_back():
    """From JSON and from Python, with tensors that the user gives for outputs."""
    g = graphs.new()
    named = {name: g.tensor([B, H, ROWS, 1], name=name).set_output() for name in ("score_max", "score_sum_exp")}
    pack = inputs() | padded() | {"bias": BIAS, "sink_token": SINK, "mask": MASK, "factor": numbers(1).float()}
    tensors = drawn(g, pack)
    dropout = tensors.pop("mask"), tensors.pop("factor")
    options = {**PADDED, **BOTTOM_RIGHT, "use_alibi_mask": True, "stats_use_log2": True}
    g.sdpa(**tensors, dropout=dropout, **options, **named)[0].set_output()
    g.build([heur_mode.FALLBACK])
    read = graphfuse.pygraph.from_json(g.to_json())
    found: dict = {}
    exec(str(g), found)
    found["graph"].validate()
    assert g.key() == read.key() == found["graph"].key()


def tensors(g, **shapes):
    made = {name: g.tensor(list(shape), name=name) for name, shape in shapes.items()}
    for name in made.keys() & TYPES.keys():
        made[name].set_data_type(TYPES[name])
    return made


LENGTHS_OF = ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv", "paged_attention_k_table")
TYPES = dict.fromkeys(LENGTHS_OF, graphfuse.data_type.INT32) | {"block_mask": graphfuse.data_type.UINT8}


LONG = {"seq_len_q": (B, 1, 1, 1), "seq_len_kv": (B, 1, 1, 1)}
TABLE = {"paged_attention_k_table": (B, 1, 2, 1)}
ONE = (1, 1, 1, 1)
WRONG = {
    "lengths": (
        {"seq_len_q": (B + 1, 1, 1, 1)} | {"seq_len_kv": LONG["seq_len_kv"]},
        PADDED,
        r"seq_len_q must be \[2, 1",
    ),
    "starts": (
        {"cu_seq_len_q": (B, 1, 1, 1), "seq_len_kv": (B, 1, 1, 1)},
        PADDED,
        r"cu_seq_len_q must be \[3, 1, 1, 1\] or \[3\], got \[2, 1, 1, 1\]",
    ),
    "no lengths": ({}, PADDED, "use_padding_mask needs seq_len_q and seq_len_kv.*got neither"),
    "one length": ({"seq_len_q": (B, 1, 1, 1)}, PADDED, "use_padding_mask needs .*got seq_len_q"),
    "no padding": (LONG, {}, "seq_len_q is given without use_padding_mask=True"),
    "two forms": (LONG | {"cu_seq_len_q": (B + 1, 1, 1, 1)}, PADDED, "seq_len_q and cu_seq_len_q are both given"),
    "alibi": ({}, {"use_alibi_mask": True}, "use_alibi_mask needs a causal mask: diagonal_band_right_bound=0"),
    "sink": ({"sink_token": ONE}, {}, r"sink_token must be \[1, 6, 1, 1\], got \[1, 1, 1, 1\]"),
    "block mask": ({"block_mask": (B, H, 2, 1)}, {}, r"block_mask must have the extents of .*\[2, 6, 1, 1\], or 1"),
    "table": ({"paged_attention_k_table": (B, 2, 2, 1)}, {}, r"paged_attention_k_table must be \[2, 1, pages"),
    "paged, no lengths": (TABLE, {}, "paged_attention_k_table needs use_padding_mask=True"),
    "longest": (
        TABLE | LONG,
        {**PADDED, "paged_attention_max_seq_len_kv": 15},
        r"paged_attention_k_table \[2, 1, 2, 1\] has room for 14 rows of k, in pages of 7; .* asks for 15",
    ),
    "no table": ({}, {"paged_attention_max_seq_len_kv": 7}, "without a page table of k or v"),
    "probability": ({"dropout_seed": ONE, "dropout_offset": ONE}, {"dropout_probability": 1.0}, "probability is 1.0"),
    "half a key": (
        {"dropout_seed": ONE},
        {"dropout_probability": 0.5},
        r"dropout must be \(probability, seed, offset\)",
    ),
    "rows of all": ({}, {"max_total_seq_len_q": 0}, "max_total_seq_len_q is 0; accepted: None and integers >= 1"),
    "half a mask": ({"dropout_mask": ONE}, {}, r"dropout must be .*got dropout_mask"),
    "seeds": (
        {"dropout_seed": (2, 1, 1, 1), "dropout_offset": ONE},
        {"dropout_probability": 0.5},
        "dropout_seed must have one element",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    shapes, options, message = WRONG[name]
    g = graphs.new()
    plain = tensors(g, **{n: t.shape for n, t in inputs().items()})
    g.sdpa(**plain, **tensors(g, **shapes), **options, name="a")[0].set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'a' \(sdpa\): .*{message}"):
        g.validate()


@pytest.mark.parametrize("name", TYPES)
def test_types_of_numbers(name):
    g = graphs.new()
    given = LONG if name.startswith("seq") else {"cu_seq_len_q": (B + 1, 1, 1, 1), "cu_seq_len_kv": (B + 1, 1, 1, 1)}
    given |= TABLE | {"block_mask": (B, H, 1, 1)}
    plain = tensors(g, **{n: t.shape for n, t in inputs().items()} | given)
    plain[name].set_data_type(graphs.FLOAT)
    g.sdpa(**plain, **PADDED, name="a")[0].set_output()
    accepted = "UINT8 or INT8" if name == "block_mask" else "INT32 or INT64"
    with pytest.raises(GraphValidationError, match=rf"node 'a' \(sdpa\): {name} is FLOAT; accepted: {accepted}"):
        g.validate()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len_q": [6, 1]}, r"seq_len_q is \[6, 1\]; accepted: 0 to 5, the rows of q"),
        ({"seq_len_kv": [1, 8]}, r"seq_len_kv is \[1, 8\]; accepted: 0 to 7, the rows of k and v"),
        ({"seq_len_kv": [-1, 2]}, r"seq_len_kv is \[-1, 2\]; accepted: 0 to 7"),
        ({"cu_seq_len_q": [0, 3, 2]}, r"cu_seq_len_q is \[0, 3, 2\]; accepted: numbers that ascend by 0 to 5"),
        ({"cu_seq_len_kv": [0, 3, 11]}, r"cu_seq_len_kv is \[0, 3, 11\]; accepted: numbers that ascend by 0 to 7"),
    ],
)
def test_numbers_that_cannot_be(changed, message, back):
    """On the CPU, where they are known before the work begins."""
    g = graphs.new()
    pack = inputs() | padded()
    if back:
        pack |= {"o": values(B, H, ROWS, DV), "dO": values(B, H, ROWS, DV), "stats": values(B, H, ROWS, 1)}
    for name, of in changed.items():
        pack = {n: t for n, t in pack.items() if n != name.removeprefix("cu_")} | {name: numbers(*of)}
    t, *_ = (g.sdpa_backward if back else g.sdpa)(**drawn(g, pack), **PADDED, name="a")
    t.set_output().set_name("out")
    g.build([heur_mode.FALLBACK])
    with pytest.raises(VariantPackError, match=rf"node 'a' \({'sdpa_backward' if back else 'sdpa'}\): {message}"):
        g.execute(pack | {"out": torch.empty(t.get_dim())})


@pytest.mark.parametrize("number", [-1, 4, 77])
def test_pages_that_are_not_there(number):
    """Of a sequence of 6 rows, in two pages of 4; what is behind is no page."""
    pack = inputs() | padded()
    pack |= {"k": values(4, KV, 4, D), "paged_attention_k_table": numbers(1, 2, 3, number).reshape(B, 1, 2, 1)}
    forward(pack, PADDED | {"paged_attention_max_seq_len_kv": COLUMNS})
    pack["paged_attention_k_table"] = numbers(1, number, 3, 2).reshape(B, 1, 2, 1)
    with pytest.raises(
        VariantPackError, match=rf"k_table has the pages \[1, {number}\] for sequence 0; accepted: 0 to 3, those of k"
    ):
        forward(pack, PADDED | {"paged_attention_max_seq_len_kv": COLUMNS})


def test_lengths_as_numbers():
    """Of one sequence."""
    pack = {name: t[:1] for name, t in inputs().items()}
    exact = attended.attention(*pack.values(), SCALE, lengths=([3], [6]))
    hold(forward(pack, PADDED | {"seq_len_q": 3, "seq_len_kv": 6}, (1, H, ROWS, DV)), exact)
    g = graphs.new()
    with pytest.raises(GraphValidationError, match="seq_len_kv': 2.5 does not fit int32"):
        g.sdpa(**drawn(g, pack), **PADDED, seq_len_q=3, seq_len_kv=2.5)


def test_cumulative_lengths_along_one_axis():
    pack = inputs() | {n: t.flatten() for n, t in padded("starts").items()}
    hold(forward(pack, PADDED), attended.attention(*inputs().values(), SCALE, lengths=LENGTHS))


@pytest.mark.parametrize(
    ("changed", "named", "message"),
    [
        ({"o": (B, H, ROWS, D)}, {}, r"o must be \[2, 6, 5, 3\], as sdpa makes it, got \[2, 6, 5, 8\]"),
        ({"dO": (B, H, 1, DV)}, {}, r"dO must be \[2, 6, 5, 3\]"),
        ({"stats": (B, H, ROWS, DV)}, {}, r"stats must be \[2, 6, 5, 1\]"),
        ({}, {"dBias": (1, 1, ROWS, COLUMNS)}, "dBias is given without bias"),
    ],
)
def test_what_backward_refuses(changed, named, message):
    g = graphs.new()
    made = {"o": (B, H, ROWS, DV), "dO": (B, H, ROWS, DV), "stats": (B, H, ROWS, 1)}
    shapes = {n: t.shape for n, t in inputs().items()} | made | changed
    for t in g.sdpa_backward(**tensors(g, **shapes), **tensors(g, **named), name="a"):
        t.set_output()
    with pytest.raises(GraphValidationError, match=rf"node 'a' \(sdpa_backward\): .*{message}"):
        g.validate()


@pytest.mark.parametrize("given", [0.5, (0.5,), (1, 2, 3, 4), ("a", 2, 3)])
def test_what_dropout_may_be(given):
    g = graphs.new()
    with pytest.raises(GraphTypeError, match=r"sdpa: dropout must be \(dropout_probability, .*\) or \(dropout_mask"):
        g.sdpa(**tensors(g, q=(1, 1, 2, 8), k=(1, 1, 2, 8), v=(1, 1, 2, 8)), dropout=given)


def test_a_dump_of_no_drawing():
    g = graphs.new()
    plain = tensors(g, q=(1, 1, 2, 8), k=(1, 1, 2, 8), v=(1, 1, 2, 8))
    dump = g.tensor([1, 1, 2, 2]).set_output()
    g.sdpa(**plain, rng_dump=dump, name="a")[0].set_output()
    with pytest.raises(GraphValidationError, match=r"node 'a' \(sdpa\): rng_dump is given without dropout"):
        g.validate()


def test_a_number_is_no_tensor_for_an_output():
    g = graphs.new()
    with pytest.raises(GraphTypeError, match="score_max must be a tensor of this graph"):
        g.sdpa(**tensors(g, q=(1, 1, 2, 8), k=(1, 1, 2, 8), v=(1, 1, 2, 8)), score_max=1.0)
