"""Calls of any number of rows: planned once for a class of them, started with the number itself. Run by the emulator,
whose plans are a GPU's."""

import gc
import itertools
import random
import threading
import tracemalloc

import pytest
import torch

from graphfuse import VariantPackError, functional, heur_mode
from graphfuse.base.errors import KernelFaultError
from graphfuse.contract.row_counts import row_class
from graphfuse.emulator import kernel
from graphfuse.emulator.kernel import EmulatedLauncher
from graphfuse.functional import call as calls
from graphfuse.functional import problem
from graphfuse.torch import RMSNorm
from graphfuse.tuned_tables import store
from support import graphs
from support.functional_calls import NAMES, Tensors, call, check
from support.training_calls import OPERATORS
from support.training_calls import check as check_gradients
from support.training_calls import tensors as training_tensors

pytestmark = pytest.mark.emulate

COLUMNS, TRAINED = 56, 104
"""That no other test has: fast paths of operators stay in the process, and go by no device but that of tensors."""


@pytest.fixture(autouse=True)
def emulator(plan_on):
    """CPU tensors are the emulator's."""
    plan_on("emulator")


@pytest.fixture
def planned(monkeypatch):
    """What is planned from now on: for each plan, the first extent of its first tensor."""
    found, plan = [], problem.plan
    monkeypatch.setattr(problem, "plan", lambda *a: found.append(a[2][0][1].shape[0]) or plan(*a))
    return found


@pytest.fixture
def no_long_way(monkeypatch):
    """no_long_way(): from now on every call takes a fast path that is there already."""
    return lambda: monkeypatch.setattr(calls.AcceptedCall, "of", lambda *_: pytest.fail("the long way"))


def made_of(name: str, rows: int, seed: int = 0):
    """A call of so many rows, of queries and keys each with heads, in columns that blocks divide."""
    columns = 64 if "quant" in name else COLUMNS
    return call(name, (rows, 2, columns) if name == "qk_rmsnorm" else (rows, columns), tensors=Tensors(seed=seed))


def shuffled(counts, seed=0):
    counts = [*counts]
    random.Random(seed).shuffle(counts)
    return counts


@pytest.mark.some(6)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_plans(name, planned, no_long_way):
    """Any number of rows is right; one whose class is known is neither planned nor compiled."""
    counts = shuffled([*range(1, 20), 31, 32, 33, 63, 65, 100, 127, 129, 200, 255, 257, 299, 300])
    for n, rows in enumerate(counts):
        made = made_of(name, rows, n)
        check(made.run(), made.exact)
    classes = {row_class(rows) for rows in counts}
    assert sorted(planned) == sorted(classes) and len(planned) < len(counts)
    compiled = kernel.load.cache_info().misses
    no_long_way()
    for n, rows in enumerate(shuffled(r for r in range(1, 301) if row_class(r) in classes and r % 5 < 2)):
        made = made_of(name, rows, 100 + n)
        check(made.run(), made.exact)
    assert len(planned) == len(classes) and kernel.load.cache_info().misses == compiled


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name):
    whole = made_of(name, 300)
    inputs = {n: t.clone() for n, t in whole.tensors.items()}
    results = whole.run()
    rowwise = [n for n, t in results.items() if isinstance(t, torch.Tensor) and t.shape[:1] == (300,)]
    assert {*whole.returned} <= {*rowwise}
    for first, last in [(0, 1), (299, 300), (7, 8), *((0, n) for n in (2, 15, 17, 31, 64, 299)), (100, 163)]:
        part = {n: t[first:last].clone() if n in rowwise else t for n, t in inputs.items()}
        got = getattr(functional, name)(**part, **whole.options)
        got = part | dict(zip(whole.returned, got if isinstance(got, tuple) else (got,), strict=bool(whole.returned)))
        for n in rowwise:
            assert torch.equal(bits(got[n]), bits(results[n][first:last])), (n, first, last)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(name, planned):
    """Sums over the rows of any number of one class, by one plan each way."""
    counts = [1, 5, 263, 265, 288, 257, 5, 1]
    for n, rows in enumerate(counts):
        check_gradients(name, training_tensors(name, (rows, TRAINED), seed=n))
    assert sorted(planned) == sorted(2 * [1, 5, 288])


