"""cuDNN's plans on a GPU: engines, knobs, notes, workspace.

Skipped where nvidia-cudnn-frontend or libcudnn is missing.
"""

import pytest
import torch
from torch.nn import functional as F

from graphfuse import GraphNotSupportedError, WorkspaceError, behavior_note, heur_mode
from support import graphs
from support.graphs import FLOAT
from support.on_cudnn import ENGINES, dense, hold, new, run, values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]


def test_every_plan_of_cudnns():
    case, want = dense()
    case.g.validate()
    case.g.build_operation_graph(engines=ENGINES)
    case.g.create_execution_plans([heur_mode.A, heur_mode.B])
    tried = 0
    for index in range(min(case.g.get_execution_plan_count(), 12)):
        try:
            case.g.build_plan_at_index(index)
        except GraphNotSupportedError:
            continue
        case.pack["out"].fill_(float("nan"))
        size = case.g.get_workspace_size_plan_at_index(index)
        case.g.execute_plan_at_index(case.pack, graphs.workspace(size, "cuda") if size else None, index)
        torch.cuda.synchronize()
        hold(case, want)
        tried += case.g.get_plan_name_at_index(index).startswith("cudnn")
    assert tried


def test_a_plan_is_chosen_by_engine_and_knobs():
    case, want = dense()
    run(case)
    engine, knobs = case.g.get_engine_and_knobs_at_index(case.g._planner.selected())
    assert engine == "cudnn" and set(knobs) == {"engine", "knobs"}
    again, want = dense()
    again.g.validate()
    again.g.build_operation_graph(engines=ENGINES)
    again.g.create_execution_plan(engine, knobs)
    again.g.build_plans()
    size = again.g.get_workspace_size()
    again.g.execute(again.pack, graphs.workspace(size, "cuda") if size else None)
    torch.cuda.synchronize()
    hold(again, want)
    with pytest.raises(GraphNotSupportedError, match="cuDNN proposes no such plan; it proposes"):
        again.g.create_execution_plan("cudnn", {"engine": 9999})


def test_notes_are_cudnns():
    case, _ = dense()
    run(case)
    index = case.g._planner.selected()
    assert all(isinstance(note, behavior_note) for note in case.g.get_behavior_notes_for_plan_at_index(index))
    assert any("cuDNN: sums in FLOAT" in note for note in case.g.get_numerical_notes_at_index(index))


def test_a_workspace_is_asked_for_and_kept_to():
    case = new()
    x, w = values([2, 16, 8, 8], FLOAT, last=True), values([32, 16, 3, 3], FLOAT, 1, last=True)
    y = case.g.conv_fprop(case.tensor(x, "x", FLOAT), case.tensor(w, "w", FLOAT), padding=[1, 1])
    exact = F.conv2d(x.double(), w.double(), padding=1)
    want = case.output(y, exact, dtype=FLOAT, like=values(exact.shape, FLOAT, last=True))
    case.g.build([heur_mode.A], engines=ENGINES)
    size = case.g.get_workspace_size()
    if not size:
        pytest.skip("this cuDNN's plan needs none")
    with pytest.raises(WorkspaceError):
        case.g.execute(case.pack, None)
    guarded = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    case.g.execute(case.pack, guarded[256 : 256 + size])
    torch.cuda.synchronize()
    hold(case, want, rtol=1e-5, atol=1e-4)
    assert (guarded[:256] == 0xA5).all() and (guarded[256 + size :] == 0xA5).all()
