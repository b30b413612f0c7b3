"""Models fused in place: what is found and what is refused, what stays as it was, and what comes back."""

import copy
import io
import pickle
import warnings

import pytest
import torch

import graphfuse
from graphfuse.torch import fuse, unfuse
from support.dispatched import operators, regions
from support.norm_modules import HALF, HIDDEN, LlamaNorm

pytestmark = pytest.mark.torch


class Layer(torch.nn.Module):
    def __init__(self, norm=LlamaNorm):
        super().__init__()
        self.before, self.after = norm(), norm()
        self.mixer, self.mlp = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def mix(self, x):
        return self.mixer(x)

    def forward(self, x, scale=None, **kwargs):
        residual = x
        x = residual + self.mixer(self.before(x), **kwargs)
        residual = x
        x = self.mlp(self.after(x))
        return residual + x


class Branching(Layer):
    def forward(self, x, scale=None):
        residual = x
        x = self.mixer(self.before(x))
        if scale:
            return x * scale
        x = residual + x
        return x + self.mlp(self.after(x))


class Calling(Layer):
    def forward(self, x):
        total = x + self.mix(self.before(x))
        return total + self.mlp(self.after(total))


class Scaled(Layer):
    factor = 0.5

    def forward(self, x):
        total = x + self.mixer(self.before(x)) * self.factor
        return total + self.mlp(self.after(total))


class LayerScale(Layer):
    """A parameter is read between a sum and its norm, as Python reads the left factor of a product first."""

    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        x = x + self.mixer(self.before(x))
        return x + self.gamma * self.mlp(self.after(x))


class ByItsMixer(Layer):
    """It asks one of its modules for a number."""

    def forward(self, x):
        x = x + self.mixer(self.before(x)) * (0.5 if self.mixer.out_features == HIDDEN else 1.0)
        return x + self.mlp(self.after(x))


class Between(Layer):
    def forward(self, x):
        total = x + self.mixer(self.before(x))
        other = self.mlp(total)
        return other + self.after(total)


def model(layer=Layer, count=2, dtype=HALF):
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(layer() for _ in range(count)), torch.nn.LayerNorm(HIDDEN)).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.copy_(torch.randn(p.shape))
    return made


def inputs(dtype=HALF, seed=1):
    return torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def named(report):
    assert {e.became for e in report.replaced} <= {"region"}
    return {(e.name, e.why) for e in report.replaced}


NORM = "rmsnorm, mul"
LAYER = [NORM, "add, rmsnorm, mul"]
"""What a layer's kernels compute."""


def test_report_and_values():
    made, x = model(), inputs()
    want = made(x)
    report = fuse(made)
    assert named(report) == {
        *((f"{n}.{norm}", NORM) for n in (0, 1) for norm in ("before", "after")),
        *((f"{n}", "add, rmsnorm, mul; with after") for n in (0, 1)),
        ("2", "layernorm"),
    }
    assert {(e.name, e.why) for e in report.left} == {
        (f"{n}", "the returned sum, whose norm is in another module") for n in (0, 1)
    }
    with torch.no_grad():
        assert regions(lambda: made(x)) == [*LAYER, *LAYER, "layernorm"]
    torch.testing.assert_close(made(x), want, rtol=0.02, atol=0.02)
    assert (made(x) != want).float().mean() < 0.05
    lines = str(report).splitlines()
    assert lines[0] == "Sequential: 7 of 9 sites replaced"
    assert any(line.split() == ["*.before", "x2", "LlamaNorm", "region", "(rmsnorm,", "mul)"] for line in lines)
    table = report.__rich__()
    assert table.row_count == len(lines) - 2


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_gradients(dtype):
    """No further from those in float64 than the model's own are."""

    def gradients(of, x):
        given = x.clone().requires_grad_()
        of(given).square().sum().backward()
        found = {n: p.grad.double() for n, p in of.named_parameters()} | {"x": given.grad.double()}
        of.zero_grad()
        return found

    class Exact(LlamaNorm):
        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    made, exact = model(dtype=dtype), model(lambda: Layer(Exact), dtype=torch.float64)
    exact.load_state_dict(made.state_dict())
    want = gradients(exact, inputs(dtype).double())
    own = gradients(made, inputs(dtype))
    fuse(made)
    got = gradients(made, inputs(dtype))
    unit = torch.finfo(dtype).eps
    for n, exact in want.items():
        assert (got[n] - exact).norm() <= 1.1 * (own[n] - exact).norm() + unit * exact.norm(), n


