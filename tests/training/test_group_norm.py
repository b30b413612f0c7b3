"""fuse of group norms, with SiLU where that is the next statement of a forward."""

import copy
import functools
import pickle

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import fuse, unfuse
from graphfuse.torch.analysis import set_forward
from graphfuse.torch.convolutional import group_norm
from support.group_norms import drawn, exact, norm, run_from

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    run_from(0, monkeypatch)


@pytest.fixture
def ran(monkeypatch):
    """Norms that kernels have made since."""
    calls, own = [], group_norm.applied

    def applied(*given):
        made = own(*given)
        calls.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(group_norm, "applied", applied)
    return calls


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_frames_as_images_are_read_where_they_lie(device, plan_on, monkeypatch):
    read, own = [], group_norm.row_moments
    kept = functools.wraps(own)(lambda x, *given: read.append(x) or own(x, *given))
    monkeypatch.setattr(group_norm, "row_moments", kept)
    plan_on(device)
    video, of = drawn(1, 16, 3, 8, 8, dtype=torch.bfloat16), norm(dtype=torch.bfloat16)
    x = video.transpose(1, 2).flatten(0, 1)
    assert x.data_ptr() == video.data_ptr() and not x.is_contiguous()
    made = group_norm.group_norm(x, of)
    assert made.is_contiguous() and read[0].data_ptr() == x.data_ptr()
    torch.testing.assert_close(made.double(), exact(of, x), rtol=2**-7, atol=1e-2)


def test_attributes_that_torch_refuses_are_refused_by_torch():
    def groups(of):
        of.num_groups = 5

    def weight(of):
        of.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    x = drawn(1, 16, 4, 8, last=True)
    for change in (groups, weight):
        of = norm()
        fuse(model := torch.nn.Sequential(of))
        change(of)
        errors = []
        for call in (torch.nn.GroupNorm.forward, lambda _, x, model=model: model(x)):
            with pytest.raises(RuntimeError) as found:
                call(of, x)
            errors.append(str(found.value))
        assert errors[0] == errors[1]


