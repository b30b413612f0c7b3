"""Graphs for a chip that is described: what they are planned for, what can be done with them, and what is refused."""

import dataclasses
import json

import pytest
import torch

import graphfuse
from graphfuse import (
    DeviceError,
    GraphNotSupportedError,
    GraphTypeError,
    GraphValidationError,
    SerializedError,
    SettingError,
    create_device_properties,
    create_handle,
    heur_mode,
)
from graphfuse.base.device import ARCHES, CPU, EMULATOR, Device, for_arch
from graphfuse.runtime import device as devices
from graphfuse.runtime.handle import Handle
from support import graphs
from support.graphs import Norm

REAL = dataclasses.replace(for_arch("sm_90a"), ordinal=1, name="NVIDIA H200", here=True)


def planned(**settings) -> graphfuse.pygraph:
    g = Norm(rows=5).graph("cuda", **settings)  # without a handle
    g.build_operation_graph()
    return g


@pytest.fixture
def current(monkeypatch):
    """Have a device be the current one."""
    return lambda device: monkeypatch.setattr(devices, "get", lambda spec=None: device)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_a_chip_by_its_number_is_planned_for_by_its_figures(sm, current):
    current(CPU)
    found = planned(sm_version=sm).device
    assert found.sm == sm and not found.here and found == for_arch(found.arch if sm != 120 else "sm_120")


def test_the_current_device_is_taken_if_it_is_such_a_chip(current):
    current(REAL)
    assert planned(sm_version=90).device is REAL
    assert planned(sm_version=100).device == for_arch("sm_100a")
    current(EMULATOR)
    assert planned(sm_version=90).device is EMULATOR


def test_the_handle_has_to_be_of_such_a_chip():
    assert graphs.new(device="emulator", sm_version=90).handle.device is EMULATOR
    for handle in (create_handle("cpu"), create_handle("emulator"), Handle(REAL)):
        g = Norm(rows=5).graph("cuda", sm_version=100)
        g.handle = handle
        with pytest.raises(DeviceError, match=rf"planned for sm_100a \(B200\), and the handle is for {handle.device} "):
            g.build_operation_graph()
    g = Norm(rows=5).graph("emulator", sm_version=100)
    with pytest.raises(DeviceError, match="accepted: no handle, or that of such a device"):
        g.build_operation_graph(engines=["emulator"])


def test_a_device_with_other_figures_does_not_take_the_place_of_properties(current):
    current(REAL)
    same = graphfuse.runtime.device_properties.DeviceProperties(dataclasses.replace(REAL, ordinal=0, here=False))
    assert planned(device_property=same).device is REAL
    half = json.loads(same.serialize()) | {"sm_count": 66}
    found = planned(device_property=create_device_properties(json.dumps(half)))
    assert (found.device.sm_count, found.device.here) == (66, False)
    assert planned(device_property=create_device_properties("sm_90a"), sm_version=90).device is REAL


@pytest.mark.parametrize("arch", ARCHES)
def test_properties_as_text(arch):
    made = create_device_properties(arch)
    assert made.device == for_arch(arch)
    again = create_device_properties(made.serialize())
    assert again.serialize() == made.serialize()
    assert dataclasses.replace(again.device, here=False) == made.device and not again.device.here


def test_properties_of_a_device_of_this_machine(current):
    current(REAL)
    made = create_device_properties(1)
    assert made.device == dataclasses.replace(REAL, ordinal=0, here=False)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda data: data.pop("sm_count"), "the device properties has no sm_count"),
        (lambda data: data.update(sm_count=0), "sm_count is 0; accepted: a number above 0"),
        (lambda data: data.update(l2_bytes="1"), "l2_bytes is '1'; accepted: an integer"),
        (lambda data: data.update(compute_capability=[9]), r"compute_capability is \[9\]; accepted: two numbers"),
        (lambda data: data.update(compute_capability=[9, 10]), r"compute_capability is \[9, 10\]"),
        (lambda data: data.update(deviceVer=900), "the device properties is 'deviceVer'; accepted: name, "),
    ],
)
def test_texts_that_are_refused(change, says):
    data = json.loads(create_device_properties("sm_90a").serialize())
    change(data)
    with pytest.raises(SerializedError, match=says):
        create_device_properties(json.dumps(data))


@pytest.mark.parametrize(
    "given, error, says",
    [
        ("sm_70", SettingError, "unknown architecture 'sm_70'; known: sm_80"),
        ("{", SerializedError, "the device properties is no JSON"),
        (None, GraphTypeError, "create_device_properties: device must be the number of a device"),
        (True, GraphTypeError, "got True"),
        (10**4, DeviceError, "10000"),
    ],
)
def test_no_device_and_no_text(given, error, says):
    with pytest.raises(error, match=says):
        create_device_properties(given)