def test_what_stays_and_what_comes_back():
    made, x = model(), inputs()
    before = {n: dict(vars(m)) for n, m in made.named_modules()}
    state, parameters = list(made.state_dict()), [*made.parameters()]
    want = made(x)
    calls = []
    made[0].mixer.register_forward_hook(lambda *given: calls.append("mixer"))
    made[1].register_forward_pre_hook(lambda *given: calls.append("layer"))
    report = fuse(made.eval())
    assert list(made.state_dict()) == state and all(map(lambda a, b: a is b, made.parameters(), parameters))
    assert type(made[0].before) is LlamaNorm and not made[0].training
    made(x)
    assert calls == ["mixer", "layer"]
    assert str(fuse(made)) == str(report)  # again
    gone = unfuse(made)
    assert set(gone) == {"0", "1", "0.before", "0.after", "1.before", "1.after", "2"}
    assert unfuse(made) == ()
    made.train()
    assert torch.equal(made(x), want)
    for n, m in made.named_modules():
        assert vars(m).keys() == before[n].keys()


def test_hooks_of_a_norm_are_called_as_before():
    made, x = model(), inputs()
    seen = []
    fuse(made)
    handle = made[0].after.register_forward_hook(lambda module, given, y: seen.append((len(given), y.shape)))
    with torch.no_grad():
        assert regions(lambda: made[0](x)) == [NORM, NORM]
        handle.remove()
        assert seen == [(1, x.shape)]
        assert regions(lambda: made[0](x)) == LAYER


def test_copies_and_pickles():
    made, x = model(), inputs()
    fuse(made)
    want = made(x)
    other = copy.deepcopy(made)
    with torch.no_grad():
        other[0].after.weight.zero_()
        other[2].bias.fill_(7)
    assert torch.equal(made(x), want) and not torch.equal(other(x), want)
    memory = io.BytesIO(pickle.dumps(made))
    loaded = pickle.load(memory)
    assert operators(lambda: loaded(x)) == []
    assert len(fuse(loaded).replaced) == 7
    assert torch.equal(loaded(x), want)


def test_calls_that_an_operator_would_compute_otherwise_run_the_own_forward():
    norm, x = LlamaNorm().to(HALF), inputs()
    fuse(norm)
    assert operators(lambda: norm(x)) == ["region_training"]
    assert operators(lambda: norm(hidden_states=x)) == ["region_training"]
    assert operators(lambda: norm.double()(x.double())) == []
    layer_norm = torch.nn.LayerNorm(HIDDEN).to(HALF)
    fuse(layer_norm)
    with torch.autocast("cpu", dtype=HALF):
        assert operators(lambda: layer_norm(x)) == []
    with torch.no_grad():
        assert regions(lambda: layer_norm(x)) == ["layernorm"]
    with pytest.raises(TypeError, match="forward"):
        norm(x, x, x)


def test_epsilon_and_constants_are_compared_at_each_call():
    made, x = model(Scaled), inputs() * 1e-3
    fuse(made)
    with torch.no_grad():
        assert regions(lambda: made[0](x)) == [NORM, "mul, add, rmsnorm"]
        made[0].factor = 2.0
        assert regions(lambda: made[0](x)) == [NORM, NORM]
        made[0].before.variance_epsilon = 1.0
        got = made[0](x)
        assert regions(lambda: made[0](x)) == [NORM]
        unfuse(made)
        assert torch.equal(got, made[0](x))


def test_a_parameter_that_is_read_before_a_norm_is_nothing_in_between():
    made, x = model(LayerScale), inputs()
    with torch.no_grad():
        want = made[0](x)
        fuse(made)
        assert regions(lambda: made[0](x)) == [NORM, "add, rmsnorm, mul"]
        torch.testing.assert_close(made[0](x), want, rtol=0.02, atol=0.02)


def test_numbers_of_its_modules_are_compared_at_each_call():
    made, x = model(ByItsMixer), inputs()
    fuse(made)
    with torch.no_grad():
        assert regions(lambda: made[0](x)) == [NORM, "mul, add, rmsnorm"]
        made[0].mixer.out_features = 0
        got = made[0](x)
        assert regions(lambda: made[0](x)) == [NORM, NORM]
        unfuse(made)
        assert torch.equal(got, made[0](x))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (
            Branching,
            "residual sums: its forward is not straight: line 4 depends on what differs from call to call: scale",
        ),
        (Between, "mlp comes between a residual sum and after"),
    ],
)
def test_layers_whose_sums_are_left(layer, why):
    made, x = model(layer), inputs()
    want = made(x)
    report = fuse(made)
    assert why in {e.why for e in report.left if e.name == "0"}
    assert not any(e.why.startswith("add") for e in report.replaced)
    torch.testing.assert_close(made(x), want, rtol=0.02, atol=0.02)


