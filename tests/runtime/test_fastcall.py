"""The text of fast paths: what each of its clauses declines, and blocks that are one call's alone."""

import ctypes
import itertools
import random
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphfuse.base.dtypes import data_type
from graphfuse.contract.arguments import Packing
from graphfuse.contract.engine import (
    Address,
    ByRows,
    Constant,
    FrozenCall,
    FrozenKernel,
    HostScalar,
    Launch,
    RowCount,
    Scratch,
)
from graphfuse.contract.row_counts import row_class
from graphfuse.op_graph.ir import FrozenTensor
from graphfuse.runtime import fastcall, torch_private
from graphfuse.runtime.fastcall import DECLINED, CallForm, FrozenPart, Given, New, writing

pytestmark = pytest.mark.torch

# Classes of row counts


def test_a_class_is_not_below_its_numbers_and_little_above():
    counts = [*range(1, 70_000), *(1 << e for e in range(17, 40)), *((1 << e) + 1 for e in range(17, 40))]
    classes = [row_class(n) for n in counts]
    for n, c in zip(counts, classes, strict=True):
        assert n <= c <= max(n, 1.125 * n) and row_class(c) == c
    assert classes[: 70_000 - 1] == sorted(classes[: 70_000 - 1])
    assert [row_class(n) for n in range(1, 17)] == [*range(1, 17)]


def test_there_are_few_classes():
    for e in range(4, 20):
        assert len({row_class(n) for n in range((1 << e) + 1, (2 << e) + 1)}) == 8


# Functions

GIVEN = (
    Given("x", True, (4,), True, 16, 16),
    Given("w", False, (4,), False, 0, 16),
    Given("out", True, (4,), True, 16, 16),
)
FORM = CallForm(
    name="toy",
    parameters=("x", "w", "eps", "out", "mode", "bias"),
    numbers=("eps",),
    options=("mode",),
    absent=("bias",),
    same=(("x", "x"), ("w", "w"), ("out", "out")),
    given=GIVEN,
    new=(New("made", True, (3,)), New("sized", False, (), sized=True)),
    leading=2,
    trailing=1,
    clashes=(("out", "x"),),
    values=("x", "w", "out", "made", "sized", "eps"),
    written=("out",),
    results=("out", "made", "sized", None),
)


class Toy:
    """A fast path of FORM, and what it started."""

    def __init__(self, form: CallForm = FORM, **names):
        self.started, self.prepared = [], []
        self.store = SimpleNamespace(generation=3)
        models = [torch.empty(2, 3, 4), torch.empty(4), torch.empty(2, 3, 4)]
        sizes, strides = [[None, None, 4], [4], [None, None, 4]], [[None, None, 1], [1], [None, None, 1]]
        self.starts = {6: (lambda *a: self.started.append(a), 0)}
        self.names = {
            "store": self.store,
            "generation": 3,
            "alike": torch_private.guard(models, sizes, strides),
            "stream": lambda: 7,
            "starts": self.starts,
            "prepare": self._prepare,
            "empty": lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
            "made_type": torch.float16,
            "sized_type": torch.uint8,
            "sized_extents": lambda count: ((count + 1,), (1,)),
            "mode_kind": bool,
            "mode_value": True,
            "clash0": lambda count, apart: True,
        }
        self.call = fastcall.function(form, self.names | names)

    def _prepare(self, count: int):
        self.prepared.append(count)
        return self.starts[row_class(count)] if row_class(count) in self.starts else None

    def arguments(self, *leading: int, **change) -> dict:
        given = {"x": torch.randn(*leading, 4), "w": torch.randn(4), "eps": 0.5, "out": torch.zeros(*leading, 4)}
        return given | {"mode": True, "bias": None} | change


def test_what_is_started_and_returned():
    toy = Toy()
    for leading in ((2, 3), (6, 1), (1, 6)):
        given = toy.arguments(*leading)
        out, made, sized, absent = toy.call(**given)
        assert out is given["out"] and absent is None and out._version == 1
        assert made.shape == (*leading, 3) and made.dtype is torch.float16 and made.is_contiguous()
        assert sized.shape == (7,) and sized.dtype is torch.uint8
        stream, space, count, *values = toy.started.pop()
        assert (stream, space, count) == (7, 0, 6)
        assert values == [t.data_ptr() for t in (given["x"], given["w"], out, made, sized)] + [0.5]
    assert not toy.prepared


