"""In-place operations of a graph as out-of-place ones: where they become so, and that all values stay what they are."""

import contextlib
import operator

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report
from graphfuse.torch.analysis.meaning import writes
from graphfuse.torch.analysis.out_of_place import write_out_of_place
from graphfuse.torch.analysis.recording import graph_of

pytestmark = pytest.mark.torch
ROWS, COLUMNS = 3, 8


def given() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)


def rewritten(function, tensors, grad=False):
    """The function of Dynamo's graph after the pass, and the names of what still works in place."""
    names: list[str] = []

    def backend(module, _):
        for _ in range(2):  # as the backend has several passes
            write_out_of_place(module.graph)
        module.graph.lint()
        module.recompile()
        names.extend(
            str(n.target) if n.op == "call_method" else n.target.__name__ for n in module.graph.nodes if writes(n)
        )
        return module.forward

    torch._dynamo.reset()
    with contextlib.nullcontext() if grad else torch.no_grad():
        made = torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    return made, names


def checked(function) -> list[str]:
    """What still works in place, after results and inputs are compared."""
    mine, theirs = given(), given()
    with torch.no_grad():
        wanted = function(*theirs)
    made, names = rewritten(function, mine)
    torch.testing.assert_close([made, *mine], [wanted, *theirs], rtol=0, atol=0)
    assert torch.utils._pytree.tree_map(torch.Tensor.stride, made) == torch.utils._pytree.tree_map(
        torch.Tensor.stride, wanted
    )
    return names


def chain(x, y, w):
    z = x + y
    z.mul_(2).sub_(y)
    z += w
    z -= z.mean(-1, keepdim=True)
    return z.exp_()


def by_modules(x, y, w):
    z = torch.nn.SiLU(inplace=True)(x * w)
    return F.relu(F.hardswish(z + y, inplace=True), True)


def by_function(x, y, w):
    return torch.relu_(x * 2), torch.exp_(y * w)


def of_narrow_type(x, y, w):
    z = x.bfloat16()
    z += y
    z.div_(3)
    return z


def of_bools(x, y, w):
    mask = x > 0
    mask |= y > 0
    mask.logical_not_()
    z = x * 1
    return z.masked_fill_(mask, float("-inf")).softmax(-1)


def compared(x, y, w):
    return (x * 1).gt_(y)


def copied(x, y, w):
    made = torch.empty_like(x)
    made.copy_(x * w)
    half = torch.empty(ROWS, COLUMNS, dtype=torch.float16)
    half.copy_(y)
    return made.add_(1), half.neg_()


def of_a_view(x, y, w):
    """Nothing reads the tensor that it is a view of."""
    z = (x + y).view(-1, 4)
    z *= 2
    return z


def views_behind(x, y, w):
    z = x + y
    z.mul_(2)
    first = z[0]
    return first * 3, z.view(-1)


def views_before(x, y, w):
    """Their last reader runs before the write."""
    z = x + y
    first = z[0] * 2
    z.mul_(w)
    return first, z


def not_pointwise(x, y, w):
    z = x * 2
    z.cumsum_(-1).triu_()
    return z.index_add_(0, torch.tensor([0, 2]), y[:2])


def read_by_itself(x, y, w):
    z = x + y
    return z.mul_(z.view(ROWS, COLUMNS))


@pytest.mark.parametrize(
    "function",
    [
        chain,
        by_modules,
        by_function,
        of_narrow_type,
        of_bools,
        compared,
        copied,
        of_a_view,
        views_behind,
        views_before,
        not_pointwise,
        read_by_itself,
    ],
    ids=lambda f: f.__name__,
)
def test_they_become_out_of_place(function):
    assert checked(function) == []


def of_an_input(x, y, w):
    x += y
    return x * w


def of_a_view_of_an_input(x, y, w):
    x[0].mul_(2)
    return x + y


def of_what_may_be_an_input(x, y, w):
    z = x.float()
    z += y
    return z


def read_through_a_view(x, y, w):
    z = x + y
    row = z[0]
    z.mul_(2)
    return row + w


def read_through_what_it_is_a_view_of(x, y, w):
    z = x + y
    z[0].mul_(2)
    return z


def of_a_view_behind_a_write(x, y, w):
    """The first write becomes out of place; the second is of a part of what it makes."""
    z = x * 3
    z.mul_(y)
    z[0].mul_(2)
    return z


def read_through_a_view_behind_a_write(x, y, w):
    z = x * 3
    z += y
    row = z[0]
    z *= 2
    return row, z


def of_dropout_that_drops_nothing(x, y, w):
    z = F.dropout(x, 0.1, False)
    z += y
    return z


def returned_through_a_view(x, y, w):
    z = x + y
    row = z[1:]
    row.neg_()
    return z, row


def parts(x, y, w):
    first, second = (x + y).chunk(2, -1)
    first += second
    second *= first
    return first, second


def written_in_part(x, y, w):
    z = x + y
    z[:, 0] = 0
    return z


def filled(x, y, w):
    z = x + y
    z.zero_()
    return z


def into_out(x, y, w):
    z = torch.empty_like(x)
    torch.add(x, y, out=z)
    return z


def transposed(x, y, w):
    z = x + y
    z.t_()
    return z


def repeated_copy(x, y, w):
    z = torch.empty_like(x)
    z.copy_(w)
    return z


