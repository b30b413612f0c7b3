"""execute after a first success: one change at a time is refused as at the first call, and nothing is written.

What execute remembers of a pack must never stand for one that differs. Each change is made after a call that
succeeded, and its error held against that of a graph which sees the changed pack first.
"""

import threading

import numpy as np
import pytest
import torch

import graphfuse
from graphfuse import GraphfuseError, VariantPackError, data_type, heur_mode
from support import graphs, toys
from support.graphs import FP4, Norm

CASE = Norm(rows=6, columns=32, eps=None, training=True)
QUICK = Norm(rows=6, columns=32, training=True)
"""No numbers in its packs, so that execute finds them in one step."""


def built(case: Norm = CASE) -> graphfuse.pygraph:
    g = case.graph()
    g.build([heur_mode.FALLBACK])
    return g


def pack(case: Norm = CASE, seed: int = 0) -> dict:
    return case.inputs(seed=seed) | case.outputs()


def forms(g) -> int:
    return len(g._planner.executable()._forms)


def memory(values: dict) -> list[bytes]:
    return [bytes(values[name].untyped_storage()) for name in ("out", "inverse_rms")]


class Other(torch.Tensor):
    """A class of its own."""


def swap(name, make):
    return lambda p: p | {name: make(p[name])}


def inside(name, change):
    """A change of the very tensor that the call before was given."""

    def apply(p):
        change(p[name])
        return p

    return apply


def set_data(make):
    def change(t):
        t.data = make(t)

    return change


def odd(t):
    memory = torch.zeros(t.numel() + 8, dtype=t.dtype)
    at = (-memory.data_ptr() // t.element_size()) % 8 + 1
    return memory[at : at + t.numel()].view(t.shape)


REFUSED = {
    "dtype": swap("x", torch.Tensor.half),
    "shape": swap("x", lambda t: t[:5]),
    "rank": swap("weight", lambda t: t.expand(2, 32).clone()),
    "stride": swap("x", lambda t: t.t().contiguous().t()),
    "device": swap("x", lambda t: t.to("meta")),
    "alignment": swap("x", odd),
    "null": swap("x", lambda t: None),
    "null address": swap("x", lambda t: 0),
    "no address": swap("x", lambda t: 2**64),
    "negative": swap("x", lambda t: -16),
    "a list": swap("x", lambda t: [1.0]),
    "a number": swap("x", lambda t: 1.5),
    "sparse": swap("x", torch.Tensor.to_sparse),
    "nested": swap("x", lambda t: torch.nested.nested_tensor([t[:2], t[2:]])),
    "mkldnn": swap("x", lambda t: t.float().to_mkldnn()),
    "negated": swap("x", torch._neg_view),
    "complex": swap("x", lambda t: t.to(torch.complex64)),
    "output is the input": lambda p: p | {"inverse_rms": p["x"].view(-1)[:12].view(torch.float32).view(6, 1)},
    "outputs overlap": lambda p: p | {"inverse_rms": p["out"].view(-1)[:12].view(torch.float32).view(6, 1)},
    "read-only": swap("inverse_rms", lambda t: read_only(t)),
    "epsilon of no type": swap("epsilon", lambda e: "small"),
    "epsilon out of range": swap("epsilon", lambda e: 1e300),
    "epsilon of two": swap("epsilon", lambda e: torch.zeros(2)),
    "missing": lambda p: {k: v for k, v in p.items() if k != "x"},
    "extra": lambda p: p | {"y": p["x"]},
    "another name": lambda p: {("y" if k == "x" else k): v for k, v in p.items()},
    "twice": lambda p: p | {1: p["x"]},
    "no key": lambda p: {(None if k == "x" else k): v for k, v in p.items()},
    "no mapping": lambda p: list(p.items()),
    "resized": inside("x", lambda t: t.resize_(5, 32)),
    "resized out": inside("out", lambda t: t.resize_(6, 33)),
    "transposed in place": inside("x", lambda t: t.t_()),
    "strided in place": inside("x", lambda t: t.as_strided_((6, 32), (16, 1))),
    "squeezed": inside("weight", lambda t: t.resize_(32, 2)),
    "set to other memory": inside("x", lambda t: t.set_(torch.zeros(3, 32, dtype=t.dtype))),
    "set to odd memory": inside("x", lambda t: t.set_(odd(t))),
    "data of another type": inside("x", set_data(torch.Tensor.half)),
    "data viewed as another type": inside("x", set_data(lambda t: t.view(torch.float16))),
    "data of another shape": inside("x", set_data(lambda t: t[:3])),
    "data over the output": lambda p: inside("weight", set_data(lambda t: p["out"][:1]))(p),
    "memory given up": inside("x", lambda t: t.untyped_storage().resize_(0)),
}


def read_only(t):
    array = t.numpy().copy()
    array.flags.writeable = False
    return array


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "change"),
    [pytest.param(CASE, change, id=name) for name, change in REFUSED.items()]
    + [pytest.param(QUICK, change, id=f"quick {name}") for name, change in REFUSED.items() if "epsilon" not in name],
)
def test_refused_as_at_the_first_call(case, change):
    g, values = built(case), pack(case)
    g.execute(values)
    g.execute(values)
    assert forms(g) == 1 and g._planner.executable().like_last(values, None, 0, False)
    values = change(values)
    kept = values if isinstance(values, dict) else dict(values)
    before = memory(kept) if not isinstance(kept["inverse_rms"], np.ndarray) else None
    with pytest.raises(GraphfuseError) as repeated:
        g.execute(values)
    with pytest.raises(GraphfuseError) as first:
        built(case).execute(values)
    assert type(repeated.value) is type(first.value) and str(repeated.value) == str(first.value)
    assert before is None or memory(kept) == before
    good = pack(case)
    g.execute(good)
    assert torch.equal(good["out"], run_alone(pack(case), case)["out"])


