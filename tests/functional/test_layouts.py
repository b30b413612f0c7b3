"""Strides, slices and memory in place: what lies apart is read and written where it is."""

import pytest
import torch

from graphfuse import functional
from support.functional_calls import EPS, NAMES, call, check, norm


def apart(t: torch.Tensor, number: int) -> torch.Tensor:
    """The values of `t` in memory of its own: rows apart, columns apart, axes swapped, or off 16 bytes."""
    *leading, columns = t.shape
    match number % 4:
        case 0:
            made = t.new_empty((*leading, columns + 8))[..., :columns]
        case 1:
            made = t.new_empty((*leading, 2 * columns))[..., ::2]
        case 2:
            made = t.new_empty(t.shape[::-1]).permute(*range(t.dim() - 1, -1, -1))
        case 3:
            made = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    return made.copy_(t)


@pytest.mark.parametrize("kind", range(4), ids=["rows apart", "columns apart", "axes swapped", "off 16 bytes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_strides(name, dtype, kind):
    made = call(name, (3, 4, 32), dtype)
    for _ in range(2):
        tensors = {n: apart(t, kind + i) for i, (n, t) in enumerate(made.tensors.items())}
        outs = {
            n: apart(torch.zeros(made.exact[n].shape).to(made.tensors[made.leads]), kind)
            for n in made.returned
            if n in ("out", "q_out", "k_out") and "quant" not in name and "fp8" not in name
        }
        check(made.run(**tensors, **outs), made.exact)


def test_gaps_stay():
    made = call("rmsnorm", (6, 32))
    memory = torch.full((6, 48), 7.0).bfloat16()
    made.run(out=memory[:, 8:40])
    assert (memory[:, :8] == 7).all() and (memory[:, 40:] == 7).all()
    check({"out": memory[:, 8:40].contiguous()}, made.exact)


HEADS = {
    "behind each other": lambda packed: (packed[:, :4], packed[:, 4:6]),
    "interleaved": lambda packed: (
        packed.unflatten(1, (2, 4))[:, :, :2].flatten(1, 2),
        packed.unflatten(1, (2, 4))[:, :, 2],
    ),
    "transposed": lambda packed: (
        packed.transpose(0, 1)[:4].transpose(0, 1),
        packed.transpose(0, 1)[4:6].transpose(0, 1),
    ),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("form", HEADS)
def test_heads_of_a_packed_tensor(form, in_place):
    """[tokens, heads of q, k and v, head_dim], of which nothing but q and k changes, if anything."""
    for seed in range(3):
        torch.manual_seed(seed)
        packed = torch.randn(7, 8, 64).bfloat16()
        weights = torch.randn(2, 64).bfloat16()
        q, k = HEADS[form](packed)
        want = {"q": norm(q, weights[0]), "k": norm(k, weights[1])}
        before, outs = packed.clone(), {"q_out": q, "k_out": k} if in_place else {}
        shared = q.data_ptr() // 2 == packed.data_ptr() // 2
        assert shared or form == "interleaved"
        q_out, k_out = functional.qk_rmsnorm(q, k, *weights, EPS, **outs)
        check({"q": q_out, "k": k_out}, want)
        if not in_place:
            assert torch.equal(packed, before)
        elif form != "interleaved":
            rest = packed[:, 6:]
            assert torch.equal(rest, before[:, 6:]) and not torch.equal(packed, before)


def test_the_views_of_a_packed_tensor_are_no_copies():
    packed = torch.randn(7, 3 * 4 * 64).bfloat16()
    q = packed.view(7, 4, 3, 64)[:, :, 0]  # each head's q, k and v side by side
    k = packed.view(7, 4, 3, 64)[:, :, 1]
    weight, want = torch.ones(64), norm(k, torch.ones(64))
    functional.qk_rmsnorm(q, k, weight, weight, EPS, q, k)
    check({"k": packed.view(7, 4, 3, 64)[:, :, 1]}, {"k": want})


IN_PLACE = {
    "rmsnorm": {"out": "input"},
    "gemma_rmsnorm": {"out": "input"},
    "qk_rmsnorm": {"q_out": "q", "k_out": "k"},
    "sandwich_rmsnorm": {"out": "input", "residual_out": "residual"},
    "gemma_sandwich_rmsnorm": {"out": "residual", "residual_out": "input"},
    "fused_rmsnorm_silu": {"out": "input"},
    "rmsnorm_silu_gate": {"out": "gate"},
    "fused_add_rmsnorm": {"out": "input"},
    "layernorm": {"out": "input"},
    "fused_add_layernorm": {"out": "input"},
    "softmax": {"out": "input"},
    "log_softmax": {"out": "input"},
    "normalize": {"out": "input"},
    "add_rmsnorm_fp4quant": {"y_out": "input"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", IN_PLACE)
def test_outputs_onto_inputs(name, dtype):
    for _ in range(3):
        made = call(name, (5, 4, 32), dtype)
        wanted = call(name, (5, 4, 32), dtype)
        outs = {out: torch.empty_like(wanted.tensors[of]) for out, of in IN_PLACE[name].items()}
        results = wanted.run(**outs)
        made.run(**{out: made.tensors[of] for out, of in IN_PLACE[name].items()})
        for out, of in IN_PLACE[name].items():
            assert torch.equal(made.tensors[of], results[out])


def test_columns_interleaved_with_another_call_s():
    """Two residual streams side by side in one allocation: neither overlaps the other."""
    memory = torch.randn(8, 128).bfloat16()
    x, r = memory[:, :64], memory[:, 64:]
    total, weight = x.double() + r.double(), torch.randn(64).bfloat16()
    functional.fused_add_rmsnorm(x, r, weight, EPS)
    check({"x": x.contiguous(), "r": r.contiguous()}, {"x": norm(total, weight), "r": total})
