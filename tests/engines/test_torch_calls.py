"""Convolutions and attention by torch's kernels, on CPU tensors; how calls see tensors, hold settings and fail."""

import contextlib
import dataclasses
import threading

import pytest
import torch
from torch.nn import functional as F

from graphfuse import DeviceError, GraphNotSupportedError, convolution_mode, diagonal_alignment, heur_mode, pygraph
from graphfuse.base.device import CPU
from graphfuse.contract.engine import NoKnobs
from graphfuse.engines.torch_calls import TorchEngine, settings
from graphfuse.engines.torch_calls import engine as calls
from graphfuse.patterns import epilogues
from graphfuse.planning import plan
from graphfuse.planning import registry as plugins
from graphfuse.runtime import torch_private
from support import attention_options, flash_attention, graphs
from support.graphs import BF16, FLOAT, HALF
from support.products import lowered
from support.torch_calls import H200, TORCH, Drawn, exactly, hold, product, values, whole_numbers

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


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("name", "back"), [case for case in attention_options.CASES if "lengths" in attention_options.OPTIONS[case[0]][2]]
)
def test_sequences_that_a_kernel_knows(name, back, heads):
    case = Drawn()
    case.pack, exact = attention_options.drawn(case.g, name, heads, back)
    case.pack["out"] = None
    with flash_attention.on_cpu():
        case.run()
    attention_options.hold(case.pack, exact)


def in_rows(case, starts, lengths, unit=1):
    """Causal attention of two sequences that begin at `starts`, in units of rows / `unit`."""
    shape, stride = (2, 2, 6, 16), [0, 16, 32, 1]
    named = {"starts": torch.tensor(starts), "lengths": torch.tensor(lengths)}
    case.pack |= {name: t.int().reshape(-1, 1, 1, 1) for name, t in named.items()}
    at, of = (case.g.tensor_like(case.pack[name], name=name) for name in named)

    def lies(t):
        return t.set_dim(shape).set_stride(stride).set_ragged_offset(at).set_ragged_offset_multiplier(32 // unit)

    for seed, name in enumerate("qkv"):
        case.pack[name] = values(12, 2, 16, seed=seed).bfloat16()
    q, k, v = (lies(case.g.tensor(shape, stride, BF16, name=name)) for name in "qkv")
    o = case.g.sdpa(q, k, v, use_causal_mask=True, use_padding_mask=True, seq_len_q=of, seq_len_kv=of)[0]
    lies(o.set_output().set_name("out").set_data_type(BF16))
    case.pack["out"] = torch.full((12, 2, 16), 7.0, dtype=torch.bfloat16)
    with flash_attention.on_cpu():
        return case.run()


def test_sequences_with_one_tensor_of_lengths():
    got = in_rows(case := Drawn(), [2, 5, 9], [3, 2])
    for rows in (slice(2, 5), slice(5, 7)):
        q, k, v = (case.pack[name][rows].double().transpose(0, 1) for name in "qkv")
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0).transpose(0, 1)
        torch.testing.assert_close(got[rows].double(), wanted, rtol=2e-2, atol=2e-2)
    assert not got[7:9].any()  # rows of the second behind its end
    assert (got[:2] == 7).all() and (got[9:] == 7).all()


def test_sequences_without_rows():
    assert (in_rows(Drawn(), [3, 3, 3], [0, 0]) == 7).all()


def test_rows_behind_the_last_offset_and_in_wide_gaps_are_kept():
    assert (in_rows(Drawn(), [12, 12, 12], [0, 0]) == 7).all()
    got = in_rows(Drawn(), [0, 8, 10], [0, 2])  # room for 8 rows, of which a sequence has 6 at most
    assert not got[:6].any() and (got[6:8] == 7).all() and (got[10:] == 7).all()
    assert not (got[8:10] == 7).any()


def test_offsets_beyond_the_extents_read_nothing_outside():
    in_rows(Drawn(), [2, 8, 14], [6, 6])


@pytest.mark.parametrize(
    "asked", [{"use_causal_mask_bottom_right": True}, {"right": 2, "left": 2}, {"left": 3, "right": 12}]
)
@pytest.mark.parametrize(("rows", "others"), [(1, 9), (7, 3)])
def test_bands_of_sequences(asked, rows, others):
    """One row of q, and bands wider than k, are others to the kernel if it is told so."""
    bounds = {f"diagonal_band_{side}_bound": asked[side] for side in ("left", "right") if side in asked}
    if bounds:
        asked = bounds | {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT}
    found = []
    for where in (flash_attention.on_cpu(), contextlib.nullcontext()):
        case = Drawn()
        lengths = {"seq_len_q": torch.tensor([rows, rows - 1]), "seq_len_kv": torch.tensor([others, others - 2])}
        for name, t in lengths.items():
            case.pack[name] = t.int().reshape(2, 1, 1, 1)
        given = {name: case.g.tensor_like(case.pack[name], name=name) for name in lengths}
        attention(case, (2, 4, rows, 16), heads=2, others=others, use_padding_mask=True, **given, **asked)
        with where:
            found.append(case.run())
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_a_sequence_that_begins_within_a_row():
    got = in_rows(Drawn(), [4, 11, 18], [3, 2], unit=2)
    assert got[2:9].isnan().all()


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
    assert [s.dtype for s in calls.torch_call(case.facts()).views] == [BF16] * 4
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
    call, facts = calls.torch_call(case.facts()), case.facts()
    names = {t.id: t.name for t in facts.graph.tensors}
    run = calls.by_address(call, CPU, lambda device: 0, torch_private.setting)
    addresses = [case.pack[names[s.tensor]].data_ptr() for s in call.views]
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