@pytest.mark.parametrize(
    "settings, error, says",
    [
        ({"sm_version": 70}, SettingError, "graph 'g': sm_version is 70: unknown chip SM70; known: 80, 86, 89, 90"),
        ({"sm_version": 900}, SettingError, "sm_version is 900"),
        ({"sm_version": "90"}, GraphTypeError, "sm_version must be an int, as 90 for SM90, got '90'"),
        ({"sm_version": True}, GraphTypeError, "got True"),
        ({"device_property": "sm_90a"}, GraphTypeError, "must be what create_device_properties returns, got 'sm_90a'"),
        (
            {"sm_version": 90, "device_property": create_device_properties("sm_100a")},
            GraphValidationError,
            "sm_version is 90, and device_property is of SM100",
        ),
    ],
)
def test_arguments_that_are_refused(settings, error, says):
    with pytest.raises(error, match=says):
        graphfuse.pygraph("g", **settings)


@pytest.mark.compile
def test_kernels_are_compiled_ahead_and_none_is_loaded(current, monkeypatch):
    from graphfuse.runtime import launch

    monkeypatch.setattr(launch, "load", lambda *_: pytest.fail("it was loaded"))
    current(CPU)
    g, case = planned(sm_version=100), Norm(rows=5)
    g.create_execution_plans([heur_mode.OPENSOURCE])
    g.build_plans()
    assert g.get_workspace_size() == 0 and "row_program" in g.get_kernel_source_at_index(0)[0]
    says = r"is planned for sm_100a \(B200\), which is not here; serialize\(\) keeps its plans"
    pack = case.inputs() | case.outputs()
    for call in (
        lambda: g.execute(pack),
        lambda: g.execute_plan_at_index(pack),
        lambda: g.bind(pack),
        lambda: g.populate_cuda_graph(None, pack, None, 1),
    ):
        with pytest.raises(DeviceError, match=says):
            call()
    with pytest.raises(DeviceError, match=r"planned for sm_100a \(B200\), which is not here; the handle is for cpu"):
        g.execute(pack, handle=create_handle("cpu"))
    with pytest.raises(GraphNotSupportedError, match=r"planned for sm_100a \(B200\), which is not here, where nothing"):
        g.autotune(pack)
    # Another process that has such a chip loads exactly this.
    loaded = []
    monkeypatch.setattr(launch, "load", lambda cubin, entry, device: loaded.append(cubin) or FakeKernel())
    there = Handle(dataclasses.replace(for_arch("sm_100a"), here=True))
    again = graphfuse.pygraph().deserialize(there, g.serialize())
    assert again.serialize() == g.serialize() and loaded and loaded[0] in g.serialize()


class FakeKernel:
    def launcher(self, launch, dependent=False):
        return self


@pytest.mark.compile
def test_data_that_is_read_for_a_chip_that_is_not_here(current):
    current(CPU)
    g = planned(sm_version=100)
    g.create_execution_plans([heur_mode.OPENSOURCE])
    g.build_plans()
    again = graphfuse.pygraph(device_property=create_device_properties("sm_100a")).deserialize(g.serialize())
    assert again.serialize() == g.serialize() and not again.device.here
    with pytest.raises(SerializedError, match=r"made for cuda sm_100a .B200., and is to run on cuda sm_90a .H200."):
        graphfuse.pygraph(sm_version=90).deserialize(g.serialize())


def test_the_wrapper_allocates_nothing_on_a_chip_that_is_not_here(current, monkeypatch):
    current(CPU)
    monkeypatch.setattr(torch, "empty_strided", lambda *_, **__: pytest.fail("it was allocated"))
    x = torch.randn(4, 64)
    types = {"io_data_type": graphs.FLOAT, "sm_version": 100}
    with graphfuse.Graph(heuristics=[heur_mode.FALLBACK], inputs=[x], outputs=["y"], **types) as graph:
        graph.softmax(x).set_output().set_name("y")
    for arguments in ((x,), ({"y": x},)):
        with pytest.raises(DeviceError, match=r"planned for sm_100a \(B200\), which is not here; serialize"):
            graph(*arguments)
    assert graph.serialize()


def test_what_is_said_of_a_chip_that_is_not_here(current):
    current(CPU)
    g = planned(sm_version=100)
    assert "on sm_100a (B200), " in g.explain()
    g.create_execution_plans([heur_mode.A])
    g.deselect_engines(["rows", "reference"])
    with pytest.raises(
        GraphNotSupportedError, match=r"on sm_100a \(B200\), which is not here: every plan is deselected"
    ):
        g.check_support()


def test_the_reference_engine_is_planned_as_well(current):
    """It compiles nothing; its plan is kept all the same."""
    current(CPU)
    g = planned(sm_version=90)
    g.create_execution_plans([heur_mode.FALLBACK])
    g.build_plans()
    with pytest.raises(DeviceError, match="which is not here"):
        g.execute({"x": torch.zeros(1)})
    assert graphfuse.pygraph(sm_version=90).deserialize(g.serialize()).get_plan_name_at_index(0) == "reference"


def test_a_device_that_is_here_is_as_before():
    assert Device("cuda").here and CPU.here and EMULATOR.here and not for_arch("sm_90a").here
    assert Device("cuda", 1, "H200").described == "cuda:1 (H200)"