def test_keywords_of_a_layer_are_passed_on():
    class Mixer(torch.nn.Module):
        def forward(self, x, scale=1.0, shift=0.0):
            return x * scale + shift

    made, x = Layer().to(HALF), inputs()
    made.mixer = Mixer()
    want = made(x, scale=None, shift=2.0)
    assert any(e.why == "add, rmsnorm, mul; with after" for e in fuse(made).entries)
    assert torch.equal(made(x, scale=None, shift=2.0), want)
    assert not torch.equal(made(x), want)
    with pytest.raises(TypeError, match="wrong"):
        made(x, wrong=1)


def test_compiled():
    made, x = model(), inputs()
    fuse(made)
    want = made(x)
    torch._dynamo.reset()
    fast = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(x), want)


def test_another_fused_norm_in_the_place_of_one():
    model, other = Layer(), Layer(lambda: torch.nn.LayerNorm(HIDDEN))
    x = torch.randn(5, HIDDEN)
    fuse(model), fuse(other)
    model.after = other.after
    with torch.no_grad():
        made = model(x)
        unfuse(model)
        torch.testing.assert_close(made, model(x))


def test_a_forward_that_something_else_set_is_left():
    made, x = model(), inputs()
    made[0].before.forward = lambda given: given * 2
    own = made[0].before.forward
    report = fuse(made)
    assert {e.why for e in report.entries if e.name == "0.before"} == {
        "its forward is set on the module already, by something else"
    }
    unfuse(made)
    assert made[0].before.forward is own
    del made[0].before.forward
    assert torch.isfinite(made(x)).all()


def test_meta():
    with torch.device("meta"):
        made = model()
    assert len(fuse(made).replaced) == 7
    assert made(inputs().to("meta")).shape == inputs().shape  # by the modules' own forwards


def test_a_model_without_norms_and_what_an_interpreter_shows():
    report = fuse(torch.nn.Linear(2, 2))
    assert repr(report) == str(report) == "Linear: nothing was found that looks like a norm"
    assert unfuse(torch.nn.Linear(2, 2)) == ()
    assert repr(fuse(model())).startswith("Sequential: 7 of 9 sites replaced\nwhere")


def test_a_weight_that_is_a_buffer():
    norm = LlamaNorm()
    del norm.weight
    norm.register_buffer("weight", torch.full((HIDDEN,), 2.0))
    norm, x = norm.to(HALF), inputs()
    want = norm(x)
    assert fuse(norm).entries[0].why == NORM
    assert torch.equal(norm(x), want)


def test_wrong_models():
    with pytest.raises(graphfuse.ModelTypeError, match="fuse: model is a list; accepted: a torch.nn.Module"):
        fuse([])
    with pytest.raises(graphfuse.ModelTypeError, match="unfuse: model is a NoneType"):
        unfuse(None)
    for call in (fuse, unfuse):
        with pytest.raises(graphfuse.ModelTypeError, match=f"^{call.__name__}: model is the class Layer; accepted: "):
            call(Layer)
    with pytest.raises(graphfuse.ModelError, match="the model is compiled; accepted: a model before torch.compile"):
        fuse(torch.compile(model(), backend="eager"))
    made = model()
    made[1].compile(backend="eager")
    with pytest.raises(graphfuse.ModelError, match="module 1 is compiled"):
        fuse(made)
    assert unfuse(made) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(graphfuse.ModelError, match="ScriptModule"):
        fuse(scripted)


def test_kernels_layers():
    kernels = pytest.importorskip("kernels")
    kernels.replace_kernel_forward_from_hub(LlamaNorm, "RMSNorm")
    try:
        made, x = model(), inputs()
        with kernels.use_kernel_mapping(graphfuse.torch.kernel_mapping("cpu"), inherit_mapping=False):
            kernels.kernelize(made, mode=kernels.Mode.TRAINING, device="cpu")
        want = model()(x)
        with torch.no_grad():
            assert regions(lambda: made(x)) == [NORM] * 4
        torch.testing.assert_close(made(x), want, rtol=0.02, atol=0.02)
    finally:
        del LlamaNorm.kernel_layer_name, LlamaNorm.kernel_condition
    with pytest.raises(graphfuse.ModelError, match="device 'mps'; accepted: 'cuda', 'cpu'"):
        graphfuse.torch.kernel_mapping("mps")