def test_several_dimensions_are_rows(planned):
    """Of one class, whatever their extents; with weights for each head, what is before the heads."""
    weight, heads = torch.randn(COLUMNS), torch.randn(3, COLUMNS)
    for shape in ((24,), (2, 12), (4, 2, 3), (1, 23), (22, 1), (1, 3, 8)):
        x = torch.randn(*shape, COLUMNS)
        torch.testing.assert_close(functional.rmsnorm(x, weight).double(), norm6(x, weight), rtol=1e-5, atol=1e-5)
    assert {*planned} == {22, 24}
    planned.clear()
    for shape in ((17, 3), (9, 2, 3), (1, 18, 3), (17, 1, 3)):
        x = torch.randn(*shape, COLUMNS)
        torch.testing.assert_close(functional.rmsnorm(x, heads).double(), norm6(x, heads), rtol=1e-5, atol=1e-5)
    assert {*planned} == {18}


def norm6(x, weight):
    """The norm in float64 with the functions' default epsilon."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


STRIDES = [(8, 128, 1), (512, 128, 1), (0, 128, 1), (1000, 128, 1), (COLUMNS, COLUMNS, 1)]


@pytest.mark.parametrize("given", ["input", "out"])
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("strides", STRIDES, ids=str)
def test_a_first_extent_of_one_says_nothing_of_its_stride(strides, of_heads, given):
    """One row, or one group of heads, then more with the same strides, which for one did not count."""
    weight, memory = torch.randn(4, COLUMNS) if of_heads else torch.randn(COLUMNS), torch.randn(10_000)
    for count in (1, 2, 1, 5, 3):
        t = memory.as_strided((count, 4, COLUMNS), strides)
        x = t if given == "input" else torch.randn(count, 4, COLUMNS)
        want = norm6(x, weight)
        if given == "input":
            got = functional.rmsnorm(x, weight)
        elif count > 1 and strides[0] < 3 * 128 + COLUMNS:  # it would be written over itself
            continue
        else:
            got = functional.rmsnorm(x, weight, out=t)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_calls_of_several_forms_in_turns(no_long_way):
    """In place, into memory of any layout, with weights of each head: calls that agree in all that the key of their
    problem has."""
    weights = torch.randn(COLUMNS), torch.randn(2, COLUMNS)
    turns = [*itertools.product(weights, ("new", "in place", "packed", "apart"))]
    for n, rows in enumerate((5, 7, 5, 6, 7)):
        if n == 3:
            no_long_way()
        for weight, form in turns:
            x = torch.randn(rows, 2, COLUMNS)
            want = norm6(x, weight)
            out = {"new": None, "in place": x, "packed": torch.empty(rows, 2, COLUMNS)}
            out |= {"apart": torch.empty(rows, 2, COLUMNS + 8)[..., :COLUMNS]}
            if n < 3 or rows != 6:  # another class
                got = functional.rmsnorm(x, weight, out=out[form])
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_heads_of_a_packed_tensor_in_place(monkeypatch):
    """Rows of queries lie in the gaps between those of keys, for any number of tokens: no overlap is looked for."""
    weight, asked = torch.randn(COLUMNS), []
    monkeypatch.setattr(calls, "_clash", lambda *given: asked.append(given))
    for tokens in shuffled(range(1, 64)):
        packed = torch.randn(tokens, 8, COLUMNS)
        q, k, rest = packed[:, :4], packed[:, 4:6], packed[:, 6:].clone()
        want = norm6(q, weight), norm6(k, weight)
        functional.qk_rmsnorm(q, k, weight, weight, 1e-6, q, k)
        for got, exact in zip((q, k), want, strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(packed[:, 6:], rest)
    assert not asked


@pytest.mark.parametrize("behind", [-4, -1, 1, 4 * COLUMNS - 1, 6 * COLUMNS + 1, 7 * COLUMNS, 8 * COLUMNS])
def test_rows_that_do_not_fit_into_each_others_gaps(behind):
    """Keys that begin so many elements behind where queries do, of 4 heads; after calls that were right."""
    weight, memory = torch.randn(COLUMNS), torch.zeros(4000)
    queries = memory[100:].as_strided((5, 4, COLUMNS), (8 * COLUMNS, COLUMNS, 1))
    for first in (4 * COLUMNS, 6 * COLUMNS):
        keys = memory[100 + first :].as_strided((5, 2, COLUMNS), (8 * COLUMNS, COLUMNS, 1))
        functional.qk_rmsnorm(queries, keys, weight, weight, 1e-6, queries, keys)
    keys = memory[100 + behind :].as_strided((5, 2, COLUMNS), (8 * COLUMNS, COLUMNS, 1))
    before = memory.clone()
    with pytest.raises(VariantPackError, match="overlaps"):
        functional.qk_rmsnorm(queries, keys, weight, weight, 1e-6, queries, keys)
    assert torch.equal(memory, before)


@pytest.fixture
def launchers(monkeypatch):
    """The launchers that are made from now on."""
    found, init = [], EmulatedLauncher.__init__
    monkeypatch.setattr(EmulatedLauncher, "__init__", lambda self, *a: found.append(self) or init(self, *a))
    return found


def test_one_block_serves_all_calls_of_a_thread(launchers):
    weight = torch.randn(COLUMNS)
    for rows in shuffled([*range(16, 33)] * 3):
        functional.rmsnorm(torch.randn(rows, COLUMNS), weight)
    used = [launcher for launcher in launchers if launcher.waiting]
    assert len(used) == len({row_class(rows) for rows in range(16, 33)})
    assert all([len(blocks) for blocks in launcher.waiting.values()] == [1] for launcher in used)


def test_an_error_of_a_start_leaves_later_calls_right(monkeypatch):
    weight, launch, fails = torch.randn(COLUMNS), EmulatedLauncher.launch, []

    def may_fail(self, *arguments):
        if fails:
            raise KernelFaultError(fails.pop())
        return launch(self, *arguments)

    monkeypatch.setattr(EmulatedLauncher, "launch", may_fail)
    for rows in (5, 5, 7, 5):
        x = torch.randn(rows, COLUMNS)
        fails.append("planted")
        with pytest.raises(KernelFaultError, match="planted"):
            functional.rmsnorm(x, weight)
        torch.testing.assert_close(functional.rmsnorm(x, weight).double(), norm6(x, weight), rtol=1e-5, atol=1e-5)


def test_classes_are_planned_anew_when_something_is_tuned(planned, monkeypatch):
    weight = torch.randn(COLUMNS)
    for generation in range(3):
        monkeypatch.setattr(store, "generation", store.generation + 1000 * generation)
        planned.clear()
        for rows in (70, 71, 72, 40, 70):
            x = torch.randn(rows, COLUMNS)
            torch.testing.assert_close(functional.rmsnorm(x, weight).double(), norm6(x, weight), rtol=1e-5, atol=1e-5)
        assert planned == [72, 40]


def test_memory_does_not_grow_with_row_counts(monkeypatch):
    """Nothing is kept of a number of rows, or of an address."""
    monkeypatch.setattr(EmulatedLauncher, "launch", lambda *_: 0)
    functional.rmsnorm.problems.clear()
    weight, counts = torch.randn(8), shuffled(range(1, 1025))

    def every() -> int:
        for rows in counts:
            functional.rmsnorm(torch.empty(rows, 8), weight)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    every()
    (fast,) = set(functional.rmsnorm.problems.values())
    assert len(fast.__globals__["starts"]) == len({row_class(rows) for rows in counts}) < 90
    tracemalloc.start()
    try:
        assert -every() + every() < 1 << 14
    finally:
        tracemalloc.stop()


def test_threads():
    """Sixteen share a function, a module and an operator with gradients, each with row counts and memory of its own."""
    weight, module, errors = torch.randn(COLUMNS), RMSNorm(COLUMNS, eps=1e-6), []
    torch.nn.init.normal_(module.weight)

    def some(seed: int) -> None:
        chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                x = torch.randn(chosen.randrange(1, 40), COLUMNS, generator=generator)
                want, by_module = norm6(x, weight), norm6(x, module.weight.detach())
                leaf = x.clone().requires_grad_()
                match chosen.randrange(4):
                    case 0:
                        got = functional.rmsnorm(x, weight)
                    case 1:
                        got = functional.rmsnorm(x, weight, out=x)
                    case 2:
                        want = by_module
                        with torch.no_grad():
                            got = module(x)
                    case 3:
                        got, want = module(leaf), by_module
                        (grad,) = torch.autograd.grad(got.sum(), leaf)
                        wide = x.double().requires_grad_()
                        (exact,) = torch.autograd.grad(norm6(wide, module.weight.detach()).sum(), wide)
                        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(got.detach().double(), want, rtol=1e-5, atol=1e-5)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=some, args=(n,)) for n in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_more_dimensions_than_a_graph_has(device, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_DEVICE", device)
    made = call("fused_add_rmsnorm", (2, 1, 1, 2, 1, 3, 1, 1, 2, COLUMNS))
    check(made.run(), made.exact)


def test_scales_in_tiles_are_as_large_as_their_rows_ask(no_long_way):
    """Values that lie in the last tiles of their scales are refused, whatever the first call's number of rows was."""
    weight, columns = torch.randn(64).bfloat16(), 64

    def run(rows: int, gap: int) -> None:
        tiles = -(-rows // 128) * 128 * 4
        memory = torch.zeros(tiles + gap + rows * columns // 2, dtype=torch.uint8)
        scales, values = memory[:tiles], memory[tiles + gap :].view(rows, columns // 2)
        x = torch.randn(rows, columns).bfloat16()
        functional.rmsnorm_fp4quant(x, weight, values, scales, is_sf_swizzled_layout=True)

    run(100, 0)
    with pytest.raises(VariantPackError, match="overlaps"):
        run(300, -512)
    run(300, 0)
    no_long_way()
    run(300, 0)


@pytest.mark.parametrize("apart", [1, 2, 4])
def test_addresses_of_any_alignment_have_fast_paths(apart, planned, no_long_way):
    """Each of its own: kernels for addresses that are less aligned are slower, for others wrong."""
    weight, memory = torch.randn(COLUMNS).bfloat16(), torch.randn(9 * COLUMNS + 8).bfloat16()

    def run(first: int) -> None:
        x = memory[first : first + 9 * COLUMNS].view(9, COLUMNS)
        want = torch.nn.functional.rms_norm(x.float(), (COLUMNS,), weight.float(), 1e-6)
        torch.testing.assert_close(functional.rmsnorm(x, weight).float(), want, rtol=1e-2, atol=1e-2)

    for first in (apart, 0):
        run(first)
    assert len(planned) == 2
    no_long_way()
    for first in (0, apart, apart, 0, apart):
        run(first)


@pytest.mark.parametrize("dim, serves", [((144, 2, 64), True), ((2, 144, 64), False)])
def test_a_plan_serves_fewer_along_the_outermost_axis_of_rows(dim, serves):
    """Strides of the others are those of the plan, which fewer rows would be read by."""
    g = graphs.new(device="emulator")
    x = g.tensor(list(dim), [(dim[1] + 1) * 72, 72, 1], name="x")
    g.swish(x).set_output().set_name("y").set_stride([dim[1] * 64, 64, 1])
    g.build([heur_mode.A])
    assert (g._planner.executable().counted(144, False) is not None) is serves
