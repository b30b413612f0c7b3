"""intermediate_rounding: what nodes read of a virtual tensor, bit for bit, in both modes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphfuse
from graphfuse import GraphTypeError, data_type, heur_mode, norm_forward_phase
from support import graphs
from support.graphs import BF16, E4M3, E5M2, FLOAT, HALF

TYPES = [FLOAT, BF16, HALF, E4M3, E5M2, data_type.INT8]


def build(drawn: graphs.Drawn, types, rounding: str, every: bool) -> graphfuse.pygraph:
    """The graph with result i of type types[i]; every: all results are outputs."""
    g = drawn.build(intermediate_rounding=rounding)
    for t in g.tensors:
        if t.get_name().startswith("n") and t.get_name()[1:].isdigit():
            t.set_data_type(types[int(t.get_name()[1:])])
            t.set_output(every or not t.get_is_virtual())
    return g


def outputs(g: graphfuse.pygraph) -> dict[str, torch.Tensor]:
    g.validate()
    made = {t.name: (t.dim, getattr(torch, t.dtype.facts.torch)) for t in g._ir.outputs}
    return {name: torch.zeros(dim, dtype=dtype) for name, (dim, dtype) in made.items()}


@given(drawn=graphs.drawn(), data=st.data())
def test_declared_is_what_node_after_node_makes(drawn, data):
    """As if each result went through memory: equal bytes."""
    types = data.draw(st.lists(st.sampled_from(TYPES), min_size=len(drawn.ops), max_size=len(drawn.ops)))
    pack = drawn.inputs()
    declared, stored = (build(drawn, types, *how) for how in (("declared", False), ("float32", True)))
    found, want = outputs(declared), outputs(stored)
    graphs.run(declared, pack | found)
    graphs.run(stored, pack | want)
    assert found
    for name, values in found.items():
        assert torch.equal(values.view(torch.uint8), want[name].view(torch.uint8)), name


@given(drawn=graphs.drawn(), data=st.data())
def test_float32_does_not_look_at_declared_types(drawn, data):
    types = data.draw(st.lists(st.sampled_from(TYPES), min_size=len(drawn.ops), max_size=len(drawn.ops)))
    types = [FLOAT if i in drawn.outputs else t for i, t in enumerate(types)]
    pack = drawn.inputs()
    one, plain = build(drawn, types, "float32", False), build(drawn, [FLOAT] * len(types), "float32", False)
    found, want = outputs(one), outputs(plain)
    assert one.key() == plain.key()
    graphs.run(one, pack | found)
    graphs.run(plain, pack | want)
    for name, values in found.items():
        assert torch.equal(values.view(torch.uint8), want[name].view(torch.uint8)), name


def squared(rounding: str, device: str = "cpu") -> graphfuse.pygraph:
    g = graphs.new(device=device, intermediate_data_type=BF16, intermediate_rounding=rounding)
    x = g.tensor([4], name="x")
    y = g.add(x, 1.0).set_name("y")
    g.mul(y, y).set_output().set_name("out")
    return g


def test_an_example():
    x, out = torch.tensor([1 / 256, 1 / 128, 3 / 256, 0.1]), torch.zeros(4)
    for rounding, want in (("float32", (x + 1) ** 2), ("declared", (x + 1).bfloat16().float() ** 2)):
        g = squared(rounding)
        graphs.run(g, {"x": x, "out": out})
        assert torch.equal(out, want)
    assert not torch.equal((x + 1) ** 2, (x + 1).bfloat16().float() ** 2)


@pytest.mark.parametrize(
    ("rounding", "note"), [("float32", "kept in the compute type"), ("declared", "'y' to BFLOAT16")]
)
def test_notes_say_which(rounding, note):
    g = squared(rounding)
    g.build([heur_mode.FALLBACK])
    assert any(note in line for line in g.get_numerical_notes_at_index(0))
    assert note in g.explain()


def test_declared_is_part_of_the_key():
    keys = set()
    for rounding in ("float32", "declared"):
        g = squared(rounding)
        g.validate()
        keys.add(g.key())
    assert len(keys) == 2


def test_a_quantized_tensor_between_nodes_may_be_stored():
    """Its own types hold what it is: nothing changes in either mode."""
    results = []
    for rounding in ("float32", "declared"):
        g = graphs.new(intermediate_rounding=rounding)
        y, scale = g.block_scale_quantize(g.tensor([4, 64], name="x"), block_size=16)
        g.identity(y).set_output().set_name("y"), g.identity(scale).set_output().set_name("scale")
        pack = {"y": torch.zeros(4, 64), "scale": torch.zeros(4, 4)}
        graphs.run(g, {"x": torch.linspace(-9, 9, 256).view(4, 64)} | pack)
        results.append(pack)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_generated_kernels_round_between_nodes_or_leave_it():
    """Whoever runs it: the values of the reference."""
    found = {}
    for device, mode in (("emulator", heur_mode.A), ("cpu", heur_mode.FALLBACK)):
        g = graphs.new(device=device, intermediate_data_type=E5M2, intermediate_rounding="declared")
        x, w = g.tensor([8, 64], name="x"), g.tensor([1, 64], name="w")
        y = g.rmsnorm(x, w, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        g.swish(y).set_output().set_name("out")
        pack = {"x": torch.linspace(-2, 3, 512).view(8, 64), "w": torch.linspace(0.5, 1.5, 64).view(1, 64)}
        found[device] = torch.empty(8, 64)
        graphs.run(g, pack | {"out": found[device]}, [mode])
    close = (found["emulator"] - found["cpu"]).abs() <= 1e-5
    assert close.float().mean() > 0.99  # a value near a midpoint may round either way


# name: op, operands, declared type. All ops are exact or rounded once, so that every engine makes the same of them.
CHAIN = {
    "sum": ("add", ("x", "residual"), BF16),
    "y": ("rmsnorm", ("sum", "weight"), HALF),
    "gated": ("mul", ("y", "gate"), BF16),
    "clamped": ("max", ("gated", "least"), E4M3),
    "out": ("mul", ("clamped", "factor"), E5M2),
}
GIVEN = {"x": (8, 96), "residual": (8, 96), "gate": (8, 96), "weight": (1, 96), "least": (8, 1), "factor": (1, 1)}


def part_of_chain(names, types, rounding: str) -> graphfuse.pygraph:
    """These nodes of the chain on the emulator, the last one's result an output."""
    g = graphs.new(device="emulator", intermediate_rounding=rounding)
    made = {}
    for name in names:
        op, operands, _ = CHAIN[name]
        for o in operands:
            if o not in made:
                made[o] = g.tensor(list(GIVEN.get(o, (8, 96))), data_type=types[o], name=o)
        left, right = (made[o] for o in operands)
        if op == "rmsnorm":
            made[name] = g.rmsnorm(left, right, 1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        else:
            made[name] = getattr(g, op)(left, right)
        made[name].set_name(name).set_data_type(types[name])
    made[name].set_output()
    return g


@pytest.mark.emulate
@pytest.mark.parametrize("rounding", ["declared", "float32"])
def test_one_kernel_makes_the_bytes_of_one_node_after_another(rounding):
    types = {name: BF16 for name in GIVEN} | {name: dtype for name, (_, _, dtype) in CHAIN.items()}
    source = graphs.generator("cpu", 3)
    pack = {name: (2 * torch.randn(dim, generator=source)).bfloat16() for name, dim in GIVEN.items()}
    fused = torch.zeros(8, 96, dtype=graphs.TORCH[E5M2])
    g = part_of_chain(CHAIN, types, rounding)
    graphs.run(g, pack | {"out": fused}, [heur_mode.OPENSOURCE])
    assert g.get_engine_and_knobs_at_index(0)[0] == "rows"  # one part
    if rounding == "float32":
        types |= {name: FLOAT for name in CHAIN if name != "out"}
    for name, (op, operands, _) in CHAIN.items():
        pack[name] = torch.zeros(8, 96, dtype=graphs.TORCH[types[name]])
        one = part_of_chain([name], types, rounding)
        mode = heur_mode.OPENSOURCE if op == "rmsnorm" else heur_mode.FALLBACK
        graphs.run(one, {o: pack[o] for o in (*operands, name)}, [mode])
    assert torch.equal(fused.view(torch.uint8), pack["out"].view(torch.uint8))


@pytest.mark.emulate
def test_the_normalization_does_not_read_its_rounded_inverse():
    found = {}
    for device, mode in (("emulator", heur_mode.OPENSOURCE), ("cpu", heur_mode.FALLBACK)):
        g = graphs.new(device=device)
        training = norm_forward_phase.TRAINING
        y, inverse = g.rmsnorm(g.tensor([5, 16], name="x"), epsilon=1e-5, norm_forward_phase=training)
        inverse.set_output().set_name("inverse").set_data_type(BF16)
        y.set_output().set_name("y"), g.mul(y, inverse).set_output().set_name("out")
        pack = {"x": torch.linspace(-2, 3, 80).view(5, 16), "inverse": torch.zeros(5, 1, dtype=torch.bfloat16)}
        found[device] = [torch.zeros(5, 16), torch.zeros(5, 16)]
        graphs.run(g, pack | dict(zip(("y", "out"), found[device], strict=True)), [mode])
    torch.testing.assert_close(found["emulator"], found["cpu"], rtol=1e-6, atol=0)


@pytest.mark.emulate
def test_values_around_one_that_is_kept_rounded():
    """What is worked out before a value that is packed, and read after it too."""
    found = {}
    for device, mode in (("emulator", heur_mode.OPENSOURCE), ("cpu", heur_mode.FALLBACK)):
        g = graphs.new(device=device)
        x = g.abs(g.tensor([5, 16], name="x"))
        y = g.rmsnorm(g.tensor([5, 16], name="z"), epsilon=1e-5, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y = g.mul(y, x)
        rounded = g.neg(y).set_output().set_name("rounded").set_data_type(BF16)
        g.add(rounded, y).set_output().set_name("out")
        pack = {"x": torch.linspace(-2, 3, 80).view(5, 16), "z": torch.linspace(-1, 1, 80).view(5, 16)}
        found[device] = torch.zeros(5, 16)
        graphs.run(g, pack | {"rounded": torch.zeros(5, 16, dtype=torch.bfloat16), "out": found[device]}, [mode])
    torch.testing.assert_close(found["emulator"], found["cpu"], rtol=0, atol=2e-2)


@pytest.mark.parametrize("value", ["float16", None, True, data_type.FLOAT, ["declared"]])
def test_other_roundings_are_refused(value):
    with pytest.raises(GraphTypeError, match="'g': intermediate_rounding must be 'float32' or 'declared', got"):
        graphfuse.pygraph("g", intermediate_rounding=value)