def run_alone(values: dict, case: Norm = CASE) -> dict:
    built(case).execute(values)
    return values


@pytest.mark.parametrize("key", [True, 1.0], ids=repr)
def test_what_only_equals_a_key_is_none(key):
    g, values = built(), pack()
    by_uid = {t.get_uid(): values[t.get_name()] for t in g.tensors if t.get_name() in values}
    g.execute(by_uid)
    wrong = {(key if uid == 1 else uid): value for uid, value in by_uid.items()}
    assert list(wrong) == list(by_uid)
    with pytest.raises(VariantPackError, match="is not a key of the variant pack"):
        g.execute(wrong)


def test_a_tensor_of_another_graph_is_no_key():
    g, other, values = built(), built(), pack()
    keys = [{t.get_name(): t for t in graph.tensors} for graph in (g, other)]
    g.execute({keys[0][name]: value for name, value in values.items()})
    with pytest.raises(VariantPackError, match="is not of graph"):
        g.execute({keys[1][name]: value for name, value in values.items()})


SAME = {
    "the same pack": lambda p, g: p,
    "a new dict": lambda p, g: dict(p),
    "other memory": lambda p, g: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in p.items()},
    "another order": lambda p, g: dict(reversed(p.items())),
    "keys that are equal": lambda p, g: {"".join(list(k)): v for k, v in p.items()},
    "tensors as keys": lambda p, g: {t: p[t.get_name()] for t in g.tensors if t.get_name() in p},
    "uids": lambda p, g: {t.get_uid(): p[t.get_name()] for t in g.tensors if t.get_name() in p},
    "addresses": lambda p, g: {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in p.items()},
    "parameters": lambda p, g: p | {"weight": torch.nn.Parameter(p["weight"])},
    "a class of its own": lambda p, g: p | {"x": p["x"].as_subclass(Other)},
    "another mapping": lambda p, g: __import__("types").MappingProxyType(p),
    "axes of one": lambda p, g: p | {"x": p["x"].view(1, 6, 32)},
    "numpy": lambda p, g: p | {"inverse_rms": p["inverse_rms"].numpy()},
    "a number as a tensor": lambda p, g: p | {"epsilon": torch.tensor(1e-5)},
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", [CASE, QUICK], ids=["", "quick"])
def test_results_are_those_of_a_first_call(make, inference, case):
    if case is QUICK and make is SAME["a number as a tensor"]:
        pytest.skip("it has none")
    g = built(case)
    with torch.inference_mode(inference):
        for seed in (1, 2, 1, 3):
            values, want = pack(case, seed), run_alone(pack(case, seed), case)
            given = make(values, g)
            g.execute(given)
            for name in ("out", "inverse_rms"):
                found = torch.as_tensor(given[name]) if name in given and not isinstance(given[name], int) else None
                assert torch.equal(values[name] if found is None else found, want[name])
    assert forms(g) <= 1


