"""fuse of layers whose norms have a scale and a shift of each sample, and gates: the transformer of WAN, and a block of
DiT. What is fused computes what the classes do, in the same roundings."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse.benchmarks.programs.model_blocks import DiTBlock
from graphfuse.torch import compile_report, fuse, unfuse
from graphfuse.torch.whole_models import stretch
from graphfuse.torch.whole_models.layer_trace import side_by_side
from support import video_transformers as video

pytestmark = pytest.mark.torch

HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _nothing_kept():
    stretch._stretches.clear()


@pytest.fixture
def wan():
    pytest.importorskip("diffusers", minversion="0.35")
    return video.wan()


class Called(TorchDispatchMode):
    """Names of the operators that are called with tensors of at least so many elements."""

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() >= self.least:
            self.found.append(operator.name().partition("::")[2].partition(".")[0])
        return made


def chosen():
    """Operations of the regions that were chosen, by stretch and shapes."""
    return [[way.operations for ways in one.shaped.values() for way in ways] for one in stretch._stretches]


def run(model, **given):
    with torch.no_grad():
        return model(**given)[0]


def of_blocks(model, given):
    """The blocks of a model with what they are called with, and what they make."""
    seen = []
    hooks = [b.register_forward_hook(lambda m, a, made: seen.append((m, a, made))) for b in model.blocks]
    run(model, **given)
    for hook in hooks:
        hook.remove()
    return seen


def wider(value):
    if isinstance(value, tuple):
        return tuple(map(wider, value))
    return value.double() if isinstance(value, torch.Tensor) else value


CALLS = [(1, False), (3, False), (2, True)]
"""How many samples, and whether each token has its own time."""


@pytest.mark.parametrize("samples, each_token", CALLS)
def test_wan_computes_what_it_did(samples, each_token):
    pytest.importorskip("diffusers", minversion="0.35")
    model, given = video.wan(FULL), video.given(samples, FULL, each_token)
    seen, made = of_blocks(model, given), run(model, **given)
    fuse(model)
    for block, args, before in seen:
        with torch.no_grad():
            torch.testing.assert_close(block(*args), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(model, **given), made, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("samples, each_token", CALLS)
def test_each_block_is_as_exact_as_it_was(wan, samples, each_token):
    seen = of_blocks(wan, video.given(samples, each_token=each_token))
    fuse(wan)
    for block, args, before in seen:
        wide = copy.deepcopy(block)
        unfuse(wide)
        with torch.no_grad():
            exact, made = wide.double()(*wider(args)), block(*args)
        assert made.dtype is before.dtype
        assert (made - exact).norm() <= 1.05 * (before - exact).norm()
    # The second block's are the first's.
    assert [len(operations) for one in chosen() for operations in one] == [1, 1, 1, 2]


def test_blocks_that_are_first_called_in_inference_mode(wan):
    given = video.given()
    before = run(wan, **given)
    fuse(wan)
    with torch.inference_mode():
        made = wan(**given)[0]
    assert [len(operations) for one in chosen() for operations in one] == [1, 1, 1, 2]
    torch.testing.assert_close(made, run(wan, **given), rtol=0, atol=0)
    torch.testing.assert_close(made, before, rtol=0.02, atol=0.02)


REPORTED = [
    ("blocks.0", "region", "add, mul; with norm1, by the shapes of a call"),
    ("blocks.0", "region", "mul, add; with norm2, by the shapes of a call"),
    ("blocks.0", "region", "add, mul; with norm3, by the shapes of a call"),
    ("blocks.0", "", "the returned sum, whose norm is in another module"),
]


def test_the_report_and_the_way_back(wan):
    given = video.given()
    before, keys = run(wan, **given), [*wan.state_dict()]
    report = fuse(wan)
    assert [(e.name, e.became, e.why) for e in report.entries if e.name == "blocks.0"] == REPORTED
    assert {e.name for e in report.left} == {"blocks.0", "blocks.1"}
    assert [*wan.state_dict()] == keys
    assert torch.equal(run(copy.deepcopy(wan), **given), run(wan, **given))
    assert "blocks.0" in unfuse(wan)
    assert "forward" not in vars(wan.blocks[0])
    assert torch.equal(run(wan, **given), before)


def test_what_torch_computes_of_all_rows_is_the_last_gate(wan):
    block, args, _ = of_blocks(wan, video.given(frames=3))[0]
    fuse(wan)
    with torch.no_grad():
        block(*args)
        with Called(18 * 64) as calls:
            block(*args)
    found = Counter(calls.found)
    assert not {"native_layer_norm", "_fused_rms_norm", "pow", "mean", "rsqrt"} & {*found}
    assert (found["mul"], found["add"], found["_to_copy"]) == (1, 1, 3)


ROTATED = "rmsnorm, turn_pairs, mul, add"


def test_queries_and_keys_are_normalized_and_rotated_in_one_kernel_each(wan):
    seen = []
    attention = [block.attn1 for block in wan.blocks] + [block.attn2 for block in wan.blocks]
    hooks = [a.register_forward_hook(lambda m, a, made: seen.append((m, a, made))) for a in attention]
    run(wan, **video.given())
    for hook in hooks:
        hook.remove()
    report = fuse(wan)
    assert {f"blocks.{n}.attn1" for n in range(2)} <= {e.name for e in report.replaced}
    for module, args, before in seen:
        with torch.no_grad():
            assert torch.equal(module(*args), before)
    assert [ways for ways in chosen() if ways] == [[(ROTATED, ROTATED)]]  # those of texts have no rotation


@pytest.mark.parametrize(
    ("columns", "even", "odd"),
    [(6, (2, 3), (2, 3)), (7, (2, 4), (2, 3)), (6, (1, 3), (2, 1)), (6, (), (2, 3)), (6, None, (2, 3))],
    ids=["halves", "odd", "broadcast", "one", "number"],
)
def test_columns_are_written_as_by_index(columns, even, odd):
    like, parts = torch.randn(2, columns).bfloat16(), [2.5 if e is None else torch.randn(e) for e in (even, odd)]
    wanted = torch.empty_like(like)
    wanted[..., 0::2], wanted[..., 1::2] = parts
    assert torch.equal(side_by_side(*parts, like), wanted)


def test_another_call_of_attention_is_the_classs(wan):
    fuse(wan)
    attention, x = wan.blocks[0].attn1, torch.randn(1, 12, 64).bfloat16()
    with torch.no_grad():
        wanted = type(attention).forward(attention, x)
        assert torch.equal(attention(x), wanted)
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            attention(x, other=1)
        angles = torch.randn(1, 12, 1, 32), torch.randn(1, 12, 1, 32)
        attention(x, rotary_emb=angles)
        attention.processor = lambda *given: given[1] * 2
        assert torch.equal(attention(x, rotary_emb=angles), x * 2)


def test_a_norm_that_is_changed_afterwards_is_what_it_is(wan):
    given = video.given()
    fuse(wan)
    run(wan, **given)
    plain = copy.deepcopy(wan)
    unfuse(plain)
    for model in (wan, plain):
        model.blocks[1].norm1.eps = 0.5
    assert torch.equal(run(wan, **given), run(plain, **given))
    heard = []
    for model in (wan, plain):
        model.blocks[0].norm3.register_forward_hook(lambda m, a, made: heard.append(made) or made * 2)
    assert torch.equal(run(wan, **given), run(plain, **given))
    assert len(heard) == 2


class WithBuffers(torch.nn.Module):
    """A block with a norm whose weight is a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = BufferNorm(), torch.nn.Linear(64, 64)

    def forward(self, x, scale, shift):
        return x + self.linear(self.norm(x) * (1 + scale) + shift)


class BufferNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.rand(64))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight)


def test_a_buffer_of_another_type_than_before():
    torch.manual_seed(0)
    block = WithBuffers().bfloat16()
    given = [torch.randn(shape).bfloat16() for shape in ((2, 5, 64), (2, 1, 64), (2, 1, 64))]
    fuse(block)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            block.norm.weight = block.norm.weight.to(dtype)
            got, plain = block(*given), copy.deepcopy(block)
            unfuse(plain)
            torch.testing.assert_close(got, plain(*given), atol=0.02, rtol=0.02)


def test_gradients_are_those_of_the_class():
    torch.manual_seed(0)
    block = DiTBlock(64, 2)
    given = [torch.randn(shape, requires_grad=True) for shape in ((2, 5, 64), (2, 64))]

    def differentiated():
        made = block(*given)
        return made, *torch.autograd.grad(made.square().sum(), (*given, *block.parameters()))

    wanted = differentiated()
    fuse(block)
    torch.testing.assert_close(differentiated(), wanted, atol=1e-4, rtol=1e-4)
    assert not any(chosen())  # kernels are for inference


@pytest.mark.parametrize("dtype", [HALF, torch.float16, FULL], ids=str)
def test_a_block_of_dit(dtype):
    torch.manual_seed(0)
    block = DiTBlock(64, 2).to(dtype)
    wide = copy.deepcopy(block).double()
    fuse(block)
    for shape in ((2, 5, 64), (1, 3, 64), (2, 5, 64)):
        x, condition = torch.randn(shape, dtype=dtype), torch.randn(shape[0], 64, dtype=dtype)
        with torch.no_grad():
            made, exact = block(x, condition), wide(x.double(), condition.double())
        assert made.dtype is dtype
        assert (made - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()
    assert chosen() == [[("layernorm, add, mul",)] * 2, [("mul, add, layernorm",)] * 2]


def test_under_autocast_and_with_another_layout():
    torch.manual_seed(0)
    block = DiTBlock(64, 2)
    plain = copy.deepcopy(block)
    fuse(block)
    x, condition = torch.randn(5, 2, 64).transpose(0, 1), torch.randn(2, 64)
    with torch.no_grad():
        torch.testing.assert_close(block(x, condition), plain(x, condition))
        with torch.autocast("cpu", HALF):
            assert torch.equal(block(x, condition), plain(x, condition))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_fused_model_is_compiled_whole(wan):
    given = video.given()
    want = run(wan, **given)
    fuse(wan)
    block = torch.compile(wan, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(block, **given), want)


def test_without_tensors_without_data_operations_run_one_by_one(monkeypatch):
    torch.manual_seed(0)
    block = DiTBlock(64, 2)
    plain = copy.deepcopy(block)
    monkeypatch.setattr(stretch.torch_private, "fake_mode", lambda: None)
    fuse(block)
    x, condition = torch.randn(2, 5, 64), torch.randn(2, 64)
    with torch.no_grad():
        torch.testing.assert_close(block(x, condition), plain(x, condition))
    assert {operations for ways in chosen() for operations in ways} == {()}


@pytest.mark.usefixtures("nothing_compiled")
def test_our_backend_finds_all_of_wan(wan):
    given = video.given()
    want = run(wan, **given)
    with_us = torch.compile(wan, backend="graphfuse", fullgraph=True, options={"then": "aot_eager"})
    torch.testing.assert_close(run(with_us, **given), want, rtol=0.02, atol=0.02)
    found = {e.name: e.became for e in compile_report().graphs[-1].entries}
    norms = {name for name, m in wan.named_modules() if "norm" in type(m).__name__.lower()}
    assert found == dict.fromkeys(norms, "region")