def test_a_class_is_prepared_once_asked_for():
    toy = Toy()
    assert toy.call(**toy.arguments(5, 1)) is DECLINED and toy.prepared == [5]
    toy.starts[5] = toy.starts[6]
    assert toy.call(**toy.arguments(1, 5)) is not DECLINED and toy.prepared == [5]
    assert toy.started.pop()[2] == 5


def test_a_workspace_is_allocated_where_one_is_needed():
    toy = Toy()
    toy.starts[6] = (toy.starts[6][0], 512)
    toy.call(**toy.arguments(2, 3))
    assert toy.started.pop()[1] != 0


def strided(t: torch.Tensor, *stride: int) -> torch.Tensor:
    return torch.empty(1000).as_strided(t.shape, stride)


ODD = torch.empty(1001)[1:25].view(2, 3, 4)
MEMORY = torch.empty(2000)
UNLIKE = {
    "generation": lambda toy, given: setattr(toy.store, "generation", 4),
    "number's type": lambda toy, given: given.update(eps=1),
    "number's size": lambda toy, given: given.update(eps=3.5e38),
    "number's size below": lambda toy, given: given.update(eps=-3.5e38),
    "no number": lambda toy, given: given.update(eps=float("nan")),
    "option": lambda toy, given: given.update(mode=False),
    "option's type": lambda toy, given: given.update(mode=1),
    "what was absent": lambda toy, given: given.update(bias=torch.empty(4)),
    "no tensor": lambda toy, given: given.update(x=[1.0]),
    "none": lambda toy, given: given.update(w=None),
    "a name": lambda toy, given: given.update(w="w"),
    "nested": lambda toy, given: given.update(x=torch.nested.nested_tensor([torch.empty(3, 4)] * 2)),
    "another one nested": lambda toy, given: given.update(w=torch.nested.nested_tensor([torch.empty(4)])),
    "sparse": lambda toy, given: given.update(x=torch.zeros(2, 3, 4).to_sparse()),
    "meta": lambda toy, given: given.update(x=torch.empty(2, 3, 4, device="meta")),
    "type": lambda toy, given: given.update(w=torch.empty(4, dtype=torch.bfloat16)),
    "class": lambda toy, given: given.update(w=torch.nn.Buffer(torch.empty(4)).as_subclass(Subclass)),
    "rank": lambda toy, given: given.update(x=torch.empty(6, 4), out=torch.empty(6, 4)),
    "columns": lambda toy, given: given.update(x=torch.empty(2, 3, 5), out=torch.empty(2, 3, 5)),
    "weight": lambda toy, given: given.update(w=torch.empty(5)),
    "weight's stride": lambda toy, given: given.update(w=torch.empty(8)[::2]),
    "shapes that differ": lambda toy, given: given.update(out=torch.empty(3, 2, 4)),
    "rows apart": lambda toy, given: given.update(x=strided(given["x"], 30, 10, 1)),
    "rows of another apart": lambda toy, given: given.update(out=strided(given["x"], 30, 10, 1)),
    "alignment": lambda toy, given: given.update(x=ODD),
    "overlap": lambda toy, given: given.update(x=MEMORY[:24].view(2, 3, 4), out=MEMORY[16:40].view(2, 3, 4)),
    "overlap from below": lambda toy, given: given.update(out=MEMORY[:24].view(2, 3, 4), x=MEMORY[16:40].view(2, 3, 4)),
    "one tensor twice": lambda toy, given: given.update(out=given["x"]),
    "gradient": lambda toy, given: given["x"].requires_grad_(),
    "inference": lambda toy, given: given.update(x=of_inference(2, 3, 4)),
}


class Subclass(torch.Tensor):
    pass


