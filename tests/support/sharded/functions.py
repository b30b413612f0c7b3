"""Functions without gradients on DTensors: results, placements, what is written in place, what is refused."""

from dataclasses import replace

import torch

import graphfuse
from graphfuse import functional
from graphfuse import torch as training
from support.functional_calls import NAMES, Tensors, call
from support.sharded.placed import dtensor, near, refuses, same
from support.training_calls import EPS


def functions(mesh):
    """All of those without gradients, split by samples. Scales are where their rows are; those in tiles are whole."""
    from torch.distributed.tensor import Replicate, Shard

    shape = (4, 32, 256)  # tiles of scales are full: padding is not written
    changes = [(name, {}) for name in NAMES]
    changes += [(name, {"group_size": 128}) for name in ("rmsnorm_quant_dynamic", "silu_mul_fp8", "quantize_fp8")]
    changes += [(name, {"is_sf_swizzled_layout": True}) for name in ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant")]
    for name, change in changes:
        whole, again = (call(name, shape, tensors=Tensors(mesh.device_type)) for _ in range(2))
        tiles = "is_sf_swizzled_layout" in change
        if tiles and "residual" in whole.tensors:  # whose sum would be written where it is not
            again = replace(again, tensors={n: dtensor(mesh, t) for n, t in again.tensors.items()})
        else:
            again = replace(again, tensors={n: _split(mesh, t, shape) for n, t in again.tensors.items()})
        made, want = again.run(**change), whole.run(**change)
        for n in (*whole.tensors, *whole.returned):
            got, right = made[n], want[n]
            if n in whole.returned:
                assert got.placements == ((Replicate(),) if tiles else (Shard(0),)), (name, n)
            assert got.shape == right.shape and got.dtype == right.dtype and got.stride() == right.stride(), (name, n)
            same(_viewed(got), _viewed(right))


def _split(mesh, t, shape):
    from torch.distributed.tensor import Replicate, Shard

    return dtensor(mesh, t, Shard(0) if t.dim() == len(shape) and t.shape[0] == shape[0] else Replicate())


def _viewed(t):
    """What collectives of every backend take."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def losses(mesh):
    """The functions of cross entropy, whose targets are split with the rows."""
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 6, 64, device=mesh.device_type)
    target, grad = torch.randint(64, (4, 6), device=mesh.device_type), torch.randn(4, 6, device=mesh.device_type)
    for dim in (0, 1):
        split = [dtensor(mesh, t, Shard(dim)) for t in (x, target, grad)]
        made, want = functional.cross_entropy(*split[:2]), functional.cross_entropy(x, target)
        made += (functional.cross_entropy_backward(*split[:2], made[1], split[2]),)
        want += (functional.cross_entropy_backward(x, target, want[1], grad),)
        for got, right in zip(made, want, strict=True):
            assert got.placements == (Shard(dim),)
            same(got, right)


def results_made_over_rows(mesh):
    """Of one that says nothing of how parts become the whole, tensors are gathered."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    from graphfuse.base.enums import reduction_mode
    from graphfuse.functional.declaration import Function, Variant
    from graphfuse.functional.function import define
    from graphfuse.functional.operator import pass_by_autograd
    from graphfuse.functional.tensor_parameter import FLOAT, TensorParameter, one

    x = torch.randn(5, 64, device=mesh.device_type)
    for how, placement in (("max", Partial("max")), (None, Replicate())):
        amax = TensorParameter("amax", FLOAT, one, written=True, new=torch.float32, over_rows=how)

        def draw(d):
            d.store("amax", d.graph.reduction(d["x"], mode=reduction_mode.AMAX).set_dim((1, 1)))

        name = f"of_a_test_{how}"
        f = Function(name, ("x",), {}, (), {(): Variant((TensorParameter("x", FLOAT), amax), draw)}, ("amax",))
        function = define(f)
        pass_by_autograd(f, getattr(torch.ops.graphfuse, name).default)
        made = function(dtensor(mesh, x, Shard(0)))
        assert made.placements == (placement,)
        same(made, x.abs().max().reshape(1))


def heads_of_queries_and_keys(mesh):
    """Each with its own number of heads, and weights for each head, split over ranks as attention is."""
    from torch.distributed.tensor import Shard

    q, k = (torch.randn(5, heads, 64, device=mesh.device_type) for heads in (8, 2))
    q_weight, k_weight = (torch.randn(heads, 64, device=mesh.device_type) for heads in (8, 2))
    placed = [dtensor(mesh, t, Shard(1)) for t in (q, k)] + [dtensor(mesh, t, Shard(0)) for t in (q_weight, k_weight)]
    for got, want in zip(functional.qk_rmsnorm(*placed), functional.qk_rmsnorm(q, k, q_weight, k_weight), strict=True):
        assert got.placements == (Shard(1),)
        same(got, want)


def rotated_queries_and_keys(mesh):
    """With gradients, split by tokens or by heads: positions follow tokens, and sums over rows are of each rank's."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    q, k = (torch.randn(6, heads, 32, device=mesh.device_type) for heads in (4, 2))
    weights = [torch.randn(32, device=mesh.device_type) for _ in "qk"]
    table, positions = torch.randn(9, 32, device=mesh.device_type), torch.arange(6, device=mesh.device_type)
    for dim in (0, 1):
        whole = [t.clone().requires_grad_() for t in (q, k, *weights)]
        placed = [dtensor(mesh, t, Shard(dim) if t.dim() == 3 else Replicate()) for t in whole]
        angles = dtensor(mesh, table), dtensor(mesh, positions, Replicate() if dim else Shard(0))
        made = training.qk_norm_rope(*placed, *angles, EPS)
        want = training.qk_norm_rope(*whole, table, positions, EPS)
        outer = [torch.randn_like(y) for y in want]
        gradients = torch.autograd.grad(made, placed, [dtensor(mesh, t, Shard(dim)) for t in outer])
        exact = torch.autograd.grad(want, whole, outer)
        for got, right in zip((*made, *gradients), (*want, *exact), strict=True):
            sums = right.dim() == 1
            assert got.placements == ((Partial("sum") if sums else Shard(dim)),), dim
            (near if sums else same)(got.detach(), right.detach())


def heads_normalized_together(mesh):
    """Split by tokens, nothing is sent. Of heads that are split, all are gathered first: none is normalized alone."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    q, k = (torch.randn(6, heads, 32, device=mesh.device_type) for heads in (4, 2))
    weights = [torch.randn(heads * 32, device=mesh.device_type) for heads in (4, 2)]
    table, positions = torch.randn(9, 32, device=mesh.device_type), torch.arange(6, device=mesh.device_type)
    for dim in (0, 1):
        whole = [t.clone().requires_grad_() for t in (q, k, *weights)]
        placed = [dtensor(mesh, t, Shard(dim) if t.dim() == 3 else Replicate()) for t in whole]
        angles = dtensor(mesh, table), dtensor(mesh, positions, Replicate() if dim else Shard(0))
        made = training.qk_norm_rope_across_heads(*placed, *angles, EPS)
        want = training.qk_norm_rope_across_heads(*whole, table, positions, EPS)
        for got, right in zip(made, want, strict=True):
            assert got.placements == ((Replicate() if dim else Shard(0)),), dim
            same(got.detach(), right.detach())
        if dim == 0:
            outer = [torch.randn_like(y) for y in want]
            gradients = torch.autograd.grad(made, placed, [dtensor(mesh, t, Shard(0)) for t in outer])
            for got, right in zip(gradients, torch.autograd.grad(want, whole, outer), strict=True):
                assert got.placements == ((Partial("sum") if right.dim() == 1 else Shard(0)),)
                (near if right.dim() == 1 else same)(got, right)


def in_place(mesh):
    """Each rank writes what it has. What would have to be moved first is refused on all ranks, and nothing written."""
    from torch.distributed.tensor import Partial, Shard

    x, residual, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (4, 64), (64,)))
    placed = [dtensor(mesh, t, Shard(0)) for t in (x, residual)]
    assert functional.fused_add_rmsnorm(*placed, dtensor(mesh, weight)) is None
    out = dtensor(mesh, torch.zeros_like(x), Shard(0))
    assert functional.rmsnorm(placed[0], dtensor(mesh, weight), out=out) is out
    functional.fused_add_rmsnorm(x, residual, weight)
    for got, want in zip((*placed, out), (x, residual, functional.rmsnorm(x, weight)), strict=True):
        same(got, want)
    split = dtensor(mesh, x, Shard(1)), dtensor(mesh, residual, Shard(1))
    for given, said in (
        (split, r"input has placements \(Shard\(dim=1\),\) and would be written; accepted.*Replicate\(\)"),
        ((dtensor(mesh, x, Shard(0)), dtensor(mesh, residual)), r"residual has .*accepted.*\(Shard\(dim=0\),\)"),
    ):
        refuses(graphfuse.VariantPackError, said, functional.fused_add_rmsnorm, *given, dtensor(mesh, weight))
    for got, want in zip(split, (x, residual), strict=True):
        same(got, want)
    out = dtensor(mesh, x, Partial("sum"))
    refuses(graphfuse.VariantPackError, "out has", functional.rmsnorm, placed[0], dtensor(mesh, weight), out=out)


