"""What a rank of several does and finds: calls on DTensors beside the same calls on whole tensors.

Each function that does not begin with an underscore and takes a mesh is a case; test_sharded.py runs them all on two
ranks. Everything random is the same on all ranks.
"""

import copy
from dataclasses import replace

import torch
from torch import nn

import graphfuse
from graphfuse import functional
from graphfuse import torch as training
from support.functional_calls import NAMES, Tensors, call
from support.training_calls import EPS, OPERATORS, SCALES, grads, layer_norm, norm

# torch.distributed.tensor is imported in functions, after graphfuse, as a program may.


def _dtensor(mesh, t, *placements):
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = placements or (Replicate(),) * mesh.ndim
    made = distribute_tensor(t.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_(t.requires_grad)


def _same(got, want) -> None:
    """Bit by bit."""
    assert got.shape == want.shape and got.dtype == want.dtype
    whole = got.full_tensor()
    assert torch.equal(whole.view(torch.uint8), want.contiguous().view(torch.uint8)), (
        (whole.float() - want.float()).abs().max()
    )


def _near(got, want) -> None:
    """Sums over ranks: in another order, rounded once on each."""
    assert got.shape == want.shape and got.dtype == want.dtype
    scale = max(1.0, want.abs().max().item())
    rounding = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.full_tensor(), want, rtol=rounding, atol=max(1e-6, rounding) * scale)


def _tensors(mesh, name, shape, dtype=torch.float32, heads=None):
    made, generator = {}, torch.Generator().manual_seed(3)
    for argument in OPERATORS[name].tensors:
        of = (heads or shape[-1:]) if argument in SCALES else shape
        t = torch.randn(of, generator=generator).to(mesh.device_type, dtype)
        made[argument] = t.requires_grad_()
    return made


def _both(mesh, name, shape, placement, scales=None, dtype=torch.float32, heads=None):
    """Results and gradients of a call on DTensors, and of the same on whole tensors, by name. placement: of tensors
    with rows. scales: of weight and bias."""
    operator, found = OPERATORS[name], []
    whole = _tensors(mesh, name, shape, dtype, heads)
    placed = {
        n: _dtensor(mesh, t, *([scales] if n in SCALES and scales else [] if n in SCALES else [placement]))
        for n, t in whole.items()
    }
    outer = grads(operator.run(whole))
    for given, of in ((placed, [_dtensor(mesh, g, placement) for g in outer]), (whole, outer)):
        made = operator.run(given)
        found.append(dict(zip(("y", "total"), made, strict=False)) | _gradients(made, given, of))
    return found


def _gradients(made, given, outer):
    """As the operators return them: torch 2.11 gathers one that it keeps for two tensors."""
    return {f"d{n}": t for n, t in zip(given, torch.autograd.grad(made, [*given.values()], outer), strict=True)}


def _rows(mesh, dtype):
    from torch.distributed.tensor import Partial, Replicate, Shard

    for name in OPERATORS:
        for shape, dim in (((4, 6, 64), 0), ((3, 5, 32), 1), ((1, 5, 32), 0)):
            got, want = _both(mesh, name, shape, Shard(dim), dtype=dtype)
            for n, value in want.items():
                sums = n in ("dweight", "dbias")
                assert got[n].placements == ((Partial("sum"),) if sums else (Shard(dim),)), (name, n)
                (_near if sums else _same)(got[n], value.detach())
    got, want = _both(mesh, "rms_norm", (4, 64), Replicate(), dtype=dtype)
    for n, value in want.items():
        assert got[n].placements == (Replicate(),)
        _same(got[n], value.detach())


def rows_of_float32(mesh):
    """Also of extents that do not divide, and of a rank without any."""
    _rows(mesh, torch.float32)


def rows_of_bfloat16(mesh):
    _rows(mesh, torch.bfloat16)


