"""Tensor-parallel models on several ranks, fused and compiled, against themselves. ``ranks`` runs the cases."""

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from unittest import mock

import numpy
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from graphfuse import ModelError
from graphfuse.functional import symmetric
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.compile_backend import compiled_graphs as compile_backend
from graphfuse.torch.regions import over_ranks
from graphfuse.torch.whole_models.tensor_parallel import DeferredSum
from support.small_models import SMALL


def _linear(mesh: DeviceMesh, columns: int = 8):
    """A fused layer without a bias, split; the same whole; and which part of its input a rank has."""
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    whole = torch.nn.Linear(columns, 6, bias=False)
    split = copy.deepcopy(whole)
    parallelize_module(split, mesh, RowwiseParallel())
    fuse(split)
    return split, whole, lambda x: x.chunk(mesh.size(), 1)[distributed.get_rank()]


def _tokens(mesh: DeviceMesh) -> torch.Tensor:
    return (torch.arange(12, device=mesh.device_type) % 7).view(2, 6)


def _split(mesh: DeviceMesh, kind: str, dtype: torch.dtype = torch.float32):
    import transformers
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, num_hidden_layers=2, vocab_size=32)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(mesh.device_type)
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Calls of a region with a sum, and all-reduces beside those."""
    found = {"regions": 0, "all-reduces": 0}
    run, reduce = over_ranks.run, distributed.all_reduce

    def counting_run(*given):
        found["regions"] += 1
        before = found["all-reduces"]
        made = run(*given)
        found["all-reduces"] = before  # without its own
        return made

    def counting_reduce(*given, **named):
        found["all-reduces"] += 1
        return reduce(*given, **named)

    runs = mock.patch.object(over_ranks, "run", counting_run)
    with runs, mock.patch.object(distributed, "all_reduce", counting_reduce):
        yield found


def fused(mesh: DeviceMesh) -> None:
    """Both sums of each layer are one call with the residual and the norm behind; results are the model's."""
    tokens = _tokens(mesh)
    for kind in ("llama", "qwen3"):
        for dtype, least in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
            model = _split(mesh, kind, dtype)
            layers = len(model.model.layers)
            with torch.no_grad():
                want = model(tokens, use_cache=False, output_hidden_states=True)
            report = fuse(model)
            made = [entry for entry in report.replaced if entry.became == "region_over_ranks"]
            assert len(made) == 2 * layers, report
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), _counted() as counted:
                    got = model(tokens, use_cache=False)
                assert counted == {"regions": 2 * layers, "all-reduces": 0}, (mode, counted)
                torch.testing.assert_close(got.logits, want.logits, rtol=least, atol=least)
            with torch.no_grad():  # somebody looks at sums between layers
                got = model(tokens, use_cache=False, output_hidden_states=True)
            for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
                torch.testing.assert_close(torch.Tensor.add(a, 0), b, rtol=least, atol=least)
            unfuse(model)
            with torch.no_grad():
                assert torch.equal(model(tokens, use_cache=False).logits, want.logits)


