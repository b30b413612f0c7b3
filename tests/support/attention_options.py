"""Attention's options for torch's kernels: what each is given, and what it means to ``attended``."""

import torch
from torch.nn import functional as F

from graphfuse import diagonal_alignment
from support import attended

LENGTHS = (10, 7), (13, 5)
SHORT = {"seq_len_q": torch.tensor(LENGTHS[0]), "seq_len_kv": torch.tensor(LENGTHS[1])}
SHORT = {name: t.int().reshape(2, 1, 1, 1) for name, t in SHORT.items()}
STARTS = {f"cu_{name}": F.pad(t.cumsum(0), (0, 0, 0, 0, 0, 0, 1, 0)).int() for name, t in SHORT.items()}
ADDED = torch.randn(1, 4, 10, 13, generator=torch.Generator().manual_seed(9)).bfloat16()
ADDED[:, 1, 3] = -float("inf")
PADDED = {"use_padding_mask": True}
BAND = {"diagonal_band_left_bound": 4, "diagonal_band_right_bound": 1}
OPTIONS = {
    "plain": ({}, {}, {}),
    "band": ({}, BAND, {"left": 4, "right": 1}),
    "top left": ({}, {"use_causal_mask": True}, {"right": 0}),
    "bottom right": ({}, {"use_causal_mask_bottom_right": True}, {"right": 0, "bottom_right": True}),
    "bias": ({"bias": ADDED}, {}, {"bias": ADDED}),
    "bias of columns": ({"bias": ADDED[:, :1, :1]}, {}, {"bias": ADDED[:, :1, :1]}),
    "bias, causal": ({"bias": ADDED}, {"use_causal_mask": True}, {"bias": ADDED, "right": 0}),
    "padding": (SHORT, PADDED, {"lengths": LENGTHS}),
    "padding, starts": (STARTS, PADDED, {"lengths": LENGTHS}),
    "padding, bias, causal": (
        SHORT | {"bias": ADDED},
        PADDED | {"use_causal_mask_bottom_right": True},
        {"lengths": LENGTHS, "bias": ADDED, "right": 0, "bottom_right": True},
    ),
    "padding, causal": (SHORT, PADDED | {"use_causal_mask": True}, {"lengths": LENGTHS, "right": 0}),
    "padding, band": (
        SHORT,
        PADDED | BAND | {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT},
        {"lengths": LENGTHS, "left": 4, "right": 1, "bottom_right": True},
    ),
    "ragged": (SHORT, PADDED, {"lengths": LENGTHS}),
    "ragged, starts, causal": (
        STARTS,
        PADDED | {"use_causal_mask_bottom_right": True},
        {"lengths": LENGTHS, "right": 0, "bottom_right": True},
    ),
    "ragged, causal": (SHORT, PADDED | {"use_causal_mask": True}, {"lengths": LENGTHS, "right": 0}),
    "ragged, in elements": (SHORT, PADDED, {"lengths": LENGTHS}),
    "paged": (SHORT, PADDED, {"lengths": LENGTHS}),
    "paged, tables one behind another": (SHORT, PADDED, {"lengths": LENGTHS}),
    "paged, q ragged": (SHORT, PADDED, {"lengths": LENGTHS}),
    "tiles": (
        {"block_mask": torch.tensor([1, 0, 1, 1], dtype=torch.uint8).reshape(1, 4, 1, 1)},
        {},
        {"tiles": lambda b, h, i, j: h != 1},
    ),
}

CASES = [
    (name, back) for name in OPTIONS for back in (False, True) if not (back and name.startswith(("tiles", "paged")))
]
"""Options with whether it is of the gradients, which know neither tiles nor pages."""

_OF_KEYS = ("k", "v", "dK", "dV")
_PAGE = 4


def rows(port: str, padded: torch.Tensor) -> torch.Tensor:
    """Rows of all sequences, one behind another, [rows, heads, columns]."""
    return torch.cat([t[:, :end].transpose(0, 1) for t, end in zip(padded, LENGTHS[port in _OF_KEYS], strict=True)])


