"""A record as a run on a GPU would leave it, with invented times."""

from graphfuse.benchmarks.benches import BENCHES

SPEED = {"graphfuse": 4.0, "cudnn_oss": 0.3, "cudnn_a": 2.0, "flashinfer": 0.31, "torch_compile": 3.5}
SPEED |= {"torch_eager": 1.2, "graphfuse_dependent": 4.1, "stream": 4.2, "quack": 3.6, "liger": 3.4}
SPEED |= {"flashinfer_dependent": 4.05, "flashinfer_cuda": 3.0, "graphfuse_one_kernel": 4.1, "quack_one_launch": 3.9}
SPEED |= {"graphfuse_inference": 4.05}
LAUNCH_US = 1.5
DEPENDENT = ("graphfuse_dependent", "flashinfer_dependent", "cudnn_a")


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
    times = {"median": us, "low": 0.99 * us, "high": 1.02 * us}
    return {"us": times, "GB/s": case.moved / us / 1e3, "dependent_launch": peer in DEPENDENT}


def record(name: str = "rmsnorm-silu") -> dict:
    bench = BENCHES[name]
    return {
        "environment": environment(),
        "bench": bench.name,
        "ours": bench.ours,
        "stream": bench.stream,
        "peers": {
            p.name: {"title": p.title, "versions": dict.fromkeys(p.distributions, "1.0"), "own": p.own, "way": p.way}
            for p in bench.peers
        },
        "cases": [
            {**vars(case), "bytes": case.moved, "peers": {p.name: entry(case, p.name) for p in bench.peers}}
            for case in bench.cases
        ],
    }


def profile() -> dict:
    """A record of benchmarks.profile."""
    figures = {
        "us": 300.2,
        "ghz": 1.75,
        "occupancy": 52.1,
        "registers": 58.0,
        "instructions_per_cycle": 3.38,
        "instructions_per_element": 20.75,
        "alu_percent": 57.0,
        "fma_percent": 42.0,
        "xu_percent": 68.0,
        "lsu_percent": None,
        "dram_percent": 72.5,
        "dram_tb_per_s": 3.49,
        "held_kb_per_sm": 17.1,
        "in_flight_kb_per_sm": 6.2,
        "stalls": {"not_selected": 0.3, "long_scoreboard": 0.25, "wait": 0.2, "selected": 0.1, "barrier": 0.01},
    }
    case = {"rows": 399360, "columns": 1024, "output": "nvfp4", "bytes": 1047922688, "note": "rmsnorm[]"}
    timeless = figures | dict.fromkeys(("us", "ghz", "dram_percent", "dram_tb_per_s"))
    cases = [
        {**case, "replay": "kernel", **figures, "metrics": {}},
        {**case, "output": "bf16", "replay": "range", **timeless, "metrics": {}},
    ]
    return {"environment": environment(), "ncu": "2025.3.0.0", "cases": cases}
