"""Sessions of a bench by the wall clock: what becomes of every peer."""

import json

import pytest

from graphfuse.benchmarks import session
from graphfuse.benchmarks.add_rmsnorm import AddRmsNormCase as AddCase
from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.peer import Peer, Work
from graphfuse.benchmarks.peers import graphfuse, stream, torch_eager
from graphfuse.benchmarks.rmsnorm_silu import BENCH, RmsNormSiluCase
from support.bench_runs import wall_clock


def broken(case, sets):
    raise RuntimeError("no kernel\nfor this")


PEERS = (
    graphfuse.PEER,
    Peer("missing", "Missing", broken, ("no-such-distribution",)),
    Peer("declining", "Declining", broken, why_not=lambda case, arch: f"not on SM{arch}"),
    Peer("broken", "Broken", broken),
    Peer("idle", "Idle", lambda case, sets: Work([lambda: None])),
    torch_eager.RMSNORM_SILU,
    stream.PEER,
)


def test_a_session_says_what_became_of_every_peer():
    case = RmsNormSiluCase(4, 64, "bf16")
    entry = session.measure(BENCH, case, PEERS, 90, "cpu", wall_clock())
    assert {k: v for k, v in entry.items() if k != "peers"} == {
        "rows": 4,
        "columns": 64,
        "output": "bf16",
        "bytes": case.moved,
    }
    peers = entry["peers"]
    assert list(peers) == [peer.name for peer in PEERS]
    assert peers["missing"] == {"absent": "no-such-distribution is not installed"}
    assert peers["declining"] == {"absent": "not on SM90"}
    assert peers["broken"] == {"error": "RuntimeError: no kernel"}
    assert peers["idle"]["error"].startswith("wrong out")
    for name in ("graphfuse", "torch_eager", "stream"):
        us = peers[name]["us"]
        assert 0 < us["low"] <= us["median"] <= us["high"]
        assert peers[name]["GB/s"] == pytest.approx(case.moved / us["median"] / 1e3, abs=0.1)
        assert peers[name]["of_stream"] == pytest.approx(peers["stream"]["us"]["median"] / us["median"], abs=1e-4)
    assert peers["graphfuse"]["note"]
    json.dumps(entry)


def test_in_a_session_whoever_is_not_installed_is_named():
    for name, case in (("add-rmsnorm", AddCase(3, 64, "bf16")), ("add-rmsnorm-fp8", AddCase(3, 64, "fp8_e4m3"))):
        bench = BENCHES[name]
        peers = [p for p in bench.peers if p.name not in ("graphfuse_dependent", "torch_compile")]
        entries = session.measure(bench, case, peers, 90, "cpu", wall_clock())["peers"]
        assert list(entries) == [p.name for p in peers]
        for peer in peers:
            missing = [d for d, version in peer.versions().items() if version is None]
            said = f"{', '.join(missing)} is not installed"
            assert entries[peer.name] == {"absent": said} if missing else entries[peer.name]["us"]["low"] > 0
