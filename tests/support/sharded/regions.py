"""Regions on DTensors, against the same on whole tensors."""

from dataclasses import dataclass

import torch

import graphfuse
from graphfuse.torch.regions.operator import RegionOperator, region
from graphfuse.torch.regions.program import Program, ProgramStep, RegionInput, Result
from support.sharded.placed import dtensor, near, refuses, same

_NORM = {"norm_forward_phase": "INFERENCE"}


@dataclass(frozen=True)
class _Case:
    """A program of float32, by the axes of its inputs, and of its outputs by their steps."""

    inputs: tuple[str, ...]
    steps: tuple[ProgramStep, ...]
    outputs: dict[int, str]

    @property
    def text(self):
        inputs = tuple(RegionInput(f"in{n}", axes, "FLOAT") for n, axes in enumerate(self.inputs))
        return Program(inputs, self.steps, tuple(Result(*one, "FLOAT") for one in self.outputs.items())).text

    def tensors(self, mesh):
        generator = torch.Generator().manual_seed(1)
        shapes = [_shape(axes) for axes in self.inputs]
        return [torch.randn(shape, generator=generator).to(mesh.device_type).requires_grad_() for shape in shapes]


_ROWS = (4, 6, 32)


def _shape(axes):
    return tuple(n if kind == "n" else 1 for n, kind in zip(_ROWS, axes, strict=True) if kind != "-")


CASES = {
    "add, norm": _Case(
        ("nnn", "nnn", "--n"),
        (
            ProgramStep("add", {"a": "in0", "b": "in1"}),
            ProgramStep("rmsnorm", {"input": "@0", "scale": "in2", "epsilon": 1e-6}, _NORM),
        ),
        {0: "nnn", 1: "nnn"},
    ),
    "norm, GELU": _Case(
        ("nnn", "--n", "--n"),
        (
            ProgramStep("layernorm", {"input": "in0", "scale": "in1", "bias": "in2", "epsilon": 1e-6}, _NORM),
            ProgramStep("gelu", {"input": "@0"}),
        ),
        {1: "nnn"},
    ),
    "softmax with a mask": _Case(
        ("nnn", "1nn"),
        (ProgramStep("add", {"a": "in0", "b": "in1"}), ProgramStep("softmax", {"input": "@0"})),
        {1: "nnn"},
    ),
    "a scale for each sample": _Case(
        ("nnn", "n1n", "n1n"),
        (
            ProgramStep("rmsnorm", {"input": "in0", "epsilon": 1e-6}, _NORM),
            ProgramStep("mul", {"a": "@0", "b": "in1"}),
            ProgramStep("add", {"a": "@1", "b": "in2"}),
        ),
        {2: "nnn"},
    ),
    "a value for each row": _Case(
        ("nnn", "nn1"),
        (
            ProgramStep("mul", {"a": "in0", "b": "in1"}),
            ProgramStep("reduction", {"input": "@0"}, {"mode": "ADD"}),
            ProgramStep("cmp_gt", {"input": "in0", "comparison": "@1"}),
        ),
        {1: "nn-", 2: "nnn"},
    ),
    "nothing kept": _Case(
        ("nnn", "nnn"),
        (
            ProgramStep("add", {"a": "in0", "b": "in1"}),
            ProgramStep("reduction", {"input": "@0"}, {"mode": "ADD"}),
        ),
        {0: "nnn", 1: "nn-"},
    ),
}


def _placed(mesh, case, tensors, dim):
    """DTensors, those split that have rows along a dimension."""
    from torch.distributed.tensor import Replicate, Shard

    splits = [Shard(axes[:dim].count("n") + axes[:dim].count("1")) for axes in case.inputs]
    kinds = zip(tensors, case.inputs, splits, strict=True)
    return [dtensor(mesh, t, split if axes[dim] == "n" else Replicate()) for t, axes, split in kinds]


def _outer(made):
    return [torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape) for t in made]


def _both(mesh, case, placed, whole, placement):
    """Results and gradients, as DTensors and whole."""
    found = []
    for given in (placed, whole):
        made = RegionOperator.of(case.text).run(*given)
        made = made if isinstance(made, tuple) else (made,)
        assert all(map(_alike, made, region(given, case.text)))
        made = [t for t in made if t.requires_grad]
        outer = _outer(made)
        outer = [dtensor(mesh, t, placement) for t in outer] if given is placed else outer
        found.append((made, torch.autograd.grad(made, given, outer)))
    return found


def _alike(one, other):
    from torch.distributed.tensor import DTensor

    if isinstance(one, DTensor):
        assert one.placements == other.placements
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other)