def heads(mesh):
    """A weight for each head is split with the heads, and whole where other rows are."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    for name in ("rms_norm", "layer_norm_bias", "rms_norm_bias"):
        for dim, scales, made in ((1, Shard(0), Shard(0)), (0, Replicate(), Partial("sum"))):
            got, want = _both(mesh, name, (3, 4, 32), Shard(dim), scales, heads=(4, 32))
            for n, value in want.items():
                sums = n in ("dweight", "dbias")
                assert got[n].placements == ((made if sums else Shard(dim)),), (name, n)
                (_near if sums else _same)(got[n], value.detach())


def _exact(name, whole, outer):
    wide = {n: t.detach().double().requires_grad_() for n, t in whole.items()}
    made = OPERATORS[name].exact(wide)
    return dict(zip(("y", "total"), made, strict=False)) | _gradients(made, wide, [g.double() for g in outer])


def columns(mesh):
    """Forward and backward by two steps, with as few numbers on the way as there are to be."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for name, operator in OPERATORS.items():
        for shape in ((3, 5, 64), (4, 33)):
            dim = len(shape) - 1
            whole = _tensors(mesh, name, shape)
            outer = grads(operator.run(whole))
            exact = _exact(name, whole, outer)
            placed = {n: _dtensor(mesh, t, Shard(t.dim() - 1)) for n, t in whole.items()}
            with CommDebugMode() as forward:
                made = operator.run(placed)
            with CommDebugMode() as backward:
                gradients = _gradients(made, placed, [_dtensor(mesh, g, Shard(dim)) for g in outer])
            numbers = 2 if "layer" in name else 1
            for mode in (forward, backward):
                assert mode.get_total_counts() == numbers, (name, mode.get_comm_counts())
            got = dict(zip(("y", "total"), made, strict=False)) | gradients
            for n, value in exact.items():
                assert got[n].placements == (Shard(value.dim() - 1),), (name, n)
                scale = max(1.0, value.abs().max().item())
                torch.testing.assert_close(got[n].full_tensor().double(), value, rtol=1e-6, atol=1e-5 * scale)


def columns_far_from_zero(mesh):
    """The variance of a row is small beside its mean, and the ranks' own means are apart."""
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 64, device=mesh.device_type) + 4096
    x[:, 32:] += 2
    y = training.layer_norm(_dtensor(mesh, x, Shard(1)))
    # The mean itself is rounded to 2^-12. A variance by the mean of squares would be wrong by more than 1.
    torch.testing.assert_close(y.full_tensor().double(), layer_norm(x.double(), None), rtol=1e-3, atol=1e-3)


def columns_of_heads(mesh):
    from torch.distributed.tensor import Shard

    got, want = _both(mesh, "rms_norm_bias", (3, 4, 32), Shard(2), Shard(1), heads=(4, 32))
    for n, value in want.items():
        torch.testing.assert_close(got[n].full_tensor(), value.detach(), rtol=1e-5, atol=1e-5)


def columns_without_a_gradient_for_x(mesh):
    """Nothing is sent for the gradient of a weight, whose columns are where the weight's are."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode

    x, weight = torch.randn(4, 64, device=mesh.device_type), torch.randn(64, device=mesh.device_type).requires_grad_()
    split = _dtensor(mesh, weight, Shard(0))
    y = training.rms_norm(_dtensor(mesh, x, Shard(1)), split, EPS)
    outer = torch.randn_like(x)
    with CommDebugMode() as mode:
        y.backward(_dtensor(mesh, outer, Shard(1)))
    assert mode.get_total_counts() == 0
    norm(x.double(), weight.double()).backward(outer.double())
    torch.testing.assert_close(split.grad.full_tensor(), weight.grad, rtol=1e-5, atol=1e-5)


def columns_fewer_than_ranks(mesh):
    """Gathered, as a rank without columns would have nothing to run on."""
    from torch.distributed.tensor import Replicate, Shard

    x = torch.randn(4, 1, device=mesh.device_type)
    y = training.rms_norm(_dtensor(mesh, x, Shard(1)), None, EPS)
    assert y.placements == (Replicate(),)
    _same(y, training.rms_norm(x, None, EPS))


def columns_gathered(mesh):
    """By operators that need whole rows, as torch's norms do with theirs."""
    from torch.distributed.tensor import Replicate, Shard

    x = torch.randn(4, 64, device=mesh.device_type)
    for function in (training.softmax, training.log_softmax, training.normalize, functional.softmax):
        y = function(_dtensor(mesh, x, Shard(1)))
        assert y.placements == (Replicate(),)
        _same(y, function(x))