def trained(mesh: DeviceMesh) -> None:
    """With gradients, the model's own sums over ranks."""
    model, tokens = _split(mesh, "llama"), _tokens(mesh)
    other = copy.deepcopy(model)
    fuse(model)
    with _counted() as counted:
        for one in (model, other):
            one(tokens, use_cache=False).logits.square().mean().backward()
    assert counted["regions"] == 0
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        a, b = (t.grad.full_tensor() if hasattr(t.grad, "full_tensor") else t.grad for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def read_by_others(mesh: DeviceMesh) -> None:
    """What is not yet added up is, where anything but a norm looks at it; biases and other layouts are left."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    whole = torch.nn.Sequential(*(torch.nn.Linear(8, 6, bias=bias) for bias in (False, True, False)))
    split = copy.deepcopy(whole)
    plan = {"0": RowwiseParallel(), "1": RowwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(split, mesh, plan)
    report = fuse(split)
    assert [(e.name, e.became, e.why) for e in report.entries if "0" != e.name] == [
        ("1", "", "its bias is added to the sum over ranks"),
        ("2", "", "its result is not whole on every rank, or a DTensor"),
    ], report.entries
    x, residual = torch.randn(4, 8), torch.randn(4, 6)
    mine = x.chunk(mesh.size(), 1)[distributed.get_rank()]
    with torch.no_grad():
        want = whole[0](x)
        for look in (
            lambda y, r: y,
            lambda y, r: (y + r) * 2,
            lambda y, r: r + y + y,
            lambda y, r: torch.cat([y, r]).sum(0),
            lambda y, r: (y + y).view(2, 12)[0],
            lambda y, r: (y + 1).tolist(),
            lambda y, r: r.clone().add_(y),
        ):
            got, right = look(split[0](mine), residual), look(want, residual)
            torch.testing.assert_close(torch.as_tensor(got) + 0, torch.as_tensor(right), rtol=1e-5, atol=1e-5)


def in_one_memory(mesh: DeviceMesh) -> None:
    """A product that overwrites the memory of the one before leaves what is not yet added up as it was."""
    split, whole, part = _linear(mesh)
    memory = torch.empty(24)
    x, residual = torch.randn(4, 8), torch.randn(4, 6)
    mine = part(x)
    shared = mock.patch.object(symmetric, "scratch", lambda group, slot, shape, *_: memory.view(shape))
    with shared, torch.no_grad():
        first = split(mine)
        added = residual + first
        second = split(2 * mine)
        assert type(first) is type(added) is type(second) is DeferredSum
        for made, factor, more in ((added, 1, residual), (second, 2, 0), (first, 1, 0)):
            torch.testing.assert_close(made + 0, factor * whole(x) + more, rtol=1e-5, atol=1e-5)


def a_residual_that_is_changed(mesh: DeviceMesh) -> None:
    """It cannot be added any more, and is not added wrongly."""
    split, _, _ = _linear(mesh)
    residual = torch.randn(4, 6)
    with torch.no_grad():
        made = residual + split(torch.randn(4, 8 // mesh.size()))
        residual.add_(1)
        with pytest.raises(ModelError, match="a residual was changed in place after it was added"):
            made * 2


def without_operators(mesh: DeviceMesh) -> None:
    """What torch reads of memory without an operator is the sum, too; what looks at no element adds nothing up."""
    split, whole, mine = _linear(mesh)
    x = torch.randn(4, 8)
    with torch.no_grad():
        want = whole(x)
        for look in (
            lambda y: y.numpy(),
            lambda y: numpy.asarray(y),
            lambda y: numpy.from_dlpack(y),
            lambda y: torch.utils.dlpack.from_dlpack(y),
            lambda y: y.tolist(),
            lambda y: copy.copy(y),
            lambda y: copy.deepcopy([y])[0],
            lambda y: pickle.loads(pickle.dumps(y)),
            lambda y: torch.load(_saved(y)),
            lambda y: y.share_memory_(),
            lambda y: y.untyped_storage().clone().tolist() and torch.tensor(y.storage().tolist()).view(4, 6),
            lambda y: y.apply_(lambda value: value),
            lambda y: y.map_(torch.zeros(4, 6), lambda a, b: a),
            lambda y: y.data_ptr() and y.clone(),
            lambda y: y.mul_(1),
        ):
            got = torch.as_tensor(look(split(mine(x))))
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        with _counted() as counted:
            made = split(mine(x)) + torch.ones(4, 6)
            assert (made.shape, made.dtype, made.device, made.ndim, len(made)) == (
                (4, 6),
                want.dtype,
                want.device,
                2,
                4,
            )
            assert made.stride() == (6, 1) and made.is_contiguous() and not made.requires_grad and made.numel() == 24
            assert "not yet added up over 2 ranks" in f"{made}" and type(made) is DeferredSum
        assert counted["all-reduces"] == 0
        torch.testing.assert_close(made.mul_(2), made.clone())  # once read, it is the sum
        made.resize_(6, 4)
        assert made.shape == (6, 4) and "DeferredSum" not in repr(made)


def seen_by_others(mesh: DeviceMesh) -> None:
    """What torch.jit.trace and modes of dispatch see is the class's own forward, whoever reads what it makes."""
    split, _, mine = _linear(mesh)
    own = copy.deepcopy(split)
    unfuse(own)
    x = mine(torch.randn(4, 8))

    class Around(torch.nn.Module):
        def __init__(self, layer, read):
            super().__init__()
            self.layer, self.read = layer, read

        def forward(self, x):
            return self.read(self.layer(x), x)

    def traced(layer, read):
        try:
            return torch.jit.trace(Around(layer, read), x, check_trace=False)(x)
        except RuntimeError as error:  # torch 2.13 traces no DTensor of a mesh
            return str(error)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (lambda y, x: x * 2, lambda y, x: y, lambda y, x: y * 2, lambda y, x: y + torch.ones(4, 6)):
            got, want = traced(split, read), traced(own, read)
            assert got == want if isinstance(want, str) else torch.equal(got, want), (got, want)
        with FlopCounterMode(display=False) as counted:
            assert type(split(x)) is type(own(x))
        assert counted.get_total_flops()
        with pytest.raises(
            ModelError, match=r"torch.jit.trace reads what ranks have not yet added up; accepted: a clone"
        ):
            torch.jit.trace(torch.nn.Tanh(), split(x), check_trace=False)


def _saved(t: torch.Tensor) -> io.BytesIO:
    made = io.BytesIO()
    torch.save(t, made)
    made.seek(0)
    return made


def changed_in_inference_mode(mesh: DeviceMesh) -> None:
    """torch counts no changes there. A sum has the residual as it was when it was added."""
    split, whole, mine = _linear(mesh, 6)
    norm = torch.nn.RMSNorm(6)
    fuse(norm)
    x, residual = torch.randn(4, 6), torch.randn(4, 6)
    with torch.inference_mode():
        one = whole(x)

        def made():
            return split(mine(x))

        changes = {
            "of what it was added to": lambda first, seen: first.add_(1),
            "of what somebody read": lambda first, seen: [t.add_(1) for t in seen],
            "of its data": lambda first, seen: first.data.add_(1),
        }
        for is_read in (False, True):
            for name, change in changes.items():
                first = residual.clone() + made()
                with _counted() as counted:
                    norm(first)
                assert counted["regions"] == 1
                seen = [first[0]] if is_read else []
                second = first + made()
                assert (second.residual is first._total) is not is_read  # copied where somebody may have it
                change(first, seen)
                torch.testing.assert_close(second + 0, residual + 2 * one, rtol=1e-5, atol=1e-5, msg=name)
        plain = residual.clone()
        added = plain + made()
        assert type(added) is DeferredSum
        plain.zero_()
        torch.testing.assert_close(added + 0, residual + one, rtol=1e-5, atol=1e-5)


def compiled(mesh: DeviceMesh) -> None:
    """The backend makes the sum over ranks a part of the region."""
    tokens = _tokens(mesh)
    for kind in ("llama", "qwen3"):
        model = _split(mesh, kind)
        layers = len(model.model.layers)
        torch.compiler.reset()
        faster = torch.compile(model, backend="graphfuse", options={"then": "aot_eager"})
        with torch.no_grad(), _counted() as counted:
            want = model(tokens, use_cache=False).logits
            got = faster(tokens, use_cache=False).logits
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert counted["regions"] == 2 * layers, counted


def compiled_by_older_torch(mesh: DeviceMesh) -> None:
    """Torch before 2.13 traces methods of DTensors as functions that it makes, with their arguments in them."""
    replace = compile_backend.over_ranks.replace

    def replace_in_older(module: GraphModule):
        for node in module.graph.find_nodes(op="call_method"):
            if node.target in ("redistribute", "to_local"):
                first, *rest = node.args
                node.op, node.args, node.target = "call_function", (first,), _prim(node.target, rest, node.kwargs)
                node.kwargs = {}
        module.recompile()
        return replace(module)

    with mock.patch.object(compile_backend.over_ranks, "replace", replace_in_older):
        compiled(mesh)


def _prim(name: str, args, named):
    def called(x):
        return getattr(x, name)(*args, **named)

    called.__name__ = f"prim_{name}"
    return called


ON_GPUS = {f.__name__: f for f in (fused, trained, compiled)}
_ON_CPUS = (
    *(compiled_by_older_torch, read_by_others, without_operators, seen_by_others),
    *(in_one_memory, a_residual_that_is_changed, changed_in_inference_mode),
)
CASES = ON_GPUS | {f.__name__: f for f in _ON_CPUS}
