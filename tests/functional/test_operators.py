"""The functions as operators of torch: opcheck, torch.compile over row counts, fake tensors, export."""

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import graphfuse
from graphfuse import functional
from support.functional_calls import (
    BYTES,
    CHECKS,
    F8,
    FP4,
    NAMES,
    OPERATORS,
    OUTS,
    WITH_EPS,
    Tensors,
    call,
    operator_check,
    outs,
)

pytestmark = pytest.mark.torch

ROWS = (5, 7, 3, 129, 2)  # the first one unlike other extents, which torch would take for the same


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "kinds"), OPERATORS.values(), ids=OPERATORS)
def test_opcheck(name, kinds):
    operator_check(name, kinds)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_declared(name):
    made = call(name)
    for operator in (
        getattr(getattr(torch.ops.graphfuse, name), o) for o in getattr(torch.ops.graphfuse, name).overloads()
    ):
        written = {a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        before = {n: t.clone() for n, t in made.tensors.items()}
        changed = {
            n
            for n, t in made.run().items()
            if n in before and not torch.equal(t.view(torch.uint8), before[n].view(torch.uint8))
        }
        assert changed <= written
        known = {"input", "residual", "out", "q_out", "k_out", "scale", "y_fp4", "y_out", "block_scale"}
        assert written <= known | {"residual_out"}


def around(name):
    """The function in the middle of others."""
    has_eps, has_groups = name in WITH_EPS, "group_size" in call(name).options

    def function(tensors):
        tensors = {n: t if t.dtype in (F8, FP4) else t * 2 for n, t in tensors.items()}
        run = getattr(functional, name)
        if has_groups:
            result = run(**tensors, group_size=None)
        else:  # of a number in a closure torch makes graphs
            result = run(**tensors, eps=1e-5) if has_eps else run(**tensors)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        return (*results, *(t for n, t in tensors.items() if n in ("input", "residual", "out")))

    return function


@pytest.mark.some(12)
@pytest.mark.parametrize("marked", [False, True], ids=["from 2 on", "from 0 on"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_all_row_counts(name, marked):
    """torch makes a graph of its own of 0 and 1, unless rows are marked as unknown."""
    torch._dynamo.reset()
    function, counter = around(name), CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        # What torch multiplies of (0, 1, 64), one row of a sample, has a stride of 0, which it compiles again for.
        none = () if any(t.shape[1:-1] == (1,) for t in call(name, (2, 4, 64)).tensors.values()) else (0,)
        for n, rows in enumerate((*ROWS, *(1, *none) * marked)):
            tensors = call(name, (rows, 4, 64), tensors=Tensors(seed=n)).tensors
            given = {k: t.clone() for k, t in tensors.items()}
            for t in given.values():
                if marked and t.dim() > 1:
                    mark_unbacked(t, 0)
            for a, b in zip(fast(given), function(tensors), strict=True):
                assert a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert counter.frame_count == 1, f"compiled again for {rows} rows"


def test_shapes_that_are_not_known_are_checked_by_the_call():
    torch._dynamo.reset()
    fast = torch.compile(functional.fused_add_rmsnorm, fullgraph=True, dynamic=True, backend="eager")
    x, residual = torch.randn(5, 64), torch.randn(4, 64)
    for t in (x, residual):
        mark_unbacked(t, 0)
    with pytest.raises(graphfuse.VariantPackError, match=r"residual has shape \(4, 64\); accepted: \(5, 64\)"):
        fast(x, residual, torch.randn(64))


@pytest.mark.some(12)
@pytest.mark.parametrize(
    ("name", "kinds"), [v for v in OPERATORS.values() if v[1]], ids=[n for n, v in OPERATORS.items() if v[1]]
)
def test_one_graph_where_tensors_are_given(name, kinds):
    function, graphs = getattr(functional, name), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    if "group_size" in call(name).options:
        called = lambda a: function(**a, group_size=None)  # noqa: E731 - of a dict in a closure torch makes graphs
    else:
        called = (lambda a: function(**a, eps=1e-5)) if name in WITH_EPS else lambda a: function(**a)
    fast = torch.compile(called, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for n, rows in enumerate(ROWS[:3]):
            made = call(name, (rows, 4, 64), tensors=Tensors(seed=n))
            given = outs(made, kinds)
            other = {k: t.clone() for k, t in given.items()}
            tensors = {k: t.clone() for k, t in made.tensors.items()}
            with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
                fast(made.tensors | given)
            called(tensors | other)
            for k, t in (tensors | other).items():
                assert torch.equal(t.view(torch.uint8), (made.tensors | given)[k].view(torch.uint8)), k
    (graph,) = graphs
    (node,) = [node for node in graph.graph.nodes if "graphfuse" in str(node.target)]
    packet = getattr(torch.ops.graphfuse, name)
    assert node.target is (packet.out if kinds is OUTS.get(name) else packet.default)


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_scales_in_both_layouts_are_an_operator_of_three_results(given):
    def function(tensors, **options):
        return functional.add_rmsnorm_fp4quant(**tensors, eps=1e-5, output_both_sf_layouts=True, **options)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for n, rows in enumerate((32, 96, 64)):  # whole tiles: padding is not written
            tensors = call("add_rmsnorm_fp4quant", (rows, 4, 64), tensors=Tensors(seed=n)).tensors
            other = {k: t.clone() for k, t in tensors.items()}
            options = {"block_scale_unswizzled": torch.empty(rows, 4, 4, dtype=torch.uint8)} if given else {}
            made = fast(tensors, **options)
            for a, b in zip((*made, tensors["residual"]), (*function(other), other["residual"]), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert not given or made[2] is options["block_scale_unswizzled"]
    assert counter.frame_count == 1


@pytest.mark.parametrize("overload", ["default", "out"])
def test_opcheck_of_scales_in_both_layouts(overload):
    made = call("add_rmsnorm_fp4quant", (128, 64))  # a whole tile
    kinds = {name: BYTES for name in ("y_fp4", "block_scale", "block_scale_unswizzled")}
    shapes = {"y_fp4": (128, 32), "block_scale": (512,), "block_scale_unswizzled": (128, 4)}
    given = made.tensors | made.options
    if overload == "out":
        given |= {name: torch.ones(shapes[name], dtype=kind) for name, kind in kinds.items()}
    operator = getattr(torch.ops.graphfuse.add_rmsnorm_fp4quant_both_layouts, overload)
    found = torch.library.opcheck(operator, (), given, test_utils=CHECKS)
    assert set(found.values()) == {"SUCCESS"}


def test_some_tensors_given():
    """The compiled call allocates the others."""

    def one(x, weight, out):
        return functional.rmsnorm_quant_dynamic(x, weight, out=out)

    def silu(x, weight, out):
        return functional.fused_rmsnorm_silu(x, weight, out=out)

    for function, kind, columns in ((one, F8, 64), (silu, FP4, 32), (silu, F8, 64)):
        torch._dynamo.reset()
        fast = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for n, rows in enumerate((3, 8, 5)):
            x, weight = torch.randn(rows, 64), torch.randn(64)
            outputs = [torch.empty(rows, columns, dtype=kind) for _ in range(2)]
            with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
                got = fast(x, weight, outputs[0])
            want = function(x, weight, outputs[1])
            pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("swizzled", [False, True])
def test_blocks_compile(size, swizzled):
    def function(x, weight, scale):
        kind, columns = (FP4, x.shape[1] // 2) if size == 16 else (F8, x.shape[1])
        y = torch.empty((x.shape[0], columns), dtype=kind)
        options = {"block_size": size, "is_sf_swizzled_layout": swizzled}
        return functional.rmsnorm_fp4quant(x, weight, y, None, scale, 1e-5, **options)

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, rows in enumerate((3, 200, 128)):
        x, weight, scale = torch.randn(rows, 96), torch.randn(96), torch.tensor([3.0])
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got = fast(x, weight, scale)
        rows_, blocks = torch.arange(rows), torch.arange(96 // size)
        for a, b in zip(got, function(x, weight, scale), strict=True):
            assert a.shape == b.shape and a.dtype is b.dtype
            if a.dim() == 1:  # padding is whatever it was
                a, b = (t.view(torch.uint8).view(-1, -(-len(blocks) // 4), 32, 4, 4) for t in (a, b))
                at = (rows_[:, None] // 128, blocks // 4, rows_[:, None] % 32, rows_[:, None] % 128 // 32, blocks % 4)
                a, b = a[at], b[at]
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_gradients_elsewhere_in_a_compiled_function():
    """A weight that asks for gradients is no obstacle; the result has none, as uncompiled."""
    weight = torch.nn.Parameter(torch.randn(64))
    torch._dynamo.reset()
    fast = torch.compile(
        lambda x: functional.rmsnorm(x, weight) + weight, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    fast(torch.randn(4, 64)).sum().backward()
    assert torch.equal(weight.grad, torch.full((64,), 4.0))


@pytest.mark.filterwarnings("error")  # torch warns where the address of a fake tensor is asked for
@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(name):
    """Called with fake tensors, as export and memory estimates do: shapes and types as of real ones, and errors."""
    made = call(name, (4, 64))
    want = made.run(**{n: t.clone() for n, t in made.tensors.items()})
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in made.tensors.items()}
        got = made.run(**fakes)
        for n in made.returned:
            assert (got[n].shape, got[n].dtype, got[n].stride()) == (want[n].shape, want[n].dtype, want[n].stride())
        last = next(n for n in ("weight", "q_weight", "up", "input") if n in fakes)
        with pytest.raises(graphfuse.VariantPackError, match=f"{last} has shape"):
            made.run(**fakes | {last: fakes[last][..., :0]})
        with pytest.raises(graphfuse.VariantPackTypeError, match=f"{last} is of torch.int32"):
            made.run(**fakes | {last: fakes[last].int()})


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64))

        def forward(self, x, residual):
            functional.fused_add_rmsnorm(x, residual, self.weight)
            return functional.rmsnorm_silu_gate(x, self.weight, residual)

    block, rows = Block(), torch.export.Dim("rows", min=2, max=4096)
    example = (torch.randn(4, 64), torch.randn(4, 64))
    program = torch.export.export(block, example, dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    assert "graphfuse.fused_add_rmsnorm" in str(program.graph)
    x, r = torch.randn(9, 64), torch.randn(9, 64)
    with torch.no_grad():
        assert torch.equal(program.module()(x.clone(), r.clone()), block(x, r))


def test_errors_while_compiling_name_the_argument():
    torch._dynamo.reset()
    fast = torch.compile(functional.rmsnorm, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception, match=r"weight has shape \(.*accepted"):
        fast(torch.randn(4, 64), torch.randn(63))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_a_trace_has_the_operator(given):
    """torch.jit.trace would take what it does not hear of for a constant."""

    def norm(x, weight):
        return functional.rmsnorm(x, weight, out=torch.empty_like(x) if given else None) * 2

    x, weight = torch.randn(2, 5, 64).unbind(0), torch.rand(64)
    norm(x[0], weight)  # with a shortcut
    traced = torch.jit.trace(norm, (x[0], weight), check_trace=False)
    assert "graphfuse::rmsnorm" in str(traced.graph)
    assert torch.equal(traced(x[1], weight), norm(x[1], weight))
