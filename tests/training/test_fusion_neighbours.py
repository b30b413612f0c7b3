"""What inductor would compute in one kernel with a norm, in graphs that are compiled: what is left to it because of
that, what is not, and the bytes and names that the report has."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.analysis import cost
from graphfuse.torch.compile_backend import compiled_graphs
from graphfuse.torch.regions import choose
from graphfuse.torch.regions import selection as regions
from support.traces import ABOVE, BELOW, recorded

pytestmark = [pytest.mark.usefixtures("as_on_a_gpu"), pytest.mark.torch]
HALF = torch.bfloat16
T, C = 8, 256
EPS = 1e-5


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cost, "DEVICE", "cpu")


def llama(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer(x, w):
    return F.layer_norm(x, (C,), w)


def given(rows=T, gradients=False):
    """x, r, a vector and a matrix."""
    shapes = (rows, C), (rows, C), (C,), (C, C)
    return [torch.ones(shape, dtype=HALF, requires_grad=gradients) for shape in shapes]


def judged(function, tensors, how="dynamo"):
    graph, _ = recorded(function, tensors, how)
    return compiled_graphs.replace_in(graph, declines=True)


def by_blocks(y, size=128):
    wide = y.float().view(*y.shape[:-1], -1, size)
    scale = wide.abs().amax(-1, keepdim=True).clamp(1e-4) / 448
    return (wide / scale).to(torch.float8_e4m3fn).view(y.shape), scale


def as_int8(y):
    scale = y.abs().amax(-1, keepdim=True).float() / 127
    return torch.round(y.float() / scale).clamp(-128, 127).to(torch.int8), scale


def both(function):
    """What a function makes of a sum, and the sum."""
    return lambda x, r, w, m: (lambda total: (function(total, w), total))(x + r)


FREE = [
    ("a product behind it", lambda x, r, w, m: llama(x, w) @ m),
    ("products around it", lambda x, r, w, m: llama(x @ m, w) @ m),
    ("a view behind it", lambda x, r, w, m: llama(x, w).view(2, -1, C).transpose(0, 1)),
    ("one row of it", lambda x, r, w, m: llama(x, w)[-1:] @ m),
    ("the residual sum behind the layer", lambda x, r, w, m: F.silu(x + llama(x, w) @ m)),
    ("a sum that is read behind the layer", lambda x, r, w, m: (lambda h: h + llama(h, w) @ m)(x @ m + r)),
    ("no dropout", lambda x, r, w, m: F.dropout(llama(x, w), 0.1, training=False)),
    ("dropout of nothing", lambda x, r, w, m: F.dropout(llama(x, w), p=0.0)),
    ("a cast to its type", lambda x, r, w, m: llama(x, w).to(HALF).contiguous()),
    ("a sum over tokens that reads what is there", lambda x, r, w, m: (lambda y: (y @ m, y.mean(0)))(llama(x, w))),
    ("its extents", lambda x, r, w, m: llama(x, w).view(-1, x.shape[0], C) @ m),
    ("a value of each row", lambda x, r, w, m: torch.logsumexp(x.float(), -1).add(1).sum()),
    ("a sum of losses", lambda x, r, w, m: F.cross_entropy(x.float(), torch.arange(T))),
    ("a value of each row, which others read", lambda x, r, w, m: F.softplus(torch.logsumexp(x, -1)).sigmoid() @ r),
    ("what all rows share", lambda x, r, w, m: F.softmax(x + r[:1].flip(-1), -1)),
    ("a gate that a product reads, too", lambda x, r, w, m: llama(F.gelu(x) @ m, w)),
]

LLAMA, SUMMED = "rmsnorm, mul", "add, rmsnorm, mul"
# Before 2.13 torch makes NaN of what is beyond FP8.
SATURATES = not torch.full((1,), 1e4).to(torch.float8_e4m3fn).isnan().item()
FP8 = f"{'' if SATURATES else 'abs, cmp_gt, binary_select, '}cast to FP8_E4M3"
BETWEEN = f"{BELOW}, binary_select, {ABOVE}"
BLOCKS = f"{'' if SATURATES else 'cmp_gt, '}cast to FP8_E4M3"

# What inductor would compute in one kernel with a norm, and a region does, too: its operations.
TAKEN = [
    (lambda x, r, w, m: F.gelu(llama(x, w)), f"{LLAMA}, gelu"),
    (lambda x, r, w, m: F.relu(llama(x, w)) ** 2, f"{LLAMA}, relu"),  # one pow is named once
    (lambda x, r, w, m: F.silu(llama(x, w)) * r, f"{LLAMA}, swish"),
    (lambda x, r, w, m: llama(x, w) + r, f"{LLAMA}, add"),
    (lambda x, r, w, m: llama(x, w).mul_(2), LLAMA),
    (lambda x, r, w, m: llama(x, w).to(torch.float8_e4m3fn), f"{LLAMA}, {FP8}"),
    (lambda x, r, w, m: llama(x, w).abs().amax(-1), f"{LLAMA}, abs, reduction"),
    (lambda x, r, w, m: (lambda y: (y @ m, F.gelu(y)))(llama(x, w)), f"{LLAMA}, gelu"),
    (lambda x, r, w, m: llama(F.gelu(x), w), f"gelu, {LLAMA}"),
    (lambda x, r, w, m: (lambda h: (llama(h, w), h @ m))(F.gelu(x)), f"gelu, {LLAMA}"),
    (lambda x, r, w, m: (llama(x, w), F.gelu(x)), f"{LLAMA}, gelu"),
    (lambda x, r, w, m: both(llama)(F.gelu(x), r, w, m), f"gelu, {SUMMED}"),
    (lambda x, r, w, m: (lambda h: (llama(h, w), h, F.gelu(h)))(x + r), f"{SUMMED}, gelu"),
    (lambda x, r, w, m: llama(x + r, w), SUMMED),
    (lambda x, r, w, m: llama(r + llama(x, w), w), f"{LLAMA}, add"),
    (lambda x, r, w, m: by_blocks(llama(x, w)), f"{LLAMA}, abs, reduction, {BELOW}, binary_select, div, {BLOCKS}"),
    (lambda x, r, w, m: as_int8(llama(x, w)), f"{LLAMA}, abs, reduction, div, round, {BETWEEN}, cast to INT8"),
    (lambda x, r, w, m: as_int8(x / w), f"div, abs, reduction, round, {BETWEEN}, cast to INT8"),
    (lambda x, r, w, m: as_int8(F.silu(x) * r), f"swish, mul, abs, reduction, div, round, {BETWEEN}, cast to INT8"),
]

# What no region has, by the bytes that it costs: written and read again, or read again alone.
COSTLY = [
    (lambda x, r, w, m: F.gelu(llama(x, w)[None].transpose(0, 1)), 4, "gelu behind it"),
    (lambda x, r, w, m: F.dropout(llama(x, w), 0.1), 4, "dropout behind it"),
    (lambda x, r, w, m: llama(x, w).flip(-1), 4, "flip behind it"),
    (lambda x, r, w, m: torch.cat([llama(x, w), r], -1), 4, "cat behind it"),
    (lambda x, r, w, m: llama(x, w).mean(0), 2, "mean behind it"),
    (lambda x, r, w, m: (lambda h: h + llama(h, w) @ m)(F.embedding(torch.arange(T), r)), 2, "embedding before it"),
    (lambda x, r, w, m: F.softmax(x.view(2, -1, C) + r[: T // 2].flip(-1), -1), 2, "flip before it"),
]


@pytest.mark.parametrize(("what", "function"), FREE, ids=[what for what, _ in FREE])
def test_what_costs_nothing(what, function):
    entry, *_ = judged(function, given())
    assert entry.is_replaced, entry.why


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize(("function", "operations"), TAKEN)
def test_what_a_region_takes(function, operations, how):
    entry, *others = judged(function, given(), how)
    assert (entry.became, entry.why) == ("region", operations)
    assert all(other.why.startswith("with ") for other in others)


def test_two_rows_in_a_region():
    entry, other = judged(lambda x, r, w, m: F.softmax(layer(x, w), -1), given())
    assert (entry.became, entry.why, other.why) == ("region", "layernorm, softmax", f"with {entry.name}")


@pytest.mark.parametrize("how", ["dynamo", "aten"])
@pytest.mark.parametrize(("function", "moved", "what"), COSTLY, ids=[f"{what}" for *_, what in COSTLY])
def test_what_is_left_to_inductor(function, moved, what, how):
    entry, *_ = judged(function, given(), how)
    _, start, said = entry.why.split(": ")
    assert start == f"the operator would move {moved} bytes an element more than inductor alone"
    assert said == what or how == "aten"
    graph, _ = recorded(function, given(), how)
    assert compiled_graphs.replace_in(graph, declines=False)[0].is_replaced


def test_a_region_is_left_for_its_neighbours():
    """Blocks of columns that no kernel reduces beside rows are rows of their own, which a region begins with."""
    tensors = [torch.ones(shape, dtype=HALF) for shape in ((T, 384), (384,))]
    _, entry = judged(lambda x, w: by_blocks(llama(x, w), 96), tensors)
    assert entry.why == (
        f"abs, reduction, {BELOW}, binary_select, div, {BLOCKS}: the operator would move 8 bytes an element more "
        "than inductor alone: cast to float32 before it; parts of 96 columns are reduced; accepted: a power of two "
        "from 8 to 1024, as a warp has each part"
    )


def test_what_inductor_would_join_is_one_region():
    """Two norms of a sum, one with a weight that is a part of another tensor. A norm for a product is by itself."""
    (entry,) = judged(lambda x, r, w, m: (lambda t: (llama(t, w), llama(t, r[0]), t))(x + r), given())
    assert (entry.became, entry.why) == ("region", SUMMED)
    entries = judged(lambda x, r, w, m: (llama(x, w) @ m, F.gelu(llama(r, w))), given())
    assert [entry.why for entry in entries] == [LLAMA, f"{LLAMA}, gelu"]


def test_autocast_casts_what_a_product_reads():
    def function(x, w, m):
        with torch.autocast("cpu", HALF):
            return F.linear(F.layer_norm(x, (C,), w), m)

    tensors = [torch.ones(shape) for shape in ((T, C), (C,), (C, C))]
    (entry,) = judged(function, tensors)
    assert entry.why == (
        "layernorm: the operator would move 8 bytes an element more than inductor alone: "
        "autocast's cast for linear behind it"
    )


# Gradients


def crossings(function, rows=T):
    """Bytes that are moved once more by each region that a graph might have, forward and backward."""
    graph, _ = recorded(function, given(rows, gradients=True), "dynamo")
    found = choose.find(graph.graph, dict.fromkeys(graph.graph.nodes, 0))
    return [[(c.moved, c.moved_backward) for c in regions.replaced_nodes(region).crossings] for region in found]


@pytest.mark.parametrize(
    ("function", "moved"),
    [
        (lambda x, r, w, m: F.gelu(llama(x, w)), []),
        (lambda x, r, w, m: F.dropout(llama(x, w)), [(4, 4)]),
        (lambda x, r, w, m: torch.cat([llama(x, w), r], -1), [(4, 0)]),  # the gradient of a part is that of the whole
        (lambda x, r, w, m: llama(F.dropout(x), w), [(4, 4)]),
        (lambda x, r, w, m: both(llama)(F.dropout(x), r, w, m), [(4, 4)]),
        (lambda x, r, w, m: llama(x + r, w), []),
    ],
)
def test_what_the_backward_moves(function, moved):
    assert crossings(function) == [moved]


def test_what_the_backward_saves_counts():
    function = lambda x, r, w, m: torch.cat([llama(x, w), r], -1)  # noqa: E731
    (entry,) = judged(function, given(4096, gradients=True))
    assert entry.is_replaced  # the gradient of a part is that of the whole
    (entry,) = judged(lambda x, r, w, m: F.dropout(llama(x, w), 0.1), given(4096, gradients=True))
    assert entry.why == (
        f"{LLAMA}: the operator would move 8 bytes an element more than inductor alone, and save no more than 5.5 "
        "otherwise: "
        "dropout behind it"
    )
    tensors = given(4096, gradients=True)
    tensors[2].requires_grad_(False)  # without a weight's gradient it saves nothing
    (entry,) = judged(function, tensors)
    assert not entry.is_replaced
    with torch.no_grad():
        (entry,) = judged(function, given(4096, gradients=True))
    assert not entry.is_replaced


def test_gradients_of_samples_cost_what_is_read_again(monkeypatch):
    """The backward of adaptive layer norm adds them up beside its kernel."""

    def function(x, r, s, m):
        product = x * r
        return F.layer_norm(product, (C,)) * (1 + s) + s, product

    tensors = [t.view(4, -1, C).detach().requires_grad_() for t in given(4096)[:2]]
    tensors += [torch.ones(4, 1, C, dtype=HALF, requires_grad=True), torch.ones(1)]
    (entry,) = judged(function, tensors)
    assert entry.is_replaced
    monkeypatch.setattr(cost, "HELD", 0)  # the L2 holds no tensor
    (entry,) = judged(function, tensors)
    assert entry.why == f"mul, layernorm, add: {cost.SUMMED}"