def partial(mesh):
    """Sums that are due are made first: where they go is what other tensors say."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x, residual = (torch.randn(4, 64, device=mesh.device_type) for _ in range(2))
    share = x.clone() if mesh.get_local_rank() == 0 else torch.zeros_like(x)
    due = DTensor.from_local(share, mesh, [Partial("sum")], run_check=False)
    weight = torch.randn(64, device=mesh.device_type)
    y = training.rms_norm(due, _dtensor(mesh, weight), EPS)
    assert y.placements == (Replicate(),)
    _same(y, training.rms_norm(x, weight, EPS))
    made = training.add_rms_norm(due, _dtensor(mesh, residual, Shard(0)), _dtensor(mesh, weight), EPS)
    for got, want in zip(made, training.add_rms_norm(x, residual, weight, EPS), strict=True):
        assert got.placements == (Shard(0),)
        _same(got, want)


def others(mesh):
    """Adaptive layer norm, normalization, softmax and its logarithm, cross entropy, each with gradients."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, scale, shift = (torch.randn(s, device=mesh.device_type) for s in ((4, 3, 64), (4, 1, 64), (4, 1, 64)))
    target = torch.randint(64, (4, 3), device=mesh.device_type)
    target[0, 0] = -100
    calls = {
        "ada": (training.ada_layer_norm, (x, scale, shift)),
        "normalize": (training.normalize, (x,)),
        "softmax": (training.softmax, (x,)),
        "log_softmax": (training.log_softmax, (x,)),
        "loss of rows": (lambda x, t: training.cross_entropy(x, t, reduction="none"), (x, target)),
        "loss": (training.cross_entropy, (x, target)),
    }
    for name, (function, given) in calls.items():
        for dim in (0, 1):
            whole = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
            placed = [_dtensor(mesh, t, Shard(dim) if t.shape[dim] > 1 else Replicate()) for t in whole]
            made, want = function(*placed), function(*whole)
            outer = torch.randn_like(want)
            made.backward(_dtensor(mesh, outer, Shard(dim) if want.dim() else Replicate()))
            want.backward(outer)
            (_same if name != "loss" else _near)(made.detach(), want.detach())
            for a, b in zip(placed, whole, strict=True):
                if b.requires_grad:
                    added = name == "ada" and dim == 1 and b.shape[1] == 1
                    assert a.grad.placements == ((Partial("sum") if added else Shard(dim)),), (name, dim)
                    (_near if added else _same)(a.grad, b.grad)


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
            again = replace(again, tensors={n: _dtensor(mesh, t) for n, t in again.tensors.items()})
        else:
            again = replace(again, tensors={n: _split(mesh, t, shape) for n, t in again.tensors.items()})
        made, want = again.run(**change), whole.run(**change)
        for n in (*whole.tensors, *whole.returned):
            got, right = made[n], want[n]
            if n in whole.returned:
                assert got.placements == ((Replicate(),) if tiles else (Shard(0),)), (name, n)
            assert got.shape == right.shape and got.dtype == right.dtype and got.stride() == right.stride(), (name, n)
            _same(_viewed(got), _viewed(right))