def of_inference(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty(*shape)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("clause", UNLIKE)
def test_a_call_that_is_unlike_is_declined(clause):
    """Nothing is started, allocated or counted; the next call that is alike is run."""
    toy = Toy()
    given = toy.arguments(2, 3)
    assert toy.call(**given) is not DECLINED
    allocated = []
    unlike = Toy(empty=lambda *a: allocated.append(a))
    changed = toy.arguments(2, 3)
    UNLIKE[clause](unlike, changed)
    assert unlike.call(**changed) is DECLINED
    assert not unlike.started and not allocated
    assert getattr(changed["out"], "_version", 0) == 0 or changed["out"].is_inference()
    assert toy.call(**given) is not DECLINED


CLAUSES = {
    "generation": "store.generation != generation",
    "number's type": "type(eps) is not float",
    "option": "mode != mode_value",
    "option's type": "type(mode) is not mode_kind",
    "what was absent": "bias is not None",
    "shapes that differ": "out.shape != shape",
    "rows apart": "not x.is_contiguous()",
    "alignment": "(x_at | w_at | out_at) % 16",
    "weight": "not alike(x, w, out)",
}


@pytest.mark.parametrize("clause", CLAUSES)
def test_without_a_clause_the_call_would_run(clause, monkeypatch):
    """Each clause is in the text, and is what declines: a text that lacks it is found out by the test above."""
    text = FORM.text
    assert text.count(CLAUSES[clause]) == 1
    monkeypatch.setattr(CallForm, "text", text.replace(CLAUSES[clause], "False"))
    toy = Toy()
    given = toy.arguments(2, 3)
    UNLIKE[clause](toy, given)
    assert toy.call(**given) is not DECLINED and toy.started


def test_one_tensor_twice_is_a_form_of_its_own():
    form = replace(FORM, same=(("x", "x"), ("w", "w"), ("out", "x")), clashes=())
    models = [torch.empty(2, 3, 4), torch.empty(4)]
    alike = torch_private.guard(models, [[None, None, 4], [4]], [[None, None, 1], [1]])
    toy = Toy(form, alike=alike)
    given = toy.arguments(2, 3)
    assert toy.call(**given) is DECLINED
    given["out"] = given["x"]
    assert toy.call(**given)[0] is given["x"] and given["x"]._version == 1


@pytest.mark.parametrize(("row", "last", "other_last"), [(32, 12, 16), (32, 16, 16), (32, 17, 16), (16, 16, 16)])
def test_rows_in_each_others_gaps(row, last, other_last):
    """What the text leaves to the exact test: all that overlaps, and nothing whose rows lie beside each other."""
    made = Given("made", True, (), False, row, last)
    other = Given("other", True, (), False, row, other_last)
    for count, apart in itertools.product((1, 2, 5), range(-200, 200)):
        one = {apart + row * r + b for r in range(count) for b in range(last)}
        two = {row * r + b for r in range(count) for b in range(other_last)}
        near = f"-{made.nbytes} < {apart} < {other.nbytes}"
        looked_at = eval(near + made.beside(other, str(apart)), {"count": count})
        assert looked_at or not one & two
        if last + other_last <= row and other_last <= apart % row <= row - last:
            assert not looked_at


# Starting parts


class Launcher:
    """Stands for a kernel's: it says what a block held when it was launched, and holds others up meanwhile."""

    def __init__(self, launch: Launch, hold: float = 0.0):
        self.packing, self.function, self.waiting = Packing(launch), 11, {}
        self.cleared, self.launched, self.blocks, self.error = [], [], 0, 0
        self._launch, self._hold = launch, hold

    def grid(self, rows: int) -> int:
        return self._launch.by_rows.grid(rows)

    def new(self, stream: int) -> tuple:
        self.blocks += 1
        memory, config = ctypes.create_string_buffer(self.packing.size), SimpleNamespace(gridDimX=-1)
        return memory, config, (memory, config), 5, self.waiting.setdefault(stream, []), None

    def launch(self, place, function, table, extra) -> int:
        memory, config = place
        first = memory.raw, config.gridDimX
        time.sleep(self._hold)
        assert first == (memory.raw, config.gridDimX), "another call wrote into the block"
        self.launched.append((*self.packing.layout.unpack(memory.raw), config.gridDimX))
        return self.error

    def refused(self, error: int, block: tuple) -> None:
        raise ValueError(error)

    def clear(self, stream: int, addresses: list[int]) -> None:
        self.cleared.append((stream, addresses))


def tensor(number: int, by_value: bool = False) -> FrozenTensor:
    return FrozenTensor(number, number, f"t{number}", data_type.FLOAT, (1,), (1,), by_value=by_value)


LAUNCH = Launch(
    grid=64,
    block=128,
    arguments=(Address(1), HostScalar(2), Address(3), Scratch(64), Constant("int32", 5), RowCount(), HostScalar(4)),
    cleared=(3,),
    by_rows=ByRows(128, 2, 1, 50),
)


def started(launcher: Launcher, rows: int | None):
    bound = (tensor(1), tensor(2, by_value=True))
    return fastcall.start(bound, {3: 256}, {4: 0.25}, [FrozenPart(FrozenKernel(LAUNCH, launcher), 1024, rows)])


def test_what_a_kernel_gets():
    """Addresses and numbers of the call, places in its workspace, what is known beforehand, and the number of rows."""
    launcher = Launcher(LAUNCH)
    start = started(launcher, rows=2)
    for count in (1, 64, 33, 33, 1):
        start(9, 10_000, count, 4096 + count, 1.5)
        grid = LAUNCH.by_rows.grid(2 * count)
        want = (4096 + count, 1.5, 10_256, 10_000 + 1024 + 64, 5, 2 * count, 0.25, grid)
        assert launcher.launched.pop() == want and launcher.cleared.pop() == (9, [10_256])
    assert launcher.blocks == 1 and len(launcher.waiting[9]) == 1
    launcher = Launcher(LAUNCH)
    started(launcher, rows=None)(9, 10_000, 0, 4096, 1.5)  # for the number that it was planned for
    assert launcher.launched.pop()[5:] == (128, 0.25, -1)


def test_blocks_of_streams():
    launcher = Launcher(LAUNCH)
    start = started(launcher, rows=1)
    for stream in (1, 2, 1, 3, 2, 1):
        start(stream, 0, 5, 16, 0.0)
    assert launcher.blocks == 3 and {s: len(b) for s, b in launcher.waiting.items()} == {1: 1, 2: 1, 3: 1}


def test_a_launch_that_is_refused():
    """The error goes to the caller; the next call takes another block."""
    launcher = Launcher(LAUNCH)
    start = started(launcher, rows=1)
    start(1, 0, 5, 16, 0.0)
    launcher.error = 700
    with pytest.raises(ValueError, match="700"):
        start(1, 0, 5, 16, 0.0)
    launcher.error = 0
    start(1, 0, 6, 32, 0.0)
    assert launcher.launched[-1][0] == 32 and len(launcher.waiting[1]) == 1


def test_parts_run_in_order():
    order = []
    launcher = Launcher(LAUNCH)
    launcher.launch = lambda *_: order.append("kernel") or 0

    call = FrozenCall((Scratch(8), *LAUNCH.arguments), lambda *given: order.append(given), rows=128)
    parts = [FrozenPart(call, 512), FrozenPart(FrozenKernel(LAUNCH, launcher))]
    start = fastcall.start((tensor(1), tensor(2, by_value=True)), {3: 256}, {4: 0.25}, parts)
    launcher.refused = None
    start(9, 10_000, 0, 4096, 1.5)
    # Without a count it has the number of rows that it was prepared for.
    assert order == [(9, 10_520, 4096, 1.5, 10_256, 10_576, 5, 128, 0.25), "kernel"]


def test_calls_of_any_number_of_rows():
    """Two parts that have one and two rows for each of the count."""
    seen = []
    once = FrozenPart(FrozenCall((RowCount(), Address(1)), lambda *given: seen.append(given), rows=64), rows=1)
    twice = FrozenPart(FrozenCall((Address(1), RowCount()), lambda *given: seen.append(given), rows=128), rows=2)
    start = fastcall.start((tensor(1),), {}, {}, [once, twice])
    start(9, 0, 33, 4096)
    assert seen == [(9, 33, 4096), (9, 4096, 66)]


def test_threads_never_share_a_block():
    launcher, errors = Launcher(LAUNCH, hold=1e-6), []
    start, calls, chosen = started(launcher, rows=1), 300, random.Random(0)
    given = [[(chosen.randrange(1, 128), chosen.randrange(1 << 40)) for _ in range(calls)] for _ in range(16)]
    interval = sys.getswitchinterval()

    def some(mine: list) -> None:
        try:
            for count, address in mine:
                start(1, 0, count, address, float(count))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=some, args=(mine,)) for mine in given]
    try:
        sys.setswitchinterval(1e-6)
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    wanted = sorted((a, float(n), n, LAUNCH.by_rows.grid(n)) for mine in given for n, a in mine)
    assert sorted((a, number, n, grid) for a, number, *_, n, _, grid in launcher.launched) == wanted
    assert launcher.blocks == len(launcher.waiting[1]) <= 16


def test_texts_are_shown_in_tracebacks_and_few_are_kept():
    call = fastcall.written("toy", "call", "def call():\n    return 1 / 0  # shown\n", {})
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    assert "return 1 / 0  # shown" in "".join(traceback.format_exception(caught.value))
    kept = writing._TEXTS_KEPT
    for n in range(kept + 50):
        assert fastcall.written("toy", "call", f"def call():\n    return {n}\n", {})() == n
    import linecache

    assert len(writing._codes) <= kept
    assert sum(name.startswith("<graphfuse toy") for name in linecache.cache) <= kept