def test_numbers_are_told_apart():
    """0.0 and -0.0 are equal, and one may take an epsilon for the other's."""
    g = graphs.new()
    factor = g.tensor([1], is_pass_by_value=True, name="factor")
    g.mul(g.tensor([4], name="x"), factor).set_output().set_name("out")
    g.build([heur_mode.FALLBACK])
    x, out = torch.ones(4), torch.empty(4)
    for value in (0.0, -0.0, 2.0, 0, 3, 2.0, float("nan"), float("inf"), -0.0, True):
        g.execute({"x": x, "factor": value, "out": out})
        assert torch.equal(out.view(torch.int32), torch.full((4,), float(value)).view(torch.int32))


def test_the_workspace_is_checked_each_time():
    case = Norm(rows=64, output=FP4)
    g, values = built(case), pack(case)
    size = g.get_workspace_size()
    space = graphs.workspace(size)
    g.execute(values, space)
    for wrong in (None, graphs.workspace(size - 1), space[: size - 1], graphs.workspace(size + 16)[8:], "room", 0):
        with pytest.raises(VariantPackError) as repeated:
            g.execute(values, wrong)
        with pytest.raises(VariantPackError) as first:
            built(case).execute(values, wrong)
        assert type(repeated.value) is type(first.value) and str(repeated.value) == str(first.value)
    overlapping = graphs.workspace(size + values["out"].nbytes)
    values["out"] = overlapping[: values["out"].nbytes].view(values["out"].shape)
    g.execute(values, space)
    with pytest.raises(VariantPackError, match="the workspace overlaps"):
        g.execute(values, overlapping)


def test_a_workspace_that_is_not_needed_is_still_looked_at():
    g, values = built(), pack()
    for workspace in (None, torch.zeros(0), None, torch.zeros(3)):
        g.execute(values, workspace)
    with pytest.raises(VariantPackError, match="workspace: str is not a buffer"):
        g.execute(values, "room")


def test_a_handle_counts_at_each_call():
    g, values, handle = built(), pack(), graphfuse.create_handle("cpu")
    g.execute(values, None, handle)
    graphfuse.destroy_handle(handle)
    with pytest.raises(graphfuse.GraphStateError, match="destroy"):
        g.execute(values, None, handle)
    with pytest.raises(graphfuse.GraphTypeError, match="is not a handle"):
        g.execute(values, None, 0)
    g.execute(values)


def test_the_handle_is_the_one_that_was_planned_with():
    """graph.handle is a plain attribute; execute holds the handle it is given against the plan's."""
    g, values, handle = built(QUICK), pack(QUICK), graphfuse.create_handle("cpu")
    g.execute(values), g.execute(values)
    g.handle = handle
    graphfuse.destroy_handle(handle)
    with pytest.raises(graphfuse.GraphStateError, match="destroy"):
        g.execute(values, None, handle)
    g.execute(values)