def losses(mesh):
    """The functions of cross entropy, whose targets are split with the rows."""
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 6, 64, device=mesh.device_type)
    target, grad = torch.randint(64, (4, 6), device=mesh.device_type), torch.randn(4, 6, device=mesh.device_type)
    for dim in (0, 1):
        split = [_dtensor(mesh, t, Shard(dim)) for t in (x, target, grad)]
        made, want = functional.cross_entropy(*split[:2]), functional.cross_entropy(x, target)
        made += (functional.cross_entropy_backward(*split[:2], made[1], split[2]),)
        want += (functional.cross_entropy_backward(x, target, want[1], grad),)
        for got, right in zip(made, want, strict=True):
            assert got.placements == (Shard(dim),)
            _same(got, right)


def results_made_over_rows(mesh):
    """Of one that says nothing of how parts become the whole, tensors are gathered."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    from graphfuse.enums import reduction_mode
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
        made = function(_dtensor(mesh, x, Shard(0)))
        assert made.placements == (placement,)
        _same(made, x.abs().max().reshape(1))


def _split(mesh, t, shape):
    from torch.distributed.tensor import Replicate, Shard

    return _dtensor(mesh, t, Shard(0) if t.dim() == len(shape) and t.shape[0] == shape[0] else Replicate())


def _viewed(t):
    """What collectives of every backend take."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def heads_of_queries_and_keys(mesh):
    """Each with its own number of heads, and weights for each head, split over ranks as attention is."""
    from torch.distributed.tensor import Shard

    q, k = (torch.randn(5, heads, 64, device=mesh.device_type) for heads in (8, 2))
    q_weight, k_weight = (torch.randn(heads, 64, device=mesh.device_type) for heads in (8, 2))
    placed = [_dtensor(mesh, t, Shard(1)) for t in (q, k)] + [_dtensor(mesh, t, Shard(0)) for t in (q_weight, k_weight)]
    for got, want in zip(functional.qk_rmsnorm(*placed), functional.qk_rmsnorm(q, k, q_weight, k_weight), strict=True):
        assert got.placements == (Shard(1),)
        _same(got, want)