class Block(torch.nn.Module):
    """A residual block, with all that may stand around a norm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.act, self.conv = torch.nn.SiLU(), torch.nn.Conv2d(16, 16, 3, padding=1)
        self.usual = True

    def forward(self, x, *args, scale=1.0, **more):
        before = x
        x = self.norm1(x)
        x = self.act(x)
        for conv in [self.conv]:
            x = conv(x)
        if self.usual:
            if args:
                x = x + args[0]
            x = self.norm2(x)
        else:
            x = x * scale
        x = self.act(x)
        return {"made": x + before}


def test_statements_of_any_forward(ran):
    block = Block().requires_grad_(False)
    x, more = drawn(2, 16, 8, 8), drawn(2, 16, 8, 8, seed=2)
    calls = [
        lambda: block(x)["made"],
        lambda: block(x, more)["made"],
        lambda: block(x=x, scale=2.0)["made"],
    ]
    wanted = [call() for call in calls]
    report = fuse(block)
    assert {e.name: (e.became, e.why) for e in report.replaced if e.name == ""} == {
        "": ("group_norm", "norm1 and act; norm2 and act")
    }
    for call, value in zip(calls, wanted, strict=True):
        ran.clear()
        torch.testing.assert_close(call(), value, rtol=1e-5, atol=1e-5)
        assert len(ran) == 2
    block.usual = False
    ran.clear()
    torch.testing.assert_close(block(x, scale=2.0)["made"], type(block).forward(block, x, scale=2.0)["made"])
    assert len(ran) == 2  # of its own forward's norm, too
    block.usual = True
    unfuse(block)
    ran.clear()
    assert all(torch.equal(call(), value) for call, value in zip(calls, wanted, strict=True))
    assert not ran


class Between(Block):
    def forward(self, x):
        y = self.norm1(x)
        z = self.act(y)
        x = self.norm2(x)
        del y
        x = self.act(x) + z
        return x


def test_what_is_no_pair_is_left_to_its_modules(ran):
    block = Between().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    report = fuse(block)
    assert [e.name for e in report.replaced] == ["norm1", "norm2"]
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 2


class Nested(Block):
    def forward(self, x, of=lambda self, x: self(x)):
        made = [self.act(self.norm1(y + 1)) for y in (x, x * 2)]
        return of(self.conv, made[0] + made[1]) + self.act(self.act(self.norm2(self.norm1(x))))


def test_calls_within_calls(ran):
    block = Nested().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    (said,) = [e.why for e in fuse(block).replaced if e.name == ""]
    assert {*said.split("; ")} == {"norm1 and act", "norm2 and act"}
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 4


class OfFunctions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.rows = norm(), norm(), torch.nn.RMSNorm(8)

    def forward(self, x, silu=lambda x: x * 3):
        y = self.norm1(x)
        y = F.silu(y)
        for _ in range(2):
            y = torch.nn.functional.silu(self.rows(y))
        return y + silu(self.norm2(x)) + F.silu(self.norm2(x), inplace=True) + F.relu(self.norm2(x))


def test_functions_behind_norms(ran):
    block = OfFunctions().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    report = fuse(block)
    assert {e.why for e in report.replaced if e.name == ""} == {
        "norm1 and F.silu",
        "rmsnorm, swish; with rows and torch.nn.functional.silu",
    }
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 4


class Lazy:
    """Settings that are not there yet."""

    def __getattr__(self, name):
        raise RuntimeError(f"{name} is not loaded")


SETTINGS = Lazy()


class OfSettings(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, x):
        return SETTINGS.silu(self.norm(x))


def test_names_are_looked_up_in_modules_alone():
    report = fuse(OfSettings())
    assert [e.name for e in report.replaced] == ["norm"]


def test_a_function_that_is_exchanged_later_is_called(monkeypatch):
    block = OfFunctions().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    fuse(block)
    monkeypatch.setattr(F, "silu", lambda x, inplace=False: x * 5)
    torch.testing.assert_close(block(x), type(block).forward(block, x), rtol=1e-5, atol=1e-5)


class SimilarNames(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.a_b = torch.nn.RMSNorm(8), norm()
        self.c, self.b_c = torch.nn.SiLU(), torch.nn.SiLU()

    def forward(self, x):
        return self.c(self.a_b(x)) + 2 * self.b_c(self.a(x))


def test_pairs_of_similar_names(ran):
    block = SimilarNames().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    fuse(block)
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 1


class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = self.act = torch.nn.ReLU()


class Scopes(Block):
    def forward(self, x):
        other = Other()

        def run(self, x):
            x = self.norm1(x)
            x = self.act(x)
            return x

        return self.act(self.norm1(x)) + run(other, x) + (lambda self: self.act(self.norm1(x)))(other)


def test_functions_within_a_forward_are_left(ran):
    block = Scopes().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)
    fuse(block)
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 1


class Inherited(Block):
    def forward(self, x, shift=0.0, *, twice=False):
        x = self.norm1(x)
        x = self.act(x)
        return super().forward(x + shift)["made"] * (2 if twice else 1)


def test_a_forward_keeps_its_class_and_its_defaults():
    block = Inherited().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = [block(x), block(x, 1.0, twice=True)]
    fuse(block)
    for made, value in zip((block(x), block(x, 1.0, twice=True)), wanted, strict=True):
        torch.testing.assert_close(made, value, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"^Inherited.forward\(\) .*'thrice'"):
        block(x, thrice=True)


def test_modules_in_a_row(ran):
    model = torch.nn.Sequential(
        norm(), torch.nn.SiLU(), norm(), norm(), torch.nn.SiLU(), torch.nn.Identity(), norm()
    ).requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = model(x)
    (said,) = [e.why for e in fuse(model).replaced if e.name == ""]
    assert said == "0 and 1; 3 and 4"
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 4
    model[1].register_forward_hook(lambda module, given, made: made * 0)
    assert model(x).unique().numel() <= 16
    unfuse(model)
    assert "forward" not in vars(model)


class OfRows(torch.nn.Module):
    """Not straight, with norms of rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = torch.nn.RMSNorm(32), torch.nn.SiLU()

    def forward(self, x):
        for _ in range(2):
            x = self.norm(x)
            x = self.act(x)
        return x


def test_norms_of_rows_and_their_activation_are_one_kernel():
    model, x = OfRows(), torch.randn(3, 32)
    wanted = model(x)
    (said,) = [e.why for e in fuse(model).replaced if e.name == ""]
    assert said == "rmsnorm, swish; with norm and act"
    torch.testing.assert_close(model(x), wanted)
    model(x).sum().backward()
    assert model.norm.weight.grad is not None


class Mangled(Block):
    def forward(self, x):
        x = self.norm1(x)
        x = self.act(x)
        return self.__own(x)

    def __own(self, x):
        return x


def test_a_forward_that_is_not_written_again_is_said():
    (said,) = [e.why for e in fuse(Mangled()).left]
    assert said == "activations after its norms: its forward reads names that its class makes its own"


@pytest.mark.parametrize("has_activation", [True, False])
def test_a_source_that_is_gone_is_said_where_an_activation_is(has_activation):
    names = {"torch": torch, "norm": norm}
    exec(  # from no file
        "class Unwritten(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.norm = norm()\n"
        "    def forward(self, x):\n        return torch.tanh(self.norm(x))",
        names,
    )
    model = names["Unwritten"]()
    if has_activation:
        model.act = torch.nn.SiLU()
    assert len(fuse(model).left) == has_activation


@pytest.mark.parametrize("of", ["norm1", "act"])
def test_hooks_see_what_they_saw(of):
    block, seen = Block().requires_grad_(False), []
    fuse(block)
    block.get_submodule(of).register_forward_hook(lambda module, given, made: seen.append(made))
    block(drawn(1, 16, 8, 8))
    assert len(seen) == (1 if of == "norm1" else 2)


def test_what_is_exchanged_later_is_called(ran):
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    fuse(block)
    block.act, block.norm1 = torch.nn.ReLU(), torch.nn.Identity()
    assert torch.equal(block(x)["made"], type(block).forward(block, x)["made"])
    assert len(ran) == 2  # norm2, of each call


