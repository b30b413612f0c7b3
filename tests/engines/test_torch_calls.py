"""Torch's kernels as an engine, on CPU tensors: what is called, on which views, and what is declined."""

import dataclasses
import re
import threading

import pytest
import torch
from torch.nn import functional as F

from graphfuse import DeviceError, GraphNotSupportedError, convolution_mode, diagonal_alignment, heur_mode, pygraph
from graphfuse.base.device import CPU, for_arch
from graphfuse.contract.engine import NoKnobs
from graphfuse.engines.torch_calls import TorchEngine, settings
from graphfuse.engines.torch_calls import engine as calls
from graphfuse.engines.torch_calls.call import TorchCall
from graphfuse.op_graph.ir import Subgraph
from graphfuse.patterns import epilogues
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.runtime import torch_private
from support import attention_options, graphs
from support.graphs import BF16, E4M3, FLOAT, HALF
from support.products import lowered

H200 = for_arch("sm_90a")
TORCH = {BF16: torch.bfloat16, HALF: torch.float16, FLOAT: torch.float32}


class Drawn:
    """A graph and what its tensors are bound to."""

    def __init__(self):
        self.g, self.pack = graphs.new(), {}

    def read(self, data, name, dtype=BF16):
        data = data if data.dtype is TORCH[dtype] else data.to(TORCH[dtype])
        self.pack[name] = data
        return self.g.tensor(data.shape, data.stride(), dtype, name=name)

    def write(self, t, like, name="out", dtype=BF16):
        t.set_output().set_name(name).set_data_type(dtype).set_dim(like.shape).set_stride(like.stride())
        self.pack[name] = like.fill_(float("nan"))

    def facts(self):
        low = lowered(self.g)
        return Subgraph(low, tuple(range(len(low.nodes))))

    def run(self, **numbers):
        facts = self.facts()
        call = calls.made(facts)
        assert isinstance(call, TorchCall), call
        by_id = {t.id: self.pack.get(t.name) for t in facts.graph.tensors}
        names = {t.id: t.name for t in facts.graph.tensors}
        addresses = [by_id[seen.tensor].data_ptr() for seen in call.seen]
        calls.by_address(call, CPU, lambda device: 0, torch_private.setting)(
            0, *addresses, *(numbers[names[t]] for t in call.numbers)
        )
        return self.pack["out"]

    def declined(self):
        facts = self.facts()
        return str(TorchEngine().why_not(epilogues.EpilogueFacts("node", facts), H200))


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*shape, seed=0):
    """Small ones: their sums are exact, wherever a kernel rounds to bfloat16. Torch's gradients of convolutions round
    partial sums on processors without instructions for bfloat16."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def hold(got, exact, dtype=BF16):
    """One rounding of the exact value, and what sums in float32 may lose."""
    tolerance = {BF16: 2**-8, HALF: 2**-11, FLOAT: 2e-6}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=4e-6)


# Products

BATCHES = {
    "none": ((), (), 0),
    "one": ((5,), (5,), 1),
    "two": ((2, 3), (2, 3), 1),
    "weights": ((2, 3), (1, 1), 0),
    "weights of one row": ((2, 3), (1, 1), 0),
    "broadcast rows": ((1,), (4,), 1),
    "each": ((2, 3), (1, 3), 2),
}


def product(case, batch, dtype=BF16, rows=8):
    of_a, of_b, axes = BATCHES[batch]
    rows = 1 if batch.endswith("one row") else rows
    a, b = values(*of_a, rows, 16), values(*of_b, 16, 6, seed=1)
    y = case.g.matmul(case.read(a, "a", dtype), case.read(b, "b", dtype), name="product")
    return y, axes


def exactly(case):
    return case.pack["a"].double() @ case.pack["b"].double()


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT])
@pytest.mark.parametrize("batch", BATCHES)
def test_products_of_batches(batch, dtype):
    case = Drawn()
    y, axes = product(case, batch, dtype)
    exact = exactly(case)
    case.write(y, torch.empty(exact.shape, dtype=TORCH[dtype]), dtype=dtype)
    assert len(calls.made(case.facts()).seen[0].dim) == 2 + axes
    hold(case.run(), exact, dtype)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2)])
def test_products_of_any_layout(order):
    """Axes of A, B and C in memory in this order."""
    back = [order.index(axis) for axis in range(4)]

    def lying(t):
        return t.permute(order).contiguous().permute(back)

    case = Drawn()
    a, b = lying(values(2, 3, 8, 16)), lying(values(2, 3, 16, 6, seed=1))
    y = case.g.matmul(case.read(a, "a"), case.read(b, "b"))
    exact = exactly(case)
    case.write(y, lying(torch.empty(exact.shape, dtype=torch.bfloat16)))
    hold(case.run(), exact)


@pytest.mark.parametrize("turned", ["a", "b", "ab"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_operands_that_nodes_transpose_are_read_where_they_lie(turned, bias, shape):
    case, operands = Drawn(), []
    bias = bias and not shape
    for seed, (name, rows, columns) in enumerate((("a", 8, 16), ("b", 16, 6))):
        data = values(*shape, rows, columns, seed=seed)
        t = case.read(data.mT.contiguous() if name in turned else data, name)
        last = len(shape), len(shape) + 1
        order = [*range(len(shape)), *(last[::-1] if name in turned else last)]
        operands.append(case.g.transpose(t, permutation=order).set_data_type(BF16) if name in turned else t)
    y = case.g.matmul(*operands)
    a, b = (case.pack[name].mT if name in turned else case.pack[name] for name in "ab")
    exact = a.double() @ b.double()
    if bias:
        y = case.g.bias(y, case.read(values(1, 6, seed=2), "bias"))
        exact = exact + case.pack["bias"].double()
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    (region, *_), _ = regions(case)
    assert len(region.subgraph.nodes) == len(turned) + 1 + bias
    assert {seen.tensor for seen in calls.made(region.subgraph).seen[:2]} <= {*region.subgraph.inputs}
    hold(case.run(), exact)


@pytest.mark.parametrize(
    "dim, first, second",
    [
        ((3, 3, 8, 8), (1, 0, 2, 3), (0, 1, 2, 3)),
        ((6, 6, 6), (0, 1, 2), (1, 2, 0)),
        ((6, 6, 6), (1, 0, 2), (2, 1, 0)),
        ((1, 4, 8, 5), (0, 1, 2, 3), (1, 0, 3, 2)),
        ((3, 8, 8), (0, 2, 1), (0, 2, 1)),
    ],
)
def test_both_operands_are_one_tensor_seen_in_two_ways(dim, first, second):
    case = Drawn()
    x = case.read(values(*dim), "x")
    plain = tuple(range(len(dim)))
    operands = [
        x if order == plain else case.g.transpose(x, permutation=order).set_data_type(BF16) for order in (first, second)
    ]
    y = case.g.matmul(*operands)
    exact = case.pack["x"].double().permute(first) @ case.pack["x"].double().permute(second)
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    assert len(regions(case)[0][0].subgraph.nodes) == 1 + sum(order != plain for order in (first, second))
    hold(case.run(), exact)


def regions(case):
    """Regions of products in a graph."""
    known = plugins.installed()
    return plan.matches(lowered(case.g), dataclasses.replace(known, patterns=(epilogues.PATTERN,)))


@pytest.mark.parametrize("why", ["read twice", "another type", "an output"])
def test_a_transpose_that_others_need_is_none_of_the_product(why):
    case = Drawn()
    a, b = case.read(values(8, 16), "a"), case.read(values(6, 16, seed=1), "b")
    turned = case.g.transpose(b, permutation=[1, 0]).set_data_type(FLOAT if why == "another type" else BF16)
    y = case.g.matmul(a, turned)
    if why == "read twice":
        case.write(case.g.identity(turned), torch.empty(16, 6, dtype=torch.bfloat16), "more")
    if why == "an output":
        case.write(turned, torch.empty(16, 6, dtype=torch.bfloat16), "more")
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    found, _ = regions(case)
    assert {len(region.subgraph.nodes) for region in found} == {1}


def test_rows_and_columns_with_gaps_and_offsets():
    case = Drawn()
    whole_a, whole_b = values(9, 40).bfloat16(), values(20, 33).bfloat16()
    whole = torch.full((9, 50), 7.0, dtype=torch.bfloat16)
    y = case.g.matmul(case.read(whole_a[1:, 8:24], "a"), case.read(whole_b[2:18, ::2], "b"))
    case.write(y, whole[1:, 16:33])
    hold(case.run(), exactly(case))
    assert (whole[:1] == 7).all() and (whole[:, :16] == 7).all() and (whole[:, 33:] == 7).all()


@pytest.mark.parametrize("rows,inner", [(0, 16), (8, 0)])
def test_products_without_rows_or_terms(rows, inner):
    case = Drawn()
    a, b = values(rows, inner), values(inner, 6)
    y = case.g.matmul(case.read(a, "a"), case.read(b, "b"))
    case.write(y, torch.empty(rows, 6, dtype=torch.bfloat16))
    assert torch.equal(case.run(), torch.zeros(rows, 6, dtype=torch.bfloat16))


def test_a_float32_product_is_rounded_once():
    case = Drawn()
    y, _ = product(case, "none", FLOAT)
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    got = case.run()
    assert torch.equal(got, (case.pack["a"] @ case.pack["b"]).bfloat16())


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("batch", ["none", "weights"])
def test_a_bias_and_a_relu_in_the_same_call(batch, relu):
    case = Drawn()
    y, _ = product(case, batch)
    exact = exactly(case)
    bias = values(6, seed=2).view(*[1] * (exact.dim() - 1), 6)
    y = case.g.bias(y, case.read(bias, "bias"), name="bias")
    exact = exact + case.pack["bias"].double()
    if relu:
        y, exact = case.g.relu(y, name="relu"), exact.relu()
    case.write(y, torch.empty(exact.shape, dtype=torch.bfloat16))
    hold(case.run(), exact)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (lambda g, y, bias: g.gelu(g.bias(y, bias, name="bias"), name="last"), "'last' .gelu. is behind node 'bias'"),
        (lambda g, y, bias: g.gelu(y, name="last"), "'last' .gelu. is behind node 'product'"),
        (lambda g, y, bias: g.relu(g.bias(y, bias), upper_clip=6.0, name="last"), "without slope and clips"),
        (lambda g, y, bias: g.add(y, y), "adds the product to itself"),
        (lambda g, y, bias: g.add(y, g.tensor([8, 6], data_type=BF16, name="x"), name="last"), "'x' .* is no bias"),
        (lambda g, y, bias: g.add(y, 2.0), "is passed by value"),
        (lambda g, y, bias: g.bias(y.set_output().set_data_type(BF16), bias), "is read by others, too"),
        (lambda g, y, bias: g.bias(y, g.tensor([1, 6], data_type=FLOAT, name="x")), "'x' .* is not of BFLOAT16"),
    ],
)
def test_other_epilogues_are_declined(after, why):
    case = Drawn()
    y, _ = product(case, "none")
    bias = case.read(values(1, 6), "bias")
    case.write(after(case.g, y, bias), torch.empty(8, 6, dtype=torch.bfloat16))
    assert re.search(why, case.declined()), case.declined()


def test_types_that_are_declined():
    case = Drawn()
    a, b = case.g.tensor([8, 16], data_type=BF16, name="a"), case.g.tensor([16, 6], data_type=HALF, name="b")
    case.g.matmul(a, b).set_output()
    assert "'b' (HALF" in case.declined() and "accepted: one type" in case.declined()
    case = Drawn()
    case.g.matmul(*(case.g.tensor([16, 16], data_type=E4M3, name=n) for n in "ab")).set_output()
    assert "accepted: BFLOAT16, HALF, FLOAT" in case.declined()


# Convolutions

WINDOWS = {
    "plain": ({}, 1),
    "padded": ({"padding": [1, 1]}, 1),
    "strided": ({"padding": [1, 2], "stride": [2, 1], "dilation": [1, 2]}, 1),
    "uneven": ({"pre_padding": [1, 0], "post_padding": [2, 1]}, 1),
    "groups": ({"padding": [1, 1]}, 2),
    "turned": ({"convolution_mode": convolution_mode.CONVOLUTION}, 1),
}


def convolved(x, w, window, groups):
    sides = window.get("padding"), window.get("pre_padding"), window.get("post_padding")
    before, after = (sides[0], sides[0]) if sides[0] else (sides[1] or [0, 0], sides[2] or [0, 0])
    x = F.pad(x, (before[1], after[1], before[0], after[0]))
    w = w.flip(2, 3) if "convolution_mode" in window else w
    return F.conv2d(x, w, None, window.get("stride", 1), 0, window.get("dilation", 1), groups)


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_and_their_gradients(window, last, dtype):
    (given, groups), order = WINDOWS[window], torch.channels_last if last else torch.contiguous_format
    numbers = whole_numbers if dtype is BF16 else values
    x, w = numbers(2, 4, 9, 8), numbers(6, 4 // groups, 3, 3, seed=1)
    x, w = (t.to(TORCH[dtype]).contiguous(memory_format=order) for t in (x, w))
    exact_x, exact_w = (t.double().requires_grad_() for t in (x, w))
    y = convolved(exact_x, exact_w, given, groups)
    loss = numbers(*y.shape, seed=2).to(TORCH[dtype]).contiguous(memory_format=order)
    y.backward(loss.double())
    # What is added up: a float32 sum loses a part of that, however much of it cancels.
    all_x, all_w = (t.double().abs().requires_grad_() for t in (x, w))
    added = convolved(all_x, all_w, given, groups)
    added.backward(loss.double().abs())
    cases = {
        "conv_fprop": ({"image": x, "weight": w}, y.detach(), added.detach()),
        "conv_dgrad": ({"loss": loss, "filter": w}, exact_x.grad, all_x.grad),
        "conv_wgrad": ({"image": x, "loss": loss}, exact_w.grad, all_w.grad),
    }
    rounded = {BF16: 0, FLOAT: 2**-24}[dtype]
    for name, (read, exact, size) in cases.items():
        case = Drawn()
        made = getattr(case.g, name)(**{port: case.read(t, port, dtype) for port, t in read.items()}, **given)
        case.write(made, torch.empty_like(exact, dtype=TORCH[dtype]).contiguous(memory_format=order), dtype=dtype)
        assert ((case.run().double() - exact).abs() <= rounded * exact.abs() + 2**-22 * size).all()


def test_a_convolution_of_volumes_and_its_gradients():
    x, w = whole_numbers(2, 4, 5, 6, 7), whole_numbers(6, 2, 3, 3, 3, seed=1)
    x, w = x.bfloat16().contiguous(memory_format=torch.channels_last_3d), w.bfloat16()
    exact_x, exact_w = (t.double().requires_grad_() for t in (x, w))
    y = F.conv3d(exact_x, exact_w, None, (1, 2, 1), (1, 1, 0), 1, 2)
    loss = whole_numbers(*y.shape, seed=2).bfloat16()
    y.backward(loss.double())
    for name, read, exact in (
        ("conv_fprop", {"image": x, "weight": w}, y.detach()),
        ("conv_dgrad", {"loss": loss, "filter": w}, exact_x.grad),
        ("conv_wgrad", {"image": x, "loss": loss}, exact_w.grad),
    ):
        case = Drawn()
        ports = {port: case.read(t, port) for port, t in read.items()}
        made = getattr(case.g, name)(**ports, padding=[1, 1, 0], stride=[1, 2, 1])
        case.write(made, torch.empty_like(exact, dtype=torch.bfloat16))
        hold(case.run(), exact)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_result_of_another_type_is_rounded_once(dtype):
    x, w = values(2, 4, 9, 8).bfloat16(), values(6, 4, 3, 3).bfloat16()
    case = Drawn()
    y = case.g.conv_fprop(case.read(x, "x"), case.read(w, "w"))
    exact = F.conv2d(x.double(), w.double())
    case.write(y, torch.empty(exact.shape, dtype=TORCH[dtype]), dtype=dtype)
    hold(case.run(), exact, dtype)


def test_a_result_with_gaps():
    x, w = values(2, 4, 9, 8).bfloat16(), values(6, 4, 3, 3).bfloat16()
    case = Drawn()
    y = case.g.conv_fprop(case.read(x, "x"), case.read(w, "w"))
    whole = torch.full((2, 6, 7, 12), 7.0, dtype=torch.bfloat16)
    case.write(y, whole[..., 3:9])
    hold(case.run(), F.conv2d(x.double(), w.double()))
    assert (whole[..., :3] == 7).all() and (whole[..., 9:] == 7).all()


def test_nodes_behind_a_convolution_are_declined():
    case = Drawn()
    y = case.g.conv_fprop(case.read(values(2, 4, 9, 8), "x"), case.read(values(6, 4, 3, 3), "w"), name="conv")
    case.g.relu(y, name="relu").set_output()
    assert "'relu' (relu) is behind node 'conv'" in case.declined()


# Attention


def attention(case, shape=(2, 4, 10, 16), others=None, heads=None, **asked):
    batch, count, rows, columns = shape
    of_k = (batch, heads or count, others or rows, columns)
    q, k, v = values(*shape), values(*of_k, seed=1), values(*of_k, seed=2)
    made = case.g.sdpa(*(case.read(t, n) for t, n in zip((q, k, v), "qkv", strict=True)), name="attention", **asked)
    case.write(made[0], torch.empty(shape, dtype=torch.bfloat16))
    return made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.25, "given"])
def test_attention_with_its_statistics(causal, scale):
    case = Drawn()
    given = {} if scale is None else {"attn_scale": scale}
    if scale == "given":
        given = {"attn_scale": case.g.tensor([1] * 4, data_type=FLOAT, is_pass_by_value=True, name="scale")}
    made = attention(case, use_causal_mask=causal, generate_stats=True, **given)
    stats = torch.empty(2, 4, 10, 1)
    made[1].set_output().set_name("stats")
    case.pack["stats"] = stats
    number = {None: 1.0, "given": 0.5}.get(scale, scale)
    got = case.run(scale=0.5)
    q, k, v = (case.pack[n].double() for n in "qkv")
    scores = q @ k.transpose(-1, -2) * number
    if causal:
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -float("inf"))
    torch.testing.assert_close(got.double(), scores.softmax(-1) @ v, rtol=2e-2, atol=2e-2)
    # Of bfloat16, torch's kernel on processors with AVX2 alone is 2**-14 off.
    torch.testing.assert_close(stats.double(), scores.logsumexp(-1, keepdim=True), rtol=0, atol=2**-13)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("name", "back"), attention_options.CASES)
def test_attention_and_its_gradients_of_all_options(name, back, heads):
    case = Drawn()
    case.pack, exact = attention_options.drawn(case.g, name, heads, back)
    case.pack["out"] = None
    case.run()
    attention_options.hold(case.pack, exact)


@pytest.mark.parametrize(("name", "back"), attention_options.CASES)
def test_plans_for_a_gpu_take_attention_of_all_options(name, back):
    g = pygraph(io_data_type=BF16, intermediate_data_type=FLOAT, compute_data_type=FLOAT, sm_version=90)
    attention_options.drawn(g, name, 4, back)
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert [part.engine.name for part in g._planner.at(0).parts] == ["torch"]


def test_a_plan_says_what_would_have_torch_take_attention():
    g = pygraph(io_data_type=BF16, intermediate_data_type=FLOAT, compute_data_type=FLOAT, sm_version=90)
    g.relu(g.sdpa(*(g.tensor([1, 2, 16, 16]) for _ in range(3)))[0]).set_output()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    assert "is no BFLOAT16; accepted: BFLOAT16; an output of the graph is stored as that" in g.explain()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"use_causal_mask": True, "use_alibi_mask": True}, "has a use_alibi_mask; accepted: none"),
        ({"shape": (2, 4, 10, 12)}, "12 columns; accepted: multiples of 8 up to 256"),
        ({"shape": (2, 4, 10, 264)}, "264 columns; accepted: multiples of 8 up to 256"),
    ],
)
def test_attention_that_is_declined(asked, why):
    case = Drawn()
    attention(case, **asked)
    assert why in case.declined()


@pytest.mark.parametrize(
    ("lying", "why"),
    [
        ({"stride": [640, 160, 1, 10]}, "has stride 10 between columns; accepted: 1"),
        ({"stride": [680, 170, 17, 1]}, "has stride 170; accepted"),
        ({"byte_alignment": 2}, "is aligned to 2 bytes; accepted: 16"),
    ],
)
def test_attention_of_tensors_that_kernels_cannot_read(lying, why):
    g, case = graphs.new(), Drawn()
    case.g, like = g, {"data_type": BF16}
    q, k = g.tensor([2, 4, 10, 16], name="q", **like), g.tensor([2, 4, 10, 16], name="k", **lying, **like)
    g.sdpa(q, k, q)[0].set_output().set_data_type(BF16)
    assert why in case.declined() and "'k'" in case.declined()


def test_attention_needs_a_chip_with_kernels_for_it():
    case = Drawn()
    attention(case)
    facts = epilogues.ProductFacts("attention", case.facts())
    old = dataclasses.replace(H200, compute_capability=(7, 5))
    assert "needs SM80 or newer; cuda:0 is SM75" in str(TorchEngine().why_not(facts, old))
    assert TorchEngine().why_not(facts, H200) is None


@pytest.mark.parametrize(("kind", "missing"), [("cuda", "sees no CUDA device"), ("backends.cudnn", "has no cuDNN")])
def test_a_torch_without_kernels_leaves_the_plan_to_others(kind, missing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind != "cuda")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    case = Drawn()
    case.g.conv_fprop(case.read(values(2, 4, 9, 8), "x"), case.read(values(6, 4, 3, 3), "w")).set_output()
    facts, here = epilogues.ProductFacts("conv", case.facts()), dataclasses.replace(H200, here=True)
    with pytest.raises(GraphNotSupportedError, match=missing):
        TorchEngine().prepare(facts, NoKnobs(), here, None)


def test_masks_that_torch_has_kernels_for():
    bottom = {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT}
    for asked in (
        {"heads": 2},
        {"sliding_window_length": 3},
        {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 2},
        {"others": 12, "use_causal_mask_bottom_right": True},
        {"others": 12, "sliding_window_length": 3, **bottom},
    ):
        case = Drawn()
        attention(case, **asked)
        assert case.declined() == "None"


def test_what_nothing_reads_is_not_made():
    case = Drawn()
    attention(case, generate_stats=True)
    assert [s.dtype for s in calls.made(case.facts()).seen] == [BF16] * 4
    case = Drawn()
    case.g = graphs.new(intermediate_data_type=BF16, intermediate_rounding="declared")
    q = case.read(values(2, 4, 10, 16), "q")
    case.g.sdpa(q, q, q, generate_stats=True)[1].set_output()
    assert "is not read; accepted: nodes that make O" in case.declined()


# Settings of torch's


def test_settings_are_held_and_have_their_values_again():
    matmul = torch.backends.cuda.matmul
    wanted = [*settings.EXACT_PRODUCTS[BF16], *settings.EXACT_PRODUCTS[HALF], *settings.EXACT_PRODUCTS[FLOAT]]
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in (*names, "allow_fp16_accumulation", "allow_tf32")}
    try:
        for user in (True, False):
            for name in before:
                setattr(matmul, name, user)

            def seen(user=user):
                assert not any(getattr(matmul, name) for name in (*names, "allow_fp16_accumulation"))
                assert matmul.fp32_precision != "tf32"
                raise KeyError

            with pytest.raises(KeyError):
                settings.holding(torch_private.setting, wanted)(seen)()
            assert {name: getattr(matmul, name) for name in before} == dict.fromkeys(before, user)
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def test_calls_hold_settings_one_after_another():
    inside, most = [], []

    def run():
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    held = settings.holding(torch_private.setting, settings.EXACT_PRODUCTS[FLOAT])(run)
    threads = [threading.Thread(target=lambda: [held() for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 800 and set(most) == {1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)])
def test_the_callers_modes_change_nothing(mode):
    case = Drawn()
    y, _ = product(case, "none", FLOAT)
    case.write(y, torch.empty(8, 6), dtype=FLOAT)
    call, facts = calls.made(case.facts()), case.facts()
    names = {t.id: t.name for t in facts.graph.tensors}
    run = calls.by_address(call, CPU, lambda device: 0, torch_private.setting)
    addresses = [case.pack[names[s.tensor]].data_ptr() for s in call.seen]
    with mode():
        run(0, *addresses)
    for _ in range(2):
        case.pack["out"].fill_(0.0)
        run(0, *addresses)
        hold(case.pack["out"], exactly(case), FLOAT)


def test_torchs_errors_are_errors_of_the_device():
    case = Drawn()
    y, _ = product(case, "none")
    case.write(y, torch.empty(8, 6, dtype=torch.float32), dtype=FLOAT)  # of which the CPU has no kernel
    with pytest.raises(DeviceError, match="torch: Could not run 'aten::mm.dtype_out'"):
        case.run()


# When it is asked


@pytest.mark.parametrize("mode", [heur_mode.A, heur_mode.B, heur_mode.FALLBACK])
def test_it_runs_products_on_a_gpu(mode):
    case = Drawn()
    y, _ = product(case, "none")
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    low, known = lowered(case.g), plugins.registry()
    regions, _ = plan.matches(low, known)
    proposal = plan.propose(low, regions, known.engines, H200, mode)
    assert proposal.plans[0].name == "torch" and proposal.plans[-1].name == "reference"


def test_on_the_cpu_the_reference_runs_them():
    case = Drawn()
    y, _ = product(case, "none")
    case.write(y, torch.empty(8, 6, dtype=torch.bfloat16))
    case.g.build([heur_mode.A, heur_mode.FALLBACK])
    assert case.g.get_plan_name_at_index(0) == "reference"
    assert "torch's kernels for CUDA do not run on cpu" in case.g.explain()