def of_other_strides(x, y, w):
    z = torch.empty_strided((ROWS, COLUMNS), (16, 2))
    z.copy_(x)
    return z.mul_(2)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (of_an_input, ["iadd"]),
        (of_a_view_of_an_input, ["mul_"]),
        (of_what_may_be_an_input, ["iadd"]),
        (read_through_a_view, ["mul_"]),
        (read_through_what_it_is_a_view_of, ["mul_"]),
        (returned_through_a_view, ["neg_"]),
        (of_a_view_behind_a_write, ["mul_"]),
        (read_through_a_view_behind_a_write, ["imul"]),
        (of_dropout_that_drops_nothing, ["iadd"]),
        (parts, ["iadd", "imul"]),
        (written_in_part, ["setitem"]),
        (filled, ["zero_"]),
        (into_out, ["add"]),
        (transposed, ["t_"]),
        (repeated_copy, ["copy_"]),
        (of_other_strides, ["copy_", "mul_"]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_others_stay(function, names):
    assert checked(function) == names


def test_random_ones_stay():
    def function(x, y, w):
        z = x + y
        return z.bernoulli_()

    _, names = rewritten(function, given())
    assert names == ["bernoulli_"]


def test_modes_that_change_in_between_keep_them():
    def function(x, y, w):
        z = x * w
        with torch.no_grad():
            z.mul_(2)
        return z

    x, y, w = given()
    x.requires_grad_()
    made, names = rewritten(function, (x, y, w), grad=True)
    assert names == ["mul_"]
    (gradient,) = torch.autograd.grad(made.sum(), x)
    torch.testing.assert_close(gradient, w.expand_as(x))


def test_gradients():
    results = []
    for compiled in (False, True):
        x, y, w = (t.requires_grad_() for t in given())
        made = rewritten(chain, (x, y, w), grad=True)[0] if compiled else chain(x, y, w)
        results.append(torch.autograd.grad(made.sum(), (x, y, w)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["ne_", "copy_"])
def test_what_is_overwritten_has_a_gradient_of_zeros(name):
    def function(x, y, w):
        z = x * w
        getattr(z, name)(y)
        return z

    x, y, w = given()
    x.requires_grad_()
    made, names = rewritten(function, (x, y, w), grad=True)
    assert names == [name]
    (gradient,) = torch.autograd.grad(made.sum(), x)
    assert not gradient.any()


@pytest.mark.parametrize("has_gradient", [False, True])
def test_data_that_backward_reads_is_written(has_gradient):
    def function(x, y, w):
        z = x * w
        made = z * y
        z.data.mul_(3)
        return made

    x, y, w = given()
    y.requires_grad_()
    x.requires_grad_(has_gradient)
    made, names = rewritten(function, (x, y, w), grad=True)
    assert names == ["mul_"]
    (gradient,) = torch.autograd.grad(made.sum(), y)
    torch.testing.assert_close(gradient, (x * w * 3).detach())


@pytest.mark.parametrize("is_within", [False, True])
def test_under_autocast_they_keep_the_type_of_what_they_write(is_within):
    def product(x, y):
        z = x * 2
        with torch.autocast("cpu", torch.bfloat16) if is_within else contextlib.nullcontext():
            z = z + 1
            z.addmm_(y, x)
            z.mul_(2)
        return z

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with contextlib.nullcontext() if is_within else torch.autocast("cpu", torch.bfloat16):
        made, names = rewritten(product, (x, y))
        wanted = product(x, y)
    assert names == ["addmm_"] and made.dtype is torch.float32
    torch.testing.assert_close(made, wanted, rtol=0, atol=0)


def test_transforms_keep_them():
    def function(x, y, w):
        return torch.func.vmap(lambda row: (row * w).mul_(2))(x) + y

    assert checked(function) == ["mul_"]


class Tagged(torch.Tensor):
    """A tensor that has another within, as DTensor does: its storage is no tensor's memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Tagged(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def inner(t):
            return t.inner if isinstance(t, Tagged) else t

        args, kwargs = torch.utils._pytree.tree_map(inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Tagged, function(*args, **kwargs))


def test_beside_tensors_with_others_within_they_stay():
    def function(x, y, tagged):
        z = x + y
        z.mul_(2)
        return z, tagged + 1

    x, y, w = given()
    (made, _), names = rewritten(function, (x, y, Tagged(w)))
    torch.testing.assert_close(made, (x + y) * 2)
    assert names == ["mul_"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x, y: ((x + y).mul_(2),), 0),
        (lambda x, y: (torch.add(x, y).copy_(y),), 0),
        (lambda x, y: (lambda z: (z[0].mul_(2), z)[1:])(x + y), 1),
        (lambda x, y: (x.mul_(2),), 1),
    ],
)
def test_recorded_calls_of_aten(function, left):
    x, y, _ = given()
    graph = graph_of(function, (x.clone(), y))
    write_out_of_place(graph)
    assert sum(map(writes, graph.nodes)) == left
    (wanted,) = function(x.clone(), y)
    (made,) = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(x.clone(), y)
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("training", [False, True])
def test_a_program_of_them_is_one_region(training):
    def function(x, y, w):
        z = x + y
        z *= 0.5
        z = F.rms_norm(z, (COLUMNS,), w, 1e-6)
        z.mul_(2)
        return F.silu(z, inplace=True)

    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        call = torch.compile(function, backend="graphfuse", options={"then": "aot_eager"}) if compiled else function
        tensors = [t.requires_grad_(training) for t in given()]
        made = call(*tensors)
        results.append((made, *(torch.autograd.grad(made.sum(), tensors) if training else ())))
    torch.testing.assert_close(*results)
    (entry,) = compile_report().replaced
    assert entry.why == "add, mul, rmsnorm, swish"


def test_operators_of_python_have_their_forms():
    from graphfuse.torch.analysis.meaning import IN_PLACE

    assert IN_PLACE[operator.iadd] is operator.add and IN_PLACE[operator.iand] is operator.and_
    for form, plain in IN_PLACE.items():
        assert form(7, 3) == plain(7, 3)