def regions_in_rows(mesh):
    """Split along an axis of rows, nothing is sent; what has no rows there has a part of its gradient on each rank."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for name, case in CASES.items():
        for dim in (0, 1):
            whole = case.tensors(mesh)
            placed = _placed(mesh, case, whole, dim)
            with CommDebugMode() as sent:
                (made, grads), (want, exact) = _both(mesh, case, placed, whole, Shard(dim))
            assert sent.get_total_counts() == 0, (name, sent.get_comm_counts())
            for got, one in zip(made, want, strict=True):
                assert got.placements == (Shard(dim),), name
                same(got.detach(), one.detach())
            for got, one, given, axes in zip(grads, exact, placed, case.inputs, strict=True):
                parts = axes[dim] != "n"
                assert got.placements == ((Partial("sum"),) if parts else given.placements), (name, dim, axes)
                (near if parts else same)(got, one)


def regions_of_whole_tensors(mesh):
    from torch.distributed.tensor import Replicate

    for case in CASES.values():
        whole = case.tensors(mesh)
        found = _both(mesh, case, [dtensor(mesh, t) for t in whole], whole, Replicate())
        for got, want in zip(*([*made, *grads] for made, grads in found), strict=True):
            assert got.placements == (Replicate(),)
            same(got.detach(), want.detach())


def regions_in_columns(mesh):
    """Gathered first, as by operators that need whole rows."""
    from torch.distributed.tensor import Replicate, Shard

    for name, case in CASES.items():
        whole = case.tensors(mesh)
        placed = [dtensor(mesh, t, Shard(t.dim() - 1) if t.shape[-1] > 1 else Replicate()) for t in whole]
        (made, grads), (want, exact) = _both(mesh, case, placed, whole, Replicate())
        for got, one in zip((*made, *grads), (*want, *exact), strict=True):
            assert got.placements == (Replicate(),), name
            same(got.detach(), one.detach())


def regions_where_one_result_is_used(mesh):
    """The gradient of the other is taken for zeros, or left out."""
    from torch.distributed.tensor import Shard

    for name in ("add, norm", "nothing kept"):
        case = CASES[name]
        for used in (0, 1):
            whole = case.tensors(mesh)
            placed, grads = _placed(mesh, case, whole, 0), []
            for given in (placed, whole):
                made = RegionOperator.of(case.text).run(*given)[used]
                outer = _outer([made])[0]
                outer = dtensor(mesh, outer, Shard(0)) if given is placed else outer
                grads.append(torch.autograd.grad(made, given[:2], outer))
            for got, want in zip(*grads, strict=True):
                same(got, want)


def regions_refused(mesh):
    """What does not fit as whole tensors, or is no DTensor."""
    from torch.distributed.tensor import Shard

    case = CASES["norm, GELU"]
    x, weight, bias = (t.detach() for t in case.tensors(mesh))
    split, weight, bias = dtensor(mesh, x, Shard(0)), dtensor(mesh, weight), dtensor(mesh, bias)
    plain = weight.to_local()
    for call in (RegionOperator.of(case.text).run, lambda *given: region(given, case.text)):
        said = "in1 is a Tensor.*accepted: a DTensor"
        refuses(graphfuse.VariantPackTypeError, said, call, split, plain, bias)
        refuses(graphfuse.VariantPackTypeError, "in0 is a Tensor", call, x, weight, bias)
        refuses(
            graphfuse.VariantPackError,
            "in1 has shape.*16.*accepted: .*32",
            call,
            split,
            dtensor(mesh, plain[:16]),
            bias,
        )
        refuses(graphfuse.VariantPackTypeError, "in0 is of torch.int64", call, dtensor(mesh, x.long()), weight, bias)
    refuses(graphfuse.VariantPackError, "is given 2 tensors; accepted: 3", region, [split, weight], case.text)


def regions_compiled(mesh):
    """A graph of torch.compile with regions in it."""
    from torch.distributed.tensor import Shard

    case = CASES["norm, GELU"]
    run = RegionOperator.of(case.text).run
    function = lambda *given: run(given[0] * 2, *given[1:]) * 3  # noqa: E731
    whole = case.tensors(mesh)
    found = []
    for made in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        placed = _placed(mesh, case, whole, 0)
        y = made(*placed)
        y.backward(dtensor(mesh, _outer([y])[0], Shard(0)))
        found.append([t.full_tensor() for t in (y, *(t.grad for t in placed))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def regions_found_in_graphs(mesh):
    """A norm and an activation of rows that ranks share, compiled with the backend."""
    from torch.distributed.tensor import Shard

    from graphfuse.torch import compile_report

    def function(x, w, r):
        total = x + r
        norm = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * w
        return torch.nn.functional.gelu(norm) + total

    whole = [torch.randn(4, 6, 32).to(mesh.device_type) for _ in range(2)]
    whole.insert(1, torch.rand(32).to(mesh.device_type))
    for placement in (Shard(0), Shard(1)):
        compiled = torch.compile(function, fullgraph=True, backend="graphfuse", options={"then": "aot_eager"})
        found = []
        for made in (function, compiled):
            x, r = (dtensor(mesh, t.clone(), placement).requires_grad_() for t in (whole[0], whole[2]))
            w = dtensor(mesh, whole[1].clone()).requires_grad_()
            y = made(x, w, r)
            y.backward(dtensor(mesh, torch.ones(4, 6, 32).to(mesh.device_type), placement))
            found.append([t.full_tensor() for t in (y, x.grad, w.grad, r.grad)])
            assert y.placements == (placement,)
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        entries = compile_report().graphs[-1].entries
        assert [e.became for e in entries] == ["region"], entries


def regions_exported(mesh):
    """A program that was exported for whole tensors."""
    from torch.distributed.tensor import Shard

    case = CASES["norm, GELU"]

    class OfRegion(torch.nn.Module):
        def forward(self, *given):
            return region(given, case.text)[0]

    whole = [t.detach() for t in case.tensors(mesh)]
    call = torch.export.export(OfRegion(), (*whole,)).module()
    y = call(*_placed(mesh, case, whole, 0))
    assert y.placements == (Shard(0),)
    same(y, region(whole, case.text)[0])
    x, *others = whole
    refuses(graphfuse.VariantPackTypeError, "in1 is a Tensor.*accepted: a DTensor", call, dtensor(mesh, x), *others)
