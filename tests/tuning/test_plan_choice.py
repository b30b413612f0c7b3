"""The fastest of an engine's plans, by times that the test gives; a plan that is tuned already is not timed."""

import pytest
import torch

from graphfuse import heur_mode
from graphfuse.base.errors import HomeNotFoundError
from graphfuse.op_graph.freeze import freeze
from graphfuse.planning.planner import Planner
from graphfuse.runtime.timing import Time
from graphfuse.tuned_tables import store
from graphfuse.tuning.plan_choice import build_fastest
from support.graphs import Norm

pytestmark = pytest.mark.emulate
CASE = Norm(12, 320)


@pytest.fixture(autouse=True)
def tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_TUNING_DIR", str(tmp_path))
    return tmp_path


def planned() -> Planner:
    planner = Planner(freeze(CASE.graph("emulator")), None, (), ["emulator", "rows", "reference"])
    planner.create([heur_mode.A])
    return planner


def test_the_fastest_is_selected_and_kept_for_other_graphs(tuning):
    planner, pack, timed = planned(), CASE.inputs() | CASE.outputs(), []

    def measure(call):
        call()  # it computes the result
        timed.append(pack["out"].clone())
        return Time(median := 10.0 if len(timed) == 2 else 20.0, median, median)

    assert build_fastest(planner, "rows", pack, measure)
    of_rows = [p for p in planner.plans if p.parts[0].engine.name == "rows"]
    assert len(timed) == len(of_rows) >= 2 and all(torch.equal(t, timed[0]) for t in timed)
    assert planner.at(planner.selected()).name == of_rows[1].name and [*tuning.glob("*.json")]
    again = planned()
    assert build_fastest(again, "rows", pack, lambda *_: pytest.fail("it is tuned already"))
    assert again.at(again.selected()).name == of_rows[1].name
    assert again.at(again.selected()).parts[0].why.startswith("tuned on this")


def test_an_engine_without_plans(tuning):
    planner = planned()
    assert not build_fastest(planner, "cudnn", CASE.inputs() | CASE.outputs(), lambda *_: pytest.fail("timed"))
    assert planner.chosen is None and not [*tuning.glob("*.json")]


def test_without_a_home_folder_nothing_is_kept(tuning, monkeypatch):
    def missing(device):
        raise HomeNotFoundError("no home")

    monkeypatch.setattr(store, "user_file", missing)
    planner = planned()
    assert build_fastest(planner, "rows", CASE.inputs() | CASE.outputs(), lambda *_: Time(1.0, 1.0, 1.0))
    assert planner.chosen is not None and not [*tuning.glob("*.json")]
