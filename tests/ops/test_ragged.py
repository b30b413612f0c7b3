"""Attention of sequences that lie one behind another, at ragged offsets, against float64 on each alone."""

import math

import pytest
import torch

import graphfuse
from graphfuse import GraphTypeError, GraphValidationError, VariantPackError, heur_mode
from support import attended, attention_options, graphs
from support.graphs import BF16, E4M3, HALF

B, H, KV, ROWS, COLUMNS, D, DV = 3, 4, 2, 5, 7, 8, 16
LENGTHS = [3, 0, 5], [6, 4, 2]
SCALE = 0.3
CANARY = 7.0
EXTENTS = {
    **{"q": (H, D), "k": (KV, D), "v": (KV, DV), "o": (H, DV), "dO": (H, DV), "stats": (H, 1)},
    **{"O": (H, DV), "Stats": (H, 1), "dQ": (H, D), "dK": (KV, D), "dV": (KV, DV), "score_max": (H, 1)},
}
"""Heads and columns by port."""

KEYS = {"k", "v", "dK", "dV"}


def values(*shape, seed=0):
    return torch.randn(shape, generator=graphs.generator("cpu", seed))


def lengths_of(port):
    return LENGTHS[port in KEYS]


class Packed:
    """Rows of all sequences by port: [rows, heads, columns], with `gap` rows behind each, of which none is used.

    apart: rows of a wider memory, that others may share, have so many times the elements.
    in_rows: whether offsets are numbers of rows.
    """

    def __init__(self, gap=0, apart=1, in_rows=False, dtype=torch.int32):
        self.gap, self.apart, self.in_rows, self.dtype = gap, apart, in_rows, dtype

    def starts(self, port):
        found = [0]
        for length in lengths_of(port):
            found.append(found[-1] + length + self.gap)
        return found

    def stride(self, port):
        heads, columns = EXTENTS[port]
        return [0, columns, heads * columns * self.apart, 1]

    def offsets(self, port):
        at = torch.tensor(self.starts(port), dtype=self.dtype) * (self.stride(port)[2] // self.multiplier(port))
        return at.reshape(-1, 1, 1, 1)

    def multiplier(self, port):
        return self.stride(port)[2] if self.in_rows else 1

    def memory(self, port, padded=None):
        """Of the values, NaN in between; without any, what nothing may be left of."""
        heads, columns = EXTENTS[port]
        wide = torch.full(
            (self.starts(port)[-1], heads * self.apart, columns), math.nan if padded is not None else CANARY
        )
        for b, (at, length) in enumerate(zip(self.starts(port), lengths_of(port), strict=False)):
            if padded is not None:
                wide[at : at + length, :heads] = padded[b, :, :length].movedim(0, 1).float()
        return wide

    def padded(self, port, wide):
        """The sequences alone, and zeros."""
        heads, columns = EXTENTS[port]
        rows = COLUMNS if port in KEYS else ROWS
        found = torch.zeros(B, heads, rows, columns, dtype=torch.float64)
        for b, (at, length) in enumerate(zip(self.starts(port), lengths_of(port), strict=False)):
            found[b, :, :length] = wide[at : at + length, :heads].movedim(0, 1).double()
        return found

    def tensor(self, g, port, offsets):
        heads, columns = EXTENTS[port]
        rows = COLUMNS if port in KEYS else ROWS
        given = {"ragged_offset": offsets, "ragged_offset_multiplier": self.multiplier(port), "name": port}
        return g.tensor([B, heads, rows, columns], self.stride(port), **given)


PACKED = {
    "dense": Packed(),
    "gaps": Packed(gap=2, dtype=torch.int64),
    "a part of wider rows": Packed(apart=3),
    "in rows": Packed(gap=1, in_rows=True),
}
MASKED = {
    "plain": ({}, {}),
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "bottom right": ({"use_causal_mask_bottom_right": True}, {"right": 0, "bottom_right": True}),
}


def padding(g, pack):
    pack |= {
        f"seq_len_{of}": torch.tensor(n).int().reshape(-1, 1, 1, 1) for of, n in zip(("q", "kv"), LENGTHS, strict=True)
    }
    return {name: g.tensor_like(pack[name], name=name) for name in ("seq_len_q", "seq_len_kv")}


def ragged(g, pack, packed, port):
    name = f"{port}_at"
    pack[name] = packed.offsets(port)
    return g.tensor_like(pack[name], name=name)


def read(g, pack, packed, port, padded):
    pack[port] = packed.memory(port, padded)
    return packed.tensor(g, port, ragged(g, pack, packed, port))


def write(g, pack, packed, port, t):
    heads, columns = EXTENTS[port]
    t.set_output().set_name(port).set_dim([B, heads, COLUMNS if port in KEYS else ROWS, columns])
    t.set_stride(packed.stride(port)).set_data_type(graphs.FLOAT)
    t.set_ragged_offset(ragged(g, pack, packed, port)).set_ragged_offset_multiplier(packed.multiplier(port))
    pack[port] = packed.memory(port)


def inputs():
    rows = {"q": ROWS, "k": COLUMNS, "v": COLUMNS}
    return {n: values(B, EXTENTS[n][0], rows[n], EXTENTS[n][1], seed=s) for s, n in enumerate(rows)}


def drawn(packed, options, back=False):
    plain, loss = inputs(), values(B, H, ROWS, DV, seed=3)
    g, pack = graphs.new(), {}
    if not back:
        given = {port: read(g, pack, packed, port, t) for port, t in plain.items()}
        largest = g.tensor([B, H, ROWS, 1], name="score_max")
        options = options | {"generate_stats": True, "score_max": largest}
        made = [*g.sdpa(**given, attn_scale=SCALE, use_padding_mask=True, **padding(g, pack), **options), largest]
        ports = "O", "Stats", "score_max"
    else:
        exact = attended.attention(*plain.values(), SCALE, lengths=LENGTHS, **MEANS[id(options)])
        plain |= {"o": exact["O"], "dO": loss, "stats": exact["Stats"]}
        given = {port: read(g, pack, packed, port, t) for port, t in plain.items()}
        made = g.sdpa_backward(**given, attn_scale=SCALE, use_padding_mask=True, **padding(g, pack), **options)
        ports = "dQ", "dK", "dV"
    for port, t in zip(ports, made, strict=True):
        write(g, pack, packed, port, t)
    return g, pack, ports


MEANS = {id(options): means for options, means in MASKED.values()}


def exactly(means):
    return attended.attention(*inputs().values(), SCALE, lengths=LENGTHS, loss=values(B, H, ROWS, DV, seed=3), **means)


def hold(pack, packed, ports, exact):
    """The sequences are exact, and nothing else is written but rows behind each up to the next."""
    for port in ports:
        wanted = exact[port if port in exact else port.lower()]
        mine = torch.zeros_like(wanted)
        for b, length in enumerate(lengths_of(port)):
            mine[b, :, :length] = wanted[b, :, :length]
        torch.testing.assert_close(
            packed.padded(port, pack[port]), mine, rtol=2e-5, atol=2e-5, msg=lambda m, p=port: f"{p}: {m}"
        )
        assert (pack[port][:, EXTENTS[port][0] :] == CANARY).all(), port


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("name", PACKED)
def test_sequences_one_behind_another(name, masked, back):
    packed, (options, means) = PACKED[name], MASKED[masked]
    g, pack, ports = drawn(packed, options, back)
    graphs.run(g, pack)
    hold(pack, packed, ports, exactly(means))


def test_page_tables_one_behind_another():
    """As many numbers as sequences have pages, 4 and 2."""
    g = graphs.new(io_data_type=BF16)
    pack, exact = attention_options.drawn(g, "paged, tables one behind another", KV, False)
    assert pack["paged_attention_k_table"].shape == (6, 1)
    graphs.run(g, pack)
    attention_options.hold(pack, exact)


def test_queries_keys_and_values_of_one_memory():
    """Views of [rows, 3, heads, columns], and no more memory than there are rows."""
    lengths, heads, width = [2, 3], 2, 8
    whole = values(sum(lengths), 3, heads, width)
    g = graphs.new()
    at = torch.tensor([0, 2, 5]).reshape(-1, 1, 1, 1) * 3 * heads * width
    offsets, long = (
        g.tensor_like(at, name="at"),
        g.tensor([2, 1, 1, 1], data_type=graphfuse.data_type.INT32, name="long"),
    )
    stride = [5 * 3 * heads * width, width, 3 * heads * width, 1]
    q, k, v = (g.tensor([2, heads, 4, width], stride, ragged_offset=offsets, name=name) for name in "qkv")
    o = g.sdpa(q, k, v, use_padding_mask=True, seq_len_q=long, seq_len_kv=long)[0].set_output().set_name("o")
    o.set_dim([2, heads, 4, width]).set_stride([4 * heads * width, width, heads * width, 1])
    o.set_ragged_offset(offsets).set_ragged_offset_multiplier(1)
    o_at = g.tensor_like(at, name="o_at")
    o.set_ragged_offset(o_at)
    out = torch.full((sum(lengths), heads, width), CANARY)
    pack = dict(zip("qkv", whole.unbind(1), strict=True)) | {"at": at, "o_at": at // 3, "o": out}
    graphs.run(g, pack | {"long": torch.tensor(lengths).int().reshape(2, 1, 1, 1)})
    for rows, one in zip(whole.double().split(lengths), out.double().split(lengths), strict=True):
        q, k, v = (t.movedim(0, 1) for t in rows.unbind(1))
        exact = torch.softmax(q @ k.mT, -1) @ v
        torch.testing.assert_close(one.movedim(0, 1), exact, rtol=2e-5, atol=2e-5)


def test_other_lengths_need_no_new_plan():
    g, pack, ports = drawn(PACKED["dense"], {})
    g.build([heur_mode.FALLBACK])
    g.execute(pack)
    short = [1, 0, 0]
    for of in ("q", "kv"):
        pack[f"seq_len_{of}"] = torch.tensor(short).int().reshape(-1, 1, 1, 1)
    for port in ("q", "k", "v", *ports):
        row = PACKED["dense"].stride(port)[2]
        pack[f"{port}_at"] = torch.tensor([0, row, row, row]).int().reshape(-1, 1, 1, 1)
        pack[port] = pack[port][:1].clone()
    g.execute(pack)
    exact = inputs()["v"][0, :, 0].repeat_interleave(2, dim=0)
    torch.testing.assert_close(pack["O"][0], exact)
    for of in ("q", "kv"):
        pack[f"seq_len_{of}"] = torch.zeros_like(pack[f"seq_len_{of}"])
    for port in ("q", "k", "v", *ports):
        pack[f"{port}_at"] = torch.zeros_like(pack[f"{port}_at"])
    pack["O"].fill_(CANARY)
    g.execute(pack)
    assert (pack["O"] == CANARY).all(), "no sequence has a row"


@pytest.mark.parametrize("dtype", [BF16, HALF, E4M3])
def test_narrow_types(dtype):
    packed, plain = PACKED["dense"], {n: t.to(graphs.TORCH[dtype]) for n, t in inputs().items()}
    g, pack = graphs.new(), {}
    given = {port: read(g, pack, packed, port, t).set_data_type(dtype) for port, t in plain.items()}
    o = g.sdpa(**given, attn_scale=SCALE, use_padding_mask=True, **padding(g, pack))[0]
    write(g, pack, packed, "O", o)
    pack |= {port: pack[port].to(graphs.TORCH[dtype]) for port in plain}
    graphs.run(g, pack)
    exact = attended.attention(*(t.double() for t in plain.values()), SCALE, lengths=LENGTHS)
    hold(pack, packed, ["O"], exact)


def test_read_back():
    g, _, _ = drawn(PACKED["in rows"], {})
    g.validate()
    found: dict = {}
    exec(str(g), found)
    found["graph"].validate()
    read = graphfuse.pygraph.from_json(g.to_json())
    assert g.key() == read.key() == found["graph"].key()
    assert read.find_tensor("q").get_ragged_offset() is read.find_tensor("q_at")
    assert read.find_tensor("q").get_ragged_offset_multiplier() == H * D


def test_keys_tell_layouts_apart():
    """Whether batches are ragged, which offsets are whose, and their unit."""

    def key(change):
        g, _, _ = drawn(PACKED["dense"], {})
        change(g)
        g.validate()
        return g.key()

    def swapped(g):
        k, v = g.find_tensor("k"), g.find_tensor("v")
        one, two = k.get_ragged_offset(), v.get_ragged_offset()
        k.set_ragged_offset(two), v.set_ragged_offset(two)
        assert one is not two

    changes = [
        lambda g: None,
        swapped,
        lambda g: g.find_tensor("q").set_ragged_offset(None),
        lambda g: g.find_tensor("q").set_ragged_offset_multiplier(2),
    ]
    assert len({key(change) for change in changes}) == len(changes)


def small(g, **options):
    q, k, v = (g.tensor([2, 1, 4, 8], name=name) for name in "qkv")
    long = g.tensor([2, 1, 1, 1], data_type=graphfuse.data_type.INT32, name="long")
    given = {"use_padding_mask": True, "seq_len_q": long, "seq_len_kv": long} | options
    g.sdpa(q, k, v, **given, name="a")[0].set_output().set_name("o")
    return q


def of(dim=(3, 1, 1, 1), data_type=graphfuse.data_type.INT32, **others):
    return lambda g: g.tensor(list(dim), data_type=data_type, name="at", **others)


WRONG = {
    "extents": (
        of((2, 1, 1, 1)),
        {},
        r"offset of q \(tensor 'q'\), tensor 'at', has dim \[2, 1, 1, 1\]; accepted: \[3",
    ),
    "type": (of(data_type=graphfuse.data_type.FLOAT), {}, "'at', is FLOAT; accepted: INT32 or INT64"),
    "by value": (of((1, 1, 1, 1), is_pass_by_value=True), {}, "must be a tensor of this graph that execute is given"),
    "another graph": (lambda g: of()(graphs.new()), {}, "must be a tensor of this graph that execute is given"),
    "made": (
        lambda g: g.neg(g.tensor([3, 1, 1, 1])).set_output().set_data_type(graphfuse.data_type.INT32),
        {},
        "must be a tensor of this graph that execute is given",
    ),
    "no padding": (
        of(),
        {"use_padding_mask": False, "seq_len_q": None, "seq_len_kv": None},
        r"q \(tensor 'q'\) is ragged; it needs use_padding_mask=True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    offsets, options, message = WRONG[name]
    g = graphs.new()
    small(g, **options).set_ragged_offset(offsets(g))
    with pytest.raises(GraphValidationError, match=rf"node 'a' \(sdpa\): .*{message}"):
        g.validate()


def test_what_is_no_offset():
    t = graphs.new().tensor([2, 1, 4, 8], name="t")
    with pytest.raises(GraphTypeError, match="'t': ragged offset must be a tensor of its graph, got 3"):
        t.set_ragged_offset(3)
    for wrong in (0, 1.0, True):
        with pytest.raises(GraphValidationError, match=f"'t': a ragged offset multiplier must be .*got {wrong}"):
            t.set_ragged_offset_multiplier(wrong)


def test_nodes_that_take_no_ragged_tensors():
    g = graphs.new()
    q = small(g)
    q.set_ragged_offset(of()(g))
    g.relu(q, name="r").set_output()
    with pytest.raises(
        GraphValidationError, match=r"'r' \(relu\): input \(tensor 'q'\) is ragged; .*none of its tensors"
    ):
        g.validate()
    g = graphs.new()
    q = small(g)
    g.find_tensor("long").set_ragged_offset(of()(g))
    with pytest.raises(
        GraphValidationError,
        match=r"seq_len_q \(tensor 'long'\) is ragged; accepted as such: q, k, v, paged_attention_k_table",
    ):
        g.validate()


def test_rows_on_one_another():
    g = graphs.new()
    small(g).set_stride([32, 8, 0, 1]).set_ragged_offset(of()(g))
    with pytest.raises(GraphValidationError, match=r"q \(tensor 'q'\) is ragged and has stride 0 between rows"):
        g.validate()


@pytest.mark.parametrize("at", [[0, 16, 8], [-8, 0, 8], [0, 32, 72]])
def test_offsets_that_cannot_be(at):
    g = graphs.new()
    small(g).set_ragged_offset(of()(g))
    g.build([heur_mode.FALLBACK])
    pack = {name: torch.zeros(2, 1, 4, 8) for name in "qkvo"} | {"long": torch.ones(2, 1, 1, 1).int()}
    pack["at"] = torch.tensor(at).int().reshape(3, 1, 1, 1)
    with pytest.raises(VariantPackError, match="'at'.*its offsets of tensor 'q'.*ascending numbers from 0 to 64"):
        g.execute(pack | {"q": torch.zeros(3, 1, 4, 8)})


def test_offsets_beyond_the_memory():
    """In a call that is like one before, too."""
    g = graphs.new()
    small(g).set_ragged_offset(of()(g))
    g.build([heur_mode.FALLBACK])
    pack = {name: torch.zeros(2, 1, 4, 8) for name in "qkvo"} | {"long": torch.ones(2, 1, 1, 1).int()}
    pack |= {"q": torch.zeros(24), "at": torch.tensor([0, 8, 24]).int().reshape(3, 1, 1, 1)}
    g.execute(pack)
    pack["at"][2] = 32
    with pytest.raises(VariantPackError, match="'q'.*the memory given has 24 elements; accepted: .*, 32 or more"):
        g.execute(pack)
    g.execute(pack | {"q": torch.zeros(32)})


@pytest.mark.parametrize("at", [[0, 8, 16], [0, 1, 2], [4, 16, 30]])
def test_offsets_with_no_room_for_the_rows(at):
    """Of sequences of two rows."""
    g = graphs.new()
    small(g).set_ragged_offset(of()(g))
    g.build([heur_mode.FALLBACK])
    pack = {name: torch.zeros(2, 1, 4, 8) for name in "qkvo"} | {"long": torch.full((2, 1, 1, 1), 2).int()}
    pack["at"] = torch.tensor(at).int().reshape(3, 1, 1, 1)
    with pytest.raises(VariantPackError, match=r"'a' \(sdpa\): q has room for .* rows by its .*; needed: \[2, 2\]"):
        g.execute(pack)


def test_memory_of_a_ragged_tensor():
    """The tensor, its elements in a row, rows of all batches."""
    g = graphs.new()
    small(g).set_ragged_offset(of()(g))
    g.build([heur_mode.FALLBACK])
    pack = {name: torch.zeros(2, 1, 4, 8) for name in "qkvo"} | {"long": torch.ones(2, 1, 1, 1).int()}
    pack["at"] = torch.tensor([0, 8, 16]).int().reshape(3, 1, 1, 1)
    for memory in (torch.zeros(16), torch.zeros(2, 1, 8)):
        g.execute(pack | {"q": memory})
    with pytest.raises(
        VariantPackError, match=r"'q'.*the shape given is \[4, 8\], stride \[16, 2\]; accepted for a ragged"
    ):
        g.execute(pack | {"q": torch.zeros(4, 16)[:, ::2]})


def test_overrides_keep_offsets():
    """Of a graph for 3 sequences, the first 2."""
    packed, plain = PACKED["dense"], inputs()
    g, pack = graphs.new(is_override_shape_enabled=True), {}
    given = {port: read(g, pack, packed, port, t) for port, t in plain.items()}
    o = g.sdpa(**given, attn_scale=SCALE, use_padding_mask=True, **padding(g, pack))[0]
    write(g, pack, packed, "O", o)
    g.build([heur_mode.FALLBACK])
    few = {}
    for name, t in pack.items():
        dim = g.find_tensor(name).get_dim()
        if name.endswith("_at"):
            pack[name] = t[:3].clone()
        elif name.startswith("seq"):
            pack[name] = t[:2].clone()
        few[g.find_tensor(name).get_uid()] = [3 if name.endswith("_at") else 2, *dim[1:]]
    g.execute(pack, override_uids=[*few], override_shapes=[*few.values()])
    exact = exactly({})["O"]
    torch.testing.assert_close(pack["O"][:3].movedim(0, 1).double(), exact[0, :, :3], rtol=2e-5, atol=2e-5)
    assert (pack["O"][3:] == CANARY).all()


def test_a_ragged_output_is_where_its_first_rows_are():
    g, pack, _ = drawn(PACKED["dense"], {})
    g.build([heur_mode.FALLBACK])
    with pytest.raises(VariantPackError, match="output tensor 'O'.*overlaps"):
        shared = pack["O"].flatten()[: pack["v"].numel()].view_as(pack["v"])
        g.execute(pack | {"v": shared.copy_(pack["v"])})