def rotated_queries_and_keys(mesh):
    """With gradients, split by tokens or by heads: positions follow tokens, and sums over rows are of each rank's."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    q, k = (torch.randn(6, heads, 32, device=mesh.device_type) for heads in (4, 2))
    weights = [torch.randn(32, device=mesh.device_type) for _ in "qk"]
    table, positions = torch.randn(9, 32, device=mesh.device_type), torch.arange(6, device=mesh.device_type)
    for dim in (0, 1):
        whole = [t.clone().requires_grad_() for t in (q, k, *weights)]
        placed = [_dtensor(mesh, t, Shard(dim) if t.dim() == 3 else Replicate()) for t in whole]
        angles = _dtensor(mesh, table), _dtensor(mesh, positions, Replicate() if dim else Shard(0))
        made = training.qk_norm_rope(*placed, *angles, EPS)
        want = training.qk_norm_rope(*whole, table, positions, EPS)
        outer = [torch.randn_like(y) for y in want]
        gradients = torch.autograd.grad(made, placed, [_dtensor(mesh, t, Shard(dim)) for t in outer])
        exact = torch.autograd.grad(want, whole, outer)
        for got, right in zip((*made, *gradients), (*want, *exact), strict=True):
            sums = right.dim() == 1
            assert got.placements == ((Partial("sum") if sums else Shard(dim)),), dim
            (_near if sums else _same)(got.detach(), right.detach())


def in_place(mesh):
    """Each rank writes what it has. What would have to be moved first is refused on all ranks, and nothing written."""
    from torch.distributed.tensor import Partial, Shard

    x, residual, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (4, 64), (64,)))
    placed = [_dtensor(mesh, t, Shard(0)) for t in (x, residual)]
    assert functional.fused_add_rmsnorm(*placed, _dtensor(mesh, weight)) is None
    out = _dtensor(mesh, torch.zeros_like(x), Shard(0))
    assert functional.rmsnorm(placed[0], _dtensor(mesh, weight), out=out) is out
    functional.fused_add_rmsnorm(x, residual, weight)
    for got, want in zip((*placed, out), (x, residual, functional.rmsnorm(x, weight)), strict=True):
        _same(got, want)
    split = _dtensor(mesh, x, Shard(1)), _dtensor(mesh, residual, Shard(1))
    for given, said in (
        (split, r"input has placements \(Shard\(dim=1\),\) and would be written; accepted.*Replicate\(\)"),
        ((_dtensor(mesh, x, Shard(0)), _dtensor(mesh, residual)), r"residual has .*accepted.*\(Shard\(dim=0\),\)"),
    ):
        _refused(graphfuse.VariantPackError, said, functional.fused_add_rmsnorm, *given, _dtensor(mesh, weight))
    for got, want in zip(split, (x, residual), strict=True):
        _same(got, want)
    out = _dtensor(mesh, x, Partial("sum"))
    _refused(graphfuse.VariantPackError, "out has", functional.rmsnorm, placed[0], _dtensor(mesh, weight), out=out)


def _refused(error, said, function, *given, **named):
    import re

    try:
        function(*given, **named)
    except error as raised:
        assert re.search(said, str(raised)), raised
    else:
        raise AssertionError(f"not refused: {said}")


def refused(mesh):
    """In words of ours, of what does not fit as whole tensors, or is no DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.experimental import implicit_replication

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    placed = _dtensor(mesh, x, Shard(0))
    for function in (training.rms_norm, functional.rmsnorm):
        _refused(graphfuse.VariantPackTypeError, "weight is a Tensor.*accepted: a DTensor", function, placed, weight)
        wrong = _dtensor(mesh, weight[:32])
        said = r"weight has shape .*\(?32.*accepted: .*64"
        _refused(graphfuse.VariantPackError, said, function, placed, wrong)
    _refused(
        graphfuse.VariantPackTypeError, "x is of torch.int64", training.rms_norm, _dtensor(mesh, x.long(), Shard(0))
    )
    other = DeviceMesh(mesh.device_type, mesh.mesh.flip(0))
    _refused(
        graphfuse.VariantPackError, "weight is on .*one is accepted", training.rms_norm, placed, _dtensor(other, weight)
    )
    with implicit_replication():
        _same(training.rms_norm(placed, weight, EPS), training.rms_norm(x, weight, EPS))
        _same(training.add_rms_norm(placed, x, weight, EPS)[1], x + x)  # of a tensor with rows each takes its own
        _refused(graphfuse.VariantPackError, "residual has .*written", functional.fused_add_rmsnorm, placed, x, weight)


def a_mesh_after_another(mesh):
    """Calls like earlier ones, on a mesh of the same ranks with groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    x = torch.randn(4, 64, device=mesh.device_type)
    for _ in range(2):
        own = init_device_mesh(mesh.device_type, (1, 2), mesh_dim_names=("one", "two"))["two"]
        y = training.rms_norm(_dtensor(own, x, Shard(1)), None, EPS)
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, None, EPS), rtol=1e-6, atol=1e-6)
        assert y.device_mesh is own


def two_dimensions_of_the_mesh(mesh):
    """Rows along one, columns along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    for shape in ((2, 1), (1, 2)):
        grid = init_device_mesh(mesh.device_type, shape)
        y = training.rms_norm(_dtensor(grid, x, Shard(0), Shard(1)), _dtensor(grid, weight, Replicate(), Shard(0)), EPS)
        assert y.placements == (Shard(0), Shard(1))
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, weight, EPS), rtol=1e-6, atol=1e-6)
        # Columns twice: gathered along the second.
        y = training.rms_norm(_dtensor(grid, x, Shard(1), Shard(1)), None, EPS)
        assert y.placements == (Shard(1), Replicate())
        torch.testing.assert_close(y.full_tensor(), training.rms_norm(x, None, EPS), rtol=1e-6, atol=1e-6)


