"""A graph that was built in this process runs in another one, to the same bits, and nothing is compiled there."""

import json
import subprocess
import sys

import pytest
import torch

from support import graphs
from support.graphs import Norm

pytestmark = pytest.mark.gpu

JOB = """
import json, sys, torch, graphfuse
from graphfuse.runtime import cache
graph = graphfuse.pygraph().deserialize(open(sys.argv[1], "rb").read())
pack = {name: tensor.cuda() for name, tensor in torch.load(sys.argv[2]).items()}
workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
graph.execute(pack, workspace)
torch.save(pack["out"].cpu(), sys.argv[3])
print(json.dumps(vars(cache.statistics())))
"""


def test_another_process_compiles_nothing(tmp_path, monkeypatch):
    case = Norm(100, 512)
    g = graphs.fused(case)
    pack = case.inputs("cuda") | case.outputs("cuda")
    data, given, made = tmp_path / "plan", tmp_path / "pack", tmp_path / "out"
    data.write_bytes(g.serialize())
    torch.save({name: tensor.cpu() for name, tensor in pack.items()}, given)
    g.execute(pack, graphs.workspace(g.get_workspace_size(), "cuda"))
    monkeypatch.setenv("GRAPHFUSE_CACHE_DIR", str(tmp_path / "empty"))
    arguments = [sys.executable, "-c", JOB, *map(str, (data, given, made))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"compiled": 0, "memory_hits": 0, "disk_hits": 0}
    assert torch.equal(torch.load(made), pack["out"].cpu())
