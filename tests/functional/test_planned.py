"""Every call is one kernel, two for queries and keys: planned, and some run, on the emulator, which asks the engines as
a GPU does."""

import pytest
import torch

from graphfuse import GraphNotSupportedError, create_handle, functional, heur_mode
from graphfuse.functional import call as calls
from graphfuse.functional import problem
from support.functional_calls import F8, F8_WIDE, NAMES, call, check


@pytest.fixture
def graphs(monkeypatch):
    """The graphs of calls from now on, drawn for the emulator too and planned there."""
    found, plan = [], problem.plan.__wrapped__

    def both(name, variant, layouts, device, generation):
        graph = problem.build_graph(name, variant, dict(layouts), create_handle("emulator")).graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.OPENSOURCE])
        found.append(graph)
        return plan(name, variant, layouts, device, generation)

    monkeypatch.setattr(problem, "plan", both)
    for name in NAMES:
        getattr(functional, name).problems.clear()
    return found


def kernels(graphs) -> tuple[str, ...]:
    (graph,) = graphs
    engines = graph.get_engine_and_knobs_at_index(0)[0]
    return (engines,) if isinstance(engines, str) else engines


def wanted(name: str) -> tuple[str, ...]:
    return ("rows",) * (2 if name == "qk_rmsnorm" else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_one_kernel(name, dtype, graphs):
    call(name, (21, 2, 128), dtype).run()
    assert kernels(graphs) == wanted(name)


OUTS = {
    f"{name}-{out}-{kind}": (name, {out: torch.empty(21, 2, 128, dtype=kind)})
    for name, out, kind in (
        ("rmsnorm", "out", F8),
        ("gemma_rmsnorm", "out", torch.float32),
        ("fused_add_rmsnorm", "out", torch.float16),
        ("gemma_fused_add_rmsnorm", "out", F8_WIDE),
        ("sandwich_rmsnorm", "out", F8),
        ("gemma_sandwich_rmsnorm", "residual_out", torch.float32),
        ("fused_rmsnorm_silu", "out", F8),
        ("rmsnorm_silu_gate", "out", F8),
        ("layernorm", "out", F8),
        ("fused_add_layernorm", "out", F8_WIDE),
        ("softmax", "out", F8),
        ("normalize", "out", torch.float32),
        ("add_layernorm", "out", F8),
        ("layernorm_quant", "out", F8_WIDE),
        ("rmsnorm_quant", "out", F8_WIDE),
        ("fused_add_rmsnorm_quant", "out", F8_WIDE),
        ("rmsnorm_quant_dynamic", "out", F8_WIDE),
        ("fused_add_rmsnorm_quant_dynamic", "out", F8_WIDE),
        ("add_rmsnorm_fp4quant", "y_out", torch.bfloat16),
    )
}


@pytest.mark.parametrize(("name", "outs"), OUTS.values(), ids=OUTS)
def test_one_kernel_for_each_format(name, outs, graphs):
    call(name, (21, 2, 128)).run(**outs)
    assert kernels(graphs) == wanted(name)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "add_rmsnorm_fp4quant"])
def test_one_kernel_for_blocks(name, size, swizzled, scaled, graphs):
    change = {"block_size": size, "is_sf_swizzled_layout": swizzled}
    change |= {"y_fp4": torch.empty(21, 2, 128, dtype=F8)} if size == 32 else {}
    change |= {"global_scale": torch.ones(1)} if scaled else {}
    call(name, (21, 2, 128)).run(**change)
    assert kernels(graphs) == wanted(name)


SLICES = {
    "behind more columns": lambda t: t.new_empty((*t.shape[:-1], t.shape[-1] + 9))[..., 9:],
    "every other row": lambda t: t.new_empty((*(2 * e for e in t.shape[:-1]), t.shape[-1]))[::2, ::2, ::2],
    "rows in another order": lambda t: t.new_empty((*t.shape[-2::-1], t.shape[-1])).permute(2, 1, 0, 3),
    "off 16 bytes": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape),
}


@pytest.mark.parametrize("form", SLICES)
@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_for_rows_of_any_strides(name, form, graphs):
    made = call(name, (2, 3, 4, 64))
    given = {n: SLICES[form](t).copy_(t) if t.dim() == 4 else t for n, t in made.tensors.items()}
    outs = {
        n: SLICES[form](torch.empty_like(made.exact[n]).bfloat16()) for n in {"out", "q_out", "k_out"} & {*made.exact}
    }
    check(made.run(**given | (outs if "quant" not in name and "fp8" not in name else {})), made.exact)
    assert kernels(graphs) == wanted(name)


def test_columns_apart_are_no_kernel_s(graphs):
    """README says so; the reference engine sees to them."""
    with pytest.raises(GraphNotSupportedError, match="and 2 between columns; accepted: 1"):
        functional.rmsnorm(torch.randn(5, 128)[:, ::2], torch.randn(64))


def test_one_kernel_for_slices(graphs):
    packed = torch.randn(9, 8, 128).bfloat16()
    functional.qk_rmsnorm(packed[:, :4], packed[:, 4:6], packed[0, 0], packed[0, 0])
    assert kernels(graphs) == wanted("qk_rmsnorm")


def test_one_kernel_in_place(graphs):
    x = torch.randn(9, 128)
    functional.rmsnorm_silu_gate(x, x[0].clone(), x.clone(), out=x)
    assert kernels(graphs) == wanted("rmsnorm_silu_gate")


@pytest.mark.emulate
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_do_what_the_functions_promise(name, monkeypatch, plan_on):
    """Run by the emulator, as by a GPU: in place, first the long way, then the short one."""
    plan, used = problem.plan.__wrapped__, []
    plan_on("emulator")
    with monkeypatch.context() as patch:
        patch.setattr(problem, "plan", lambda *a: used.append(plan(*a)) or used[-1])
        for _ in range(3):
            made = call(name, (5, 2, 64))
            results = made.run()
            check(results, made.exact)
    (planned,) = used
    assert tuple(part.engine.name for part in planned.plan.parts) == wanted(name)
    plan_on("cpu")
    reference = call(name, (5, 2, 64)).run()
    for output in {"y_fp4", "block_scale"} & {*results}:
        assert torch.equal(results[output].view(torch.uint8), reference[output].view(torch.uint8))


@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "fused_add_rmsnorm_quant", "rmsnorm"])
@pytest.mark.parametrize("rows", [16, 4096])
def test_functions_have_the_knobs_that_were_tuned_for_their_benches(name, rows, plan_on):
    """They store a residual sum rounded and read it unrounded, which takes a step more than the bench's graph has."""
    plan_on("emulator")
    made = call(name, (rows, 7168))
    arguments = made.tensors | made.options
    f = _declared(made.function)
    (part,) = calls.AcceptedCall.of(
        f, {n: arguments.get(n, f.defaults.get(n)) for n in f.parameters}
    ).planned.problem.plan.parts
    tuned = name != "rmsnorm"
    assert part.why.startswith("tuned on NVIDIA H200" if tuned else "heuristic")


def _declared(function):
    return function.__globals__["first"].args[0]