def compiled(mesh):
    """One graph, of rows and of columns."""
    from torch.distributed.tensor import Shard

    def function(x, weight):
        return training.rms_norm(x * 2, weight, EPS) * 3

    x, weight = (torch.randn(s, device=mesh.device_type) for s in ((4, 64), (64,)))
    outer = torch.randn_like(x)
    for dim in (0, 1):
        found = []
        for made in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            split = _dtensor(mesh, x, Shard(dim)).requires_grad_()
            scale = _dtensor(mesh, weight, *[Shard(0)] * dim).requires_grad_()
            y = made(split, scale)
            y.backward(_dtensor(mesh, outer, Shard(dim)))
            found.append([t.full_tensor() for t in (y, split.grad, scale.grad)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


class _Block(nn.Module):
    """norm: makes a norm of a width."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = norm(64), norm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.second(x + self.down(torch.nn.functional.gelu(self.up(self.first(x)))))


NORMS = (training.RMSNorm, training.LayerNorm, training.RMSNormSiLU)


def sequence_parallel(mesh):
    """A block with its norms in rows and its products in columns, against the same in one process."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for kind in NORMS:
        torch.manual_seed(1)
        whole = _Block(kind).to(mesh.device_type)
        plan = {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        split = parallelize_module(copy.deepcopy(whole), mesh, plan)
        x = torch.randn(2, 6, 64, device=mesh.device_type)
        own, placed = x.clone().requires_grad_(), _dtensor(mesh, x, Shard(1)).requires_grad_()
        got, want = split(placed), whole(own)
        assert isinstance(got, DTensor) and got.placements == (Shard(1),)
        outer = torch.randn_like(x)
        got.backward(_dtensor(mesh, outer, Shard(1)))
        want.backward(outer)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(placed.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-5)
        for (name, a), b in zip(split.named_parameters(), whole.parameters(), strict=True):
            made = a.grad.redistribute(placements=[Replicate()]).to_local()
            torch.testing.assert_close(made, b.grad, rtol=1e-4, atol=1e-5, msg=name)
        with torch.no_grad():
            _same(split.first(placed), whole.first(own))


def a_residual_beside(mesh):
    """AddRMSNorm, whose residual SequenceParallel leaves to the caller."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    whole = training.AddRMSNorm(64, device=mesh.device_type)
    split = parallelize_module(copy.deepcopy(whole), mesh, SequenceParallel())
    x, residual = (torch.randn(2, 6, 64, device=mesh.device_type) for _ in range(2))
    made = split(_dtensor(mesh, x, Shard(1)), residual=_dtensor(mesh, residual, Shard(1)))
    for got, want in zip(made, whole(x, residual), strict=True):
        assert got.placements == (Shard(1),)
        _same(got.detach(), want.detach())


def fsdp(mesh):
    """Each rank has its own samples; steps of an optimizer are those of one process with all of them."""
    from torch.distributed.fsdp import fully_shard

    for kind in NORMS:
        torch.manual_seed(1)
        whole = _Block(kind).to(mesh.device_type)
        split = copy.deepcopy(whole)
        for module in (split.first, split.second, split):
            fully_shard(module, mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (split, whole)]
        for _ in range(2):
            x = torch.randn(4, 6, 64, device=mesh.device_type)
            own = x.chunk(mesh.size())[mesh.get_local_rank()]
            got, want = split(own), whole(x)
            torch.testing.assert_close(got, want.chunk(mesh.size())[mesh.get_local_rank()], rtol=1e-4, atol=1e-5)
            got.square().mean().backward()
            want.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, a), b in zip(split.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b[1], rtol=1e-4, atol=1e-5, msg=name)


CASES = [
    name
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name[0] != "_"
]