def paged(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages in another order, and their numbers; what is behind the last sequence's end is no page."""
    count = -(-t.shape[2] // _PAGE)
    whole = F.pad(t, (0, 0, 0, count * _PAGE - t.shape[2]), value=float("nan"))
    pages = whole.unflatten(2, (count, _PAGE)).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(7))
    table = order.argsort().reshape(2, 1, count, 1).int()
    table[1, 0, -(-LENGTHS[1][1] // _PAGE) :] = -5
    return pages[order], table


def inputs(name: str, heads: int) -> tuple[dict, dict]:
    """Tensors of forward and backward by port, and what comes out in float64. NaN lies beyond ends of sequences."""
    _, _, means = OPTIONS[name]

    def values(count: int, rows: int, seed: int):
        return torch.randn(2, count, rows, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()

    q, k, v, loss = values(4, 10, 0), values(heads, 13, 1), values(heads, 13, 2), values(4, 10, 3)
    exact = attended.attention(q, k, v, 0.25, loss=loss, **means)
    plain = {"q": q, "k": k, "v": v, "o": exact["O"].bfloat16(), "dO": loss, "stats": exact["Stats"].float()}
    if "lengths" in means:
        plain = {n: t.clone() for n, t in plain.items()}
        for n, t in plain.items():
            for b, end in enumerate(LENGTHS[n in ("k", "v")]):
                t[b, :, end:] = float("nan")
    return plain, {port: exact.get(port, exact.get(port.lower())) for port in ("O", "Stats", "dQ", "dK", "dV", "dBias")}


def drawn(g, name: str, heads: int, back: bool, device: str = "cpu", of_bias: bool = False) -> tuple[dict, dict]:
    """What `g` is bound to once it has the node, and its exact outputs."""
    extra, options, _ = OPTIONS[name]
    plain, exact = inputs(name, heads)
    if name.startswith("paged"):
        for n in ("k", "v"):
            plain[n], table = paged(plain[n])
            extra = extra | {f"paged_attention_{n}_table": table}
        options = options | {"paged_attention_max_seq_len_kv": 13}
    pack = {n: t.to(device) for n, t in (extra | plain).items() if back or n not in ("o", "dO", "stats")}
    given = {n: g.tensor_like(t, name=n) for n, t in pack.items()}
    if "ragged" in name:
        for n in given.keys() & (plain.keys() if name.startswith("ragged") else {"q"}):
            _at_offsets(g, given[n], n, pack, name)
            pack[n] = rows(n, plain[n]).to(device)
    if name.startswith("paged, tables"):
        for n in ("k", "v"):
            _one_table(g, given[f"paged_attention_{n}_table"], pack)
    options = options | {"attn_scale": 0.25} | ({} if back else {"generate_stats": True})
    if of_bias:
        options["dBias"] = g.tensor_like(pack["bias"], name="dBias")
    made = getattr(g, "sdpa_backward" if back else "sdpa")(**given, **options, name="attention")
    made = dict(zip(("dQ", "dK", "dV") if back else ("O", "Stats"), made, strict=True))
    made |= {"dBias": options["dBias"]} if of_bias else {}
    for port, t in made.items():
        like = torch.empty_like(exact[port], dtype=torch.float32 if port == "Stats" else torch.bfloat16, device=device)
        t.set_output().set_name(port).set_data_type(like.dtype).set_dim(like.shape).set_stride(like.stride())
        pack[port] = like.fill_(float("nan"))
        if "ragged" in name:
            _at_offsets(g, t, port, pack, name)
            pack[port] = rows(port, pack[port])
    return pack, {port: exact[port] for port in made}


def _at_offsets(g, t, port: str, pack: dict, option: str) -> None:
    """Sets a tensor to rows of all sequences, and binds where they begin."""
    _, heads, _, columns = t.get_dim()
    unit = 1 if option.endswith("elements") else heads * columns
    name = f"{port}_at"
    starts = F.pad(torch.tensor(LENGTHS[port in _OF_KEYS]).cumsum(0), (1, 0)).int()
    starts = starts * (heads * columns // unit)
    pack[name] = starts.reshape(3, 1, 1, 1).to(pack[port].device)
    offsets = g.tensor_like(pack[name], name=name)
    t.set_stride([0, columns, heads * columns, 1])
    t.set_ragged_offset(offsets).set_ragged_offset_multiplier(unit)


def _one_table(g, t, pack: dict) -> None:
    """Sets a page table to the numbers that sequences have, one behind another."""
    counts = torch.tensor([-(-end // _PAGE) for end in LENGTHS[1]])
    name, table = t.get_name(), pack[t.get_name()]
    pack[name] = torch.cat([numbers[0, :count] for numbers, count in zip(table, counts, strict=True)])
    pack[f"{name}_at"] = F.pad(counts.cumsum(0), (1, 0)).int().reshape(3, 1, 1, 1).to(table.device)
    t.set_ragged_offset(g.tensor_like(pack[f"{name}_at"], name=f"{name}_at"))


def hold(pack: dict, exact: dict) -> None:
    for port, wanted in exact.items():
        got = pack[port].cpu().double()
        wanted = rows(port, wanted) if got.dim() == 3 else wanted
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=4e-2, msg=lambda m, p=port: f"{p}: {m}")
