"""Tensor-parallel models on several ranks, fused and compiled, against themselves. ``ranks`` runs the cases."""

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from graphfuse import ModelError
from graphfuse.functional import symmetric
from graphfuse.torch import fuse, unfuse
from graphfuse.torch.compile_backend import compiled as compile_backend
from graphfuse.torch.regions import over_ranks
from graphfuse.torch.whole_models.tensor_parallel import DeferredSum
from support.small_models import SMALL


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
                assert counted == {"regions": 2 * layers, "all-reduces": 0}, counted
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
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 6, bias=False)
    split = copy.deepcopy(whole)
    parallelize_module(split, mesh, RowwiseParallel())
    fuse(split)
    memory = torch.empty(24)
    x, residual = torch.randn(4, 8), torch.randn(4, 6)
    mine = x.chunk(mesh.size(), 1)[distributed.get_rank()]
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
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    split = torch.nn.Linear(8, 6, bias=False)
    parallelize_module(split, mesh, RowwiseParallel())
    fuse(split)
    residual = torch.randn(4, 6)
    with torch.no_grad():
        made = residual + split(torch.randn(4, 8 // mesh.size()))
        residual.add_(1)
        with pytest.raises(ModelError, match="a residual was changed in place after it was added"):
            made * 2


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
_ON_CPUS = (compiled_by_older_torch, read_by_others, in_one_memory, a_residual_that_is_changed)
CASES = ON_GPUS | {f.__name__: f for f in _ON_CPUS}
