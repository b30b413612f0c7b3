"""graph.bind: a callable for fixed buffers, on the reference engine and the emulator."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

import graphfuse
from graphfuse import GraphNotSupportedError, GraphStateError, GraphTypeError, VariantPackError, heur_mode
from support import graphs, toys
from support.graphs import FP4, Norm

CASE = Norm(rows=6, columns=64, eps=None)
PLACES = [
    pytest.param(("cpu", heur_mode.FALLBACK), id="reference"),
    pytest.param(("emulator", heur_mode.OPENSOURCE), id="emulator", marks=pytest.mark.emulate),
]


def built(place, case: Norm = CASE) -> graphfuse.pygraph:
    device, mode = place
    g = case.graph(device)
    g.build([mode])
    return g


def pack(case: Norm = CASE, seed: int = 0) -> dict:
    return case.inputs(seed=seed) | case.outputs()


def expected(place, case: Norm, seed: int) -> torch.Tensor:
    values = pack(case, seed)
    built(place, case).execute(values)
    return values["out"]


@pytest.mark.parametrize("place", PLACES)
def test_a_call_runs_the_graph_on_what_the_buffers_hold_now(place):
    values = pack()
    values["out"].zero_()
    run = built(place).bind(values)
    assert not values["out"].any()  # bound, not run
    for seed in (1, 2, 3):
        other = CASE.inputs(seed=seed)
        values["x"].copy_(other["x"]), values["weight"].copy_(other["weight"])
        assert run() is None
        assert torch.equal(values["out"], expected(place, CASE, seed))


@pytest.mark.parametrize("place", PLACES)
def test_buffers_live_as_long_as_the_callable(place):
    values = pack(seed=4)
    out, x = values["out"], weakref.ref(values["x"])
    run = built(place).bind(values)
    del values
    gc.collect()
    assert x() is not None
    run()
    assert torch.equal(out, expected(place, CASE, 4))
    del run
    gc.collect()
    assert x() is None


@pytest.mark.parametrize("place", PLACES)
def test_the_memory_of_bind_time_counts(place):
    """A tensor that is given other memory, or is made smaller, changes nothing."""
    values, want = pack(seed=5), expected(place, CASE, 5)
    out, seen = values["out"], values["out"].view(-1)  # keeps seeing the memory
    run = built(place).bind(values)
    values["x"].data = torch.zeros_like(values["x"])
    values["weight"].set_(torch.zeros(1, 64, dtype=torch.bfloat16))
    out.resize_(3, 64)
    values["epsilon"] = 1e9
    junk = [torch.full((6, 64), 7.0, dtype=torch.bfloat16) for _ in range(64)]  # where freed memory would be taken
    run()
    assert torch.equal(seen.view(6, 64), want) and len(junk) == 64


@pytest.mark.parametrize("place", PLACES)
def test_a_workspace_is_bound_too(place):
    case = Norm(output=FP4)
    g, values = built(place, case), pack(case)
    with pytest.raises(graphfuse.WorkspaceError, match="no workspace"):
        g.bind(values)
    space = graphs.workspace(g.get_workspace_size())
    run = g.bind(values, space)
    run()
    again = pack(case)
    built(place, case).execute(again, space)
    assert torch.equal(values["out"], again["out"])


def test_errors_are_those_of_execute():
    g = built(("cpu", heur_mode.FALLBACK))
    for change in ({"x": torch.zeros(3)}, {"x": None}, {"nobody": 1}, {"epsilon": "small"}):
        wrong = pack() | change
        with pytest.raises(VariantPackError) as bound:
            g.bind(wrong)
        with pytest.raises(VariantPackError) as executed:
            g.execute(wrong)
        assert (type(bound.value), str(bound.value)) == (type(executed.value), str(executed.value))
    with pytest.raises(VariantPackError, match="is not of graph"):
        other = {t.get_name(): t for t in CASE.graph().tensors}
        g.bind({other[name]: value for name, value in pack().items()})
    with pytest.raises(GraphStateError, match="call build"):
        CASE.graph().bind(pack())
    with pytest.raises(graphfuse.DeviceError, match="planned for cpu.*cuda:3"):
        from graphfuse.base.device import Device
        from graphfuse.runtime.handle import Handle

        g.bind(pack(), None, Handle(Device("cuda", 3)))


def test_a_destroyed_handle_is_refused_when_called():
    handle = graphfuse.create_handle("cpu")
    run = built(("cpu", heur_mode.FALLBACK)).bind(pack(), None, handle)
    run()
    graphfuse.destroy_handle(handle)
    with pytest.raises(GraphStateError, match="destroy"):
        run()


def test_a_changed_graph_leaves_it_as_it_was():
    values = pack(seed=6)
    g = built(("cpu", heur_mode.FALLBACK))
    run = g.bind(values)
    g.tensors[0].set_name("z")
    run()
    assert torch.equal(values["out"], expected(("cpu", heur_mode.FALLBACK), CASE, 6))


def test_several_parts():
    g = graphs.new()
    g.tanh(g.relu(g.tensor([100], name="x"))).set_output().set_name("out")
    g.build([heur_mode.A], patterns=toys.solo("relu"), engines=[toys.HostSolo("toy")])
    x, out = torch.randn(100), torch.empty(100)
    run = g.bind({"x": x, "out": out}, graphs.workspace(g.get_workspace_size()))
    for _ in range(2):
        x.normal_()
        run()
        torch.testing.assert_close(out, x.relu().tanh())


@pytest.mark.emulate
def test_threads_call_one_and_their_own():
    place = ("emulator", heur_mode.OPENSOURCE)
    g, shared = built(place), pack(seed=0)
    common = g.bind(shared)
    own = [pack(seed=n) for n in range(4)]
    runs = [g.bind(values) for values in own]
    want = [expected(place, CASE, n) for n in range(4)]
    failures = []

    def thread(n):
        try:
            for _ in range(20):
                own[n]["out"].zero_()
                runs[n]()
                common()
                if not (torch.equal(own[n]["out"], want[n]) and torch.equal(shared["out"], want[0])):
                    failures.append(n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# Programmatic dependent launch, where there is no GPU to overlap anything


def test_only_kernels_can_be_launched_dependently():
    g = built(("cpu", heur_mode.FALLBACK))
    wanted = "programmatic_dependent_launch needs SM90 or newer; cpu is CPU"
    g.execute(pack())
    for use in (g.execute, g.bind, g.execute_plan_at_index):
        with pytest.raises(GraphNotSupportedError, match=wanted):
            use(pack(), programmatic_dependent_launch=True)
        with pytest.raises(GraphTypeError, match="give True or False, got 1"):
            use(pack(), programmatic_dependent_launch=1)


@pytest.mark.emulate
def test_on_the_emulator_it_changes_nothing():
    place = ("emulator", heur_mode.OPENSOURCE)
    g, values = built(place), pack(seed=7)
    want = expected(place, CASE, 7)
    for use in (
        lambda: g.execute(values, programmatic_dependent_launch=True),
        lambda: g.execute(values),
        lambda: g.execute(values, programmatic_dependent_launch=True),
        g.bind(values, programmatic_dependent_launch=True),
    ):
        values["out"].zero_()
        use()
        assert torch.equal(values["out"], want)


@pytest.mark.emulate
def test_a_launch_has_to_say_that_its_kernel_waits():
    from graphfuse.engines.rows import RowEngine

    class Hasty(RowEngine):
        name = "hasty"

        def launch(self, facts, knobs):
            return dataclasses.replace(super().launch(facts, knobs), waits=False)

    g = CASE.graph("emulator")
    g.validate()
    g.build_operation_graph(engines=[Hasty()])
    g.create_execution_plans([heur_mode.OPENSOURCE])
    plans = range(g.get_execution_plan_count())
    index = next(i for i in plans if g.get_engine_and_knobs_at_index(i)[0] == "hasty")
    g.build_plan_at_index(index)
    g.execute(pack())
    with pytest.raises(GraphNotSupportedError, match="engine 'hasty': its launch does not say that"):
        g.execute(pack(), programmatic_dependent_launch=True)