def refused(mesh):
    """In words of ours, of what does not fit as whole tensors, or is no DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.experimental import implicit_replication

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    placed = dtensor(mesh, x, Shard(0))
    for function in (training.rms_norm, functional.rmsnorm):
        refuses(graphfuse.VariantPackTypeError, "weight is a Tensor.*accepted: a DTensor", function, placed, weight)
        wrong = dtensor(mesh, weight[:32])
        said = r"weight has shape .*\(?32.*accepted: .*64"
        refuses(graphfuse.VariantPackError, said, function, placed, wrong)
    refuses(graphfuse.VariantPackTypeError, "x is of torch.int64", training.rms_norm, dtensor(mesh, x.long(), Shard(0)))
    other = DeviceMesh(mesh.device_type, mesh.mesh.flip(0))
    refuses(
        graphfuse.VariantPackError, "weight is on .*one is accepted", training.rms_norm, placed, dtensor(other, weight)
    )
    with implicit_replication():
        same(training.rms_norm(placed, weight, EPS), training.rms_norm(x, weight, EPS))
        same(training.add_rms_norm(placed, x, weight, EPS)[1], x + x)  # of a tensor with rows each takes its own
        refuses(graphfuse.VariantPackError, "residual has .*written", functional.fused_add_rmsnorm, placed, x, weight)