def test_a_plan_selected_during_an_execute_is_the_next_to_run(monkeypatch):
    """What the thread that executes then remembers is of the plan before."""
    from graphfuse.runtime.executable import Executable

    ran = []

    class Noted(toys.HostSolo):
        def run(self, facts, knobs, device, buffers, stream):
            ran.append(knobs.size)

    g = graphs.new()
    g.relu(g.tensor([8], name="x")).set_output().set_name("out")
    g.build([heur_mode.A], patterns=toys.solo("relu"), engines=[Noted("noted", sizes=(1, 2))])
    accept = Executable.accept

    def overtaken(*arguments):
        accept(*arguments)
        g.build_plan_at_index(1)  # as another thread might

    values = {"x": torch.ones(8), "out": torch.empty(8)}
    for given in (values, {k: v.view(1, 8) for k, v in values.items()}):  # the last one's form is the quick one
        g.execute(given), g.execute(given)
    with monkeypatch.context() as patch:
        patch.setattr(Executable, "accept", overtaken)
        g.execute({k: v.view(8, 1) for k, v in values.items()})
    for _ in range(3):
        g.execute(values)
    assert ran == [1, 1, 1, 1, 1, 2, 2, 2]


def test_a_changed_graph_is_not_run():
    g, values = built(), pack()
    g.execute(values)
    g.tensors[0].set_name("z")
    with pytest.raises(graphfuse.GraphStateError, match="call build"):
        g.execute(values)


def test_what_is_remembered_is_bounded():
    from graphfuse.runtime import executable

    g, x = built(), [torch.randn(6, 32).bfloat16() for _ in range(20)]
    for _ in range(3):
        for value in x:
            values = pack() | {"x": value}
            g.execute(values)
            assert torch.equal(values["out"], run_alone(pack() | {"x": value})["out"])
    assert forms(g) == 1  # whatever the addresses
    for _ in range(2):  # each with an axis more
        for rank in range(12):
            g.execute({k: v[(None,) * rank] if isinstance(v, torch.Tensor) else v for k, v in pack().items()})
    assert forms(g) <= executable._FORMS_KEPT


def test_tensors_are_not_kept_alive():
    import gc
    import weakref

    g, values = built(), pack()
    g.execute(values)
    left = [weakref.ref(v) for v in values.values() if isinstance(v, torch.Tensor)]
    del values
    gc.collect()
    assert not any(reference() is not None for reference in left)


def test_threads_on_one_graph():
    """Each with packs of its own, in every form, some of them wrong; no one gets another's result."""
    g = built()
    work = [(pack(seed=seed), run_alone(pack(seed=seed))["out"]) for seed in range(8)]
    failures, barrier = [], threading.Barrier(8)
    makers = list(SAME.values())

    def thread(number: int) -> None:
        values, want = work[number]
        barrier.wait()
        try:
            for turn in range(200):
                given = makers[(number + turn // 20) % 8](values, g)
                if turn % 7 == 3:
                    with pytest.raises(VariantPackError):
                        g.execute(dict(given) | {next(iter(given)): torch.zeros(1, dtype=torch.int64)})
                values["out"].zero_()
                g.execute(given)
                found = next((v for k, v in given.items() if getattr(k, "get_name", lambda: k)() == "out"), None)
                found = found if isinstance(found, torch.Tensor) else values["out"]
                if not torch.equal(found, want):
                    failures.append(f"thread {number}, turn {turn}: wrong result")
        except BaseException as error:
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[:3]


def test_several_parts_each_run_every_time():
    g = graphs.new()
    g.tanh(g.relu(g.tensor([100], name="x"))).set_output().set_name("out")
    g.build([heur_mode.A], patterns=toys.solo("relu"), engines=[toys.HostSolo("toy")])
    for _ in range(3):
        x, out = torch.randn(100), torch.empty(100)
        space = graphs.workspace(g.get_workspace_size())
        g.execute({"x": x, "out": out}, space)
        torch.testing.assert_close(out, x.relu().tanh())


def test_types_of_bytes_go_by_either_name():
    case = Norm(output=data_type.FP8_E4M3)
    g, values = built(case), pack(case)
    for out in (values["out"], values["out"].view(torch.uint8), values["out"]):
        out.view(torch.uint8).zero_()
        g.execute(values | {"out": out})
        assert out.view(torch.uint8).any()
    with pytest.raises(VariantPackError, match="INT8"):
        g.execute(values | {"out": values["out"].view(torch.int8)})
