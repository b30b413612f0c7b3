"""A record as a run on a GPU would leave it, with invented times."""

from graphfuse.benchmarks.benches import BENCHES

SPEED = {"graphfuse": 4.0, "cudnn_oss": 0.3, "cudnn_a": 2.0, "flashinfer": 0.31, "torch_compile": 3.5}
SPEED |= {"torch_eager": 1.2, "graphfuse_dependent": 4.1, "stream": 4.2}
LAUNCH_US = 1.5


def environment() -> dict:
    return {
        "device": "NVIDIA H200",
        "driver": "1.2",
        "cuda": "13.0",
        "nvrtc": "13.0",
        "versions": {"torch": "2.11.0"},
        "commit": "0123456789abcdef",
        "date": "2026-01-02",
    }


def entry(case, peer: str) -> dict:
    if case.output == "nvfp4" and peer not in ("graphfuse", "graphfuse_dependent", "stream"):
        return {"absent": "no NVFP4"}
    us = LAUNCH_US + case.moved / SPEED[peer] / 1e6
    return {"us": {"median": us, "low": 0.99 * us, "high": 1.02 * us}, "GB/s": case.moved / us / 1e3}


def record(name: str = "rmsnorm-silu") -> dict:
    bench = BENCHES[name]
    return {
        "environment": environment(),
        "bench": bench.name,
        "ours": bench.ours,
        "stream": bench.stream,
        "peers": {
            p.name: {"title": p.title, "versions": dict.fromkeys(p.distributions, "1.0"), "own": p.own}
            for p in bench.peers
        },
        "cases": [
            {**vars(case), "bytes": case.moved, "peers": {p.name: entry(case, p.name) for p in bench.peers}}
            for case in bench.cases
        ],
    }