def test_a_class_that_is_given_another_forward_runs_it(monkeypatch):
    block = Block()
    fuse(block)
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert block(x := drawn(1, 16, 8, 8)) is x


@pytest.mark.parametrize(
    "call",
    {
        "gradients of x": lambda of, x: of(x.requires_grad_()),
        "gradients of parameters": lambda of, x: of.requires_grad_()(x),
        "autocast": lambda of, x: torch.autocast("cpu", torch.bfloat16)(of)(x),
        "other parameters": lambda of, x: of.double()(x.double()),
        "few places": lambda of, x: of(x[:, :, :1, :9]),
        "an odd number of places": lambda of, x: of(drawn(1, 16, 9, 13)),
        "gaps": lambda of, x: of(x[..., ::2]),
        "no places": lambda of, x: of(x[:, :, 0, 0]),
        "a transform": lambda of, x: torch.func.vmap(of)(x[None]),
    }.items(),
    ids=lambda call: call[0],
)
def test_other_calls_run_the_own_forward(call, ran):
    model = torch.nn.Sequential(norm())
    wanted = call[1](copy.deepcopy(model)[0], drawn(1, 16, 8, 32))
    fuse(model)
    assert torch.equal(call[1](model[0], drawn(1, 16, 8, 32)), wanted)
    assert not ran


def test_gradients_are_the_class_s_own():
    block, x = Block(), drawn(1, 16, 8, 8).requires_grad_()
    wanted = torch.autograd.grad(block(x)["made"].sum(), [x, *block.conv.parameters()])
    fuse(block)
    made = torch.autograd.grad(block(x)["made"].sum(), [x, *block.conv.parameters()])
    assert all(map(torch.equal, made, wanted))


def test_small_tensors_are_torch_s(monkeypatch, ran):
    run_from(1 << 11, monkeypatch)
    model = torch.nn.Sequential(norm())
    fuse(model)
    model(drawn(1, 16, 8, 8))
    assert not ran
    model(drawn(1, 16, 8, 16))
    assert len(ran) == 1


def test_copies_and_pickles():
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)["made"]
    fuse(block)
    stored = pickle.loads(pickle.dumps(block))
    assert not any(map(set_forward.is_set_on, stored.modules()))
    assert torch.equal(stored(x)["made"], wanted)
    torch.testing.assert_close(copy.deepcopy(block)(x)["made"], wanted, rtol=1e-5, atol=1e-5)


def test_compiled_it_is_the_compiler_s(ran):
    block = Block().requires_grad_(False)
    x = drawn(1, 16, 8, 8)
    wanted = block(x)["made"]
    fuse(block)
    made = torch.compile(block, backend="eager", fullgraph=True)(x)["made"]
    assert torch.equal(made, wanted) and not ran


def test_exported_it_is_torch_s_for_any_size(ran, monkeypatch):
    run_from(1 << 9, monkeypatch)
    model = torch.nn.Sequential(norm(), torch.nn.SiLU()).requires_grad_(False)
    fuse(model)
    sizes = {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    made = torch.export.export(model, (drawn(1, 16, 8, 8),), dynamic_shapes=({**sizes},), strict=False).module()
    x = drawn(1, 16, 2, 3)
    assert not ran
    torch.testing.assert_close(made(x), F.silu(exact(model[0], x)).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: torch.nn.GroupNorm(4, 16, affine=False), "it has no weight or no bias"),
        (
            lambda: type("Other", (torch.nn.GroupNorm,), {"forward": lambda self, x: x})(4, 16),
            "its forward is not torch's",
        ),
    ],
)
def test_other_norms_of_groups_are_left(made, why):
    assert [(e.became, e.why) for e in fuse(torch.nn.Sequential(made())).entries] == [("", why)]


def test_a_class_with_torchs_forward(ran, monkeypatch):
    run_from(0, monkeypatch)
    model = torch.nn.Sequential(type("OfOneGroup", (torch.nn.GroupNorm,), {})(1, 16)).requires_grad_(False)
    x = drawn(2, 16, 8, 8)
    want = model(x)
    assert [e.became for e in fuse(model).entries] == [group_norm.BECAME]
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
    assert ran


def test_what_a_norm_has_is_compared_in_each_call():
    x = drawn(1, 16, 8, 16, last=True)
    of, others = norm(), [norm() for _ in range(3)]
    others[0].weight = torch.nn.Parameter(torch.randn(32)[::2], requires_grad=False)
    others[1].weight = torch.nn.Parameter(torch.randn(1).expand(16), requires_grad=False)
    others[2].eps = torch.tensor(1e-3)
    for _ in range(3):
        group_norm.group_norm(x, of)
    for other in others:
        for _ in range(3):
            made = group_norm.group_norm(x, other)
            torch.testing.assert_close(made, exact(other, x).float(), rtol=1e-4, atol=1e-4)
    others[2].eps.fill_(50.0)
    made = group_norm.group_norm(x, others[2])
    torch.testing.assert_close(made, exact(others[2], x).float(), rtol=1e-4, atol=1e-4)
