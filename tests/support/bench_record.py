"""A record as a run on a GPU would leave it, with invented times."""

from graphfuse.benchmarks.benches import BENCHES
from graphfuse.benchmarks.programs import (
    all_reduce_record,
    compile_cost,
    compiled_functions,
    cudnn_calls,
    host_record,
    in_a_model,
    llama,
    tensor_parallel_record,
    torch_products,
    wan_block,
)
from graphfuse.benchmarks.programs.follower_cases import CASES as FOLLOWER_CASES
from graphfuse.benchmarks.programs.model_cases import CASES
from graphfuse.benchmarks.programs.model_counts import KINDS, OTHER
from graphfuse.benchmarks.programs.model_ways import COMPILED, EAGER, OURS, OURS_COMPILED, WAYS

SPEED = {"graphfuse": 4.0, "cudnn_oss": 0.3, "cudnn_a": 2.0, "flashinfer": 0.31, "torch_compile": 3.5}
SPEED |= {"torch_eager": 1.2, "graphfuse_dependent": 4.1, "stream": 4.2, "quack": 3.6, "liger": 3.4}
SPEED |= {"flashinfer_dependent": 4.05, "flashinfer_cuda": 3.0, "graphfuse_one_kernel": 4.1, "quack_one_launch": 3.9}
SPEED |= {"graphfuse_inference": 4.05, "graphfuse_norm_add_then_norm": 3.2, "graphfuse_norm_then_add_norm": 2.7}
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
        "peers": _peers(bench),
        "cases": [
            {**vars(case), "bytes": case.moved, "peers": {p.name: entry(case, p.name) for p in bench.peers}}
            for case in bench.cases
        ],
    }


def _peers(bench) -> dict:
    return {
        p.name: {"title": p.title, "versions": dict.fromkeys(p.distributions, "1.0"), "own": p.own, "way": p.way}
        for p in bench.peers
    }


def chains() -> dict:
    """A record of programs.in_a_model: each norm takes as long as its place in the list says, products 100 us."""
    bench = in_a_model.BENCH

    def entry(place: int, peer: str) -> dict:
        us = 100.0 if peer == bench.stream else 2.0 + place / 4
        found = {"us": {"median": us, "low": 0.98 * us, "high": 1.04 * us}}
        if peer == bench.stream:
            return found
        over = {way: round((100 + own) / (100 + us), 5) for way, own in ways.items()}
        chain = 12 * (100 + us)
        return found | {"chain_us": {"median": chain, "low": chain, "high": chain}, "ours_over": over, "rounds": 30}

    ways = {p.name: 2.0 + i / 4 for i, p in enumerate(bench.peers) if p.name == bench.ours or p.own}
    return {
        "environment": environment(),
        "bench": bench.name,
        "ours": bench.ours,
        "stream": bench.stream,
        "layers": 12,
        "peers": _peers(bench),
        "cases": [
            {**vars(c), "bytes": c.moved, "peers": {p.name: entry(i, p.name) for i, p in enumerate(bench.peers)}}
            for c in bench.cases
        ],
    }


def host_cost() -> dict:
    """A record of programs.host_cost: calls of 1, 2, 3 ... times a bare launch of 4 us, Quack absent."""
    names = [
        host_record.BARE,
        host_record.EXECUTE,
        host_record.FUNCTIONAL,
        *(
            name if how is None else host_record.manner(name, how)
            for name in (host_record.MODULE, host_record.TORCH, host_record.LLAMA)
            for how in (None, host_record.KEPT, host_record.BACKWARD)
        ),
    ]
    calls = [
        {
            "name": name,
            "sets": {
                str(count): {
                    "us": {"median": 4.0 * i, "low": 3.9 * i, "high": 4.2 * i},
                    "ratio": float(i),
                    "over": {
                        host_record.FEW: 1.0,
                        **{to: i / (names.index(to) + 1) for to in host_record.COMPARED.get(name, ())},
                    },
                }
                for count in host_record.SETS
            },
        }
        for i, name in enumerate(names, 1)
    ]
    few, many = ({"median": us, "low": us, "high": us} for us in (8.0, 10.0))
    single = {"seen": {"median": 8.0, "p95": 9.0}, "new": {"median": 10.0, "p95": 11.0}, "ratio": 1.25}
    ours = (host_record.FUNCTIONAL, host_record.MODULE)
    return {
        "environment": environment(),
        "problem": {"rows": 16, "columns": 1024, "sets": list(host_record.SETS), "calls": 200},
        "versions": {"flashinfer-python": "1.0", "quack-kernels": None},
        "calls": [*calls, {"name": "Quack", "absent": "quack-kernels is not installed"}],
        "row_counts": [{"name": name, "one": few, "many": many, "ratio": 1.25} for name in ours],
        "unseen": [{"name": name, **single} for name in ours],
        "memory": [{"name": host_record.MEMORY, "calls": 100_000, "host_bytes": 4096, "device_bytes": 0}],
    }


def llama_model() -> dict:
    """A record of programs.llama."""
    times = dict(zip((llama.OURS, llama.TORCH, llama.OWN), (4.0, 5.0, 6.0), strict=True))
    cases = [
        {
            "name": f"{kind}, {size[0]} x {size[1]} tokens",
            "kind": kind,
            "ms": {name: {"median": ms, "low": 0.9 * ms, "high": 1.1 * ms} for name, ms in times.items()},
            "ours_over": {name: round(times[llama.OURS] / times[name], 5) for name in (llama.TORCH, llama.OWN)},
        }
        for kind, sizes in llama.SIZES.items()
        for size in sizes
    ]
    return {"environment": environment(), "versions": {"transformers": "5.0"}, "cases": cases}


def _spread(us: float) -> dict[str, float]:
    return {"median": us, "low": 0.9 * us, "high": 1.1 * us}


def compile_cost_model() -> dict:
    """A record of programs.compile_cost."""
    ways = compile_cost.REGION, compile_cost.FUNCTION, compile_cost.DISPATCHED_REGION, compile_cost.DISPATCHED_OPERATOR
    host = dict(zip((*ways, compile_cost.OURS, compile_cost.THEIRS), (11.0, 12.0, 17.0, 16.0, 30.0, 25.0), strict=True))
    return {
        "environment": environment(),
        "versions": {"torch": "2.11.0"},
        "compile_s": {n: {compile_cost.INDUCTOR: 1.0, compile_cost.BACKEND: 0.8} for n in compile_cost.COMPILED},
        "host_us": {name: _spread(found) for name, found in host.items()},
    }


def cudnn_calls_model() -> dict:
    """A record of programs.cudnn_calls."""
    host = {cudnn_calls.EXECUTE: 9.0, cudnn_calls.BOUND: 7.0, cudnn_calls.TORCH: 20.0, cudnn_calls.PACKAGE: 12.0}
    us = {cudnn_calls.BOUND: _spread(27.0), cudnn_calls.TORCH: _spread(28.0)}
    return {
        "environment": environment(),
        "versions": {"nvidia-cudnn-frontend": "1.32.0"},
        "host_us": {name: _spread(found) for name, found in host.items()},
        "cases": [{"name": "x".join(map(str, shape)), "us": us} for shape in cudnn_calls.SHAPES],
    }


def torch_products_model() -> dict:
    """A record of programs.torch_products."""
    ours, plain, slow = torch_products.OURS, torch_products.PLAIN, torch_products.REFERENCE
    us = {ours: _spread(27.0), plain: _spread(25.0), slow: _spread(300.0)}
    good = {"name": "matmul", "plan": "torch", "distance": 0.5, "torch": 0.5, "settings_kept": True}
    return {
        "environment": environment(),
        "versions": {"torch": "2.11.0"},
        "checks": [good, good | {"name": "sdpa", "distance": 2.0, "torch": 1.0}],
        "host_us": {"matmul": {ours: _spread(14.0), plain: _spread(12.0)}},
        "cases": [
            {"name": "matmul 8x8x8 bfloat16", "plan": "torch + rows[threads=128]", "distance": 0.9, "us": us},
            {"name": "a problem that ended early", "error": "an error"},
        ],
    }


def compiled_functions_model() -> dict:
    """A record of programs.compiled_functions."""
    us = {compiled_functions.COMPILED: _spread(30.0), compiled_functions.OURS: _spread(20.0)}
    cases = [
        {"name": "a function", "us": us, "became": ["region"], "left": []},
        {"name": "another", "us": us, "became": [], "left": ["why"]},
        {"name": "a wrong one", "us": {}, "became": [], "error": "far from eager mode"},
    ]
    return {"environment": environment(), "versions": {"torch": "2.11.0"}, "cases": cases}


def wan_block_model() -> dict:
    """A record of programs.wan_block."""
    names = (wan_block.OURS, wan_block.UNTUNED, wan_block.EAGER, wan_block.CONTIGUOUS, wan_block.COMPILED)
    us = {name: _spread(found) for name, found in zip(names, (100.0, 110.0, 150.0, 160.0, 102.0), strict=True)}
    cases = [
        {"name": "x".join(map(str, shape)), "plan": "a", "first_plan": "b", "us": us} for shape in wan_block.SHAPES
    ]
    return {"environment": environment(), "versions": {"torch": "2.11.0"}, "cases": cases}


def all_reduce() -> dict:
    """A record of programs.all_reduce."""
    names = (all_reduce_record.OURS, all_reduce_record.NORM, "NCCL")
    us = dict(zip(names, (5.0, 2.0, 9.0), strict=True))
    times = [{"rows": rows, "hidden": hidden, "us": us} for rows, hidden in all_reduce_record.LIMITS]
    replays = [{"wrong": 0, "same bits on all ranks": True, "type": "torch.bfloat16"}]
    return {"environment": environment(), "ranks": 2, "times": times, "replays": replays}


def tensor_parallel() -> dict:
    """A record of programs.tensor_parallel: ours takes 2 ms, the others 3, and one fails in the last case."""
    ways = {way.name: {"ms": _spread(2.0 if way.own else 3.0), "distance": 0.01, "first_s": 1.0} for way in WAYS}
    *names, last = map(str, tensor_parallel_record.CASES)
    cases = [{"case": name, "ways": ways} for name in names]
    cases.append({"case": last, "ways": ways | {"torch_compile": {"error": "RuntimeError: none"}}})
    return {"environment": environment(), "ranks": 2, "cases": cases}


def ranking() -> dict:
    """A record of programs.ranking."""
    us = {"rmsnorm": {"512x4096": {"rows": 4.0, "cudnn": 5.0}}, "matmul": {"512x64x64": {"cudnn": 20.0}}}
    return {"environment": environment(), "us": us}


def profile() -> dict:
    """A record of programs.profile."""
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
    case = {"rows": 399360, "columns": 1024, "output": "nvfp4", "bytes": 1047922688, "note": "rows[]"}
    timeless = figures | dict.fromkeys(("us", "ghz", "dram_percent", "dram_tb_per_s"))
    cases = [
        {**case, "replay": "kernel", **figures, "metrics": {}},
        {**case, "output": "bf16", "replay": "range", **timeless, "metrics": {}},
    ]
    return {"environment": environment(), "ncu": "2025.3.0.0", "cases": cases}


def models() -> dict:
    """A record of programs.models."""
    ways = (EAGER, COMPILED, OURS, OURS_COMPILED)
    times = dict(zip(ways, (4.0, 3.0, 2.5, 2.4), strict=True))
    ours = ways[2:]

    def measured(way: str) -> dict:
        ms = times[way]
        entry = {
            "ms": {"median": ms, "low": 0.9 * ms, "high": 1.1 * ms},
            "ours_over": {one: round(times[one] / ms, 5) for one in ours},
            "rounds": 30,
            "distance": 0.003,
            "first_s": 1.5,
            "kernels": 50,
            "our_kernels": 9 * (way in ours),
            "gpu_ms": dict(zip((*KINDS, OTHER), (0.1 * (way in ours), 0.2, 0.5, 1.0, 0.05), strict=True)),
            "peak_mb": 123.4,
        }
        return entry | ({"sites": [7, 9]} if way == OURS else {})

    return {
        "environment": environment(),
        "bench": "models",
        "ours": OURS,
        "stream": EAGER,
        "versions": {"transformers": "5.0"},
        "peers": {
            way.name: {"title": way.title, "versions": {"torch": "2.11.0"}, "own": way.own, "way": ""} for way in WAYS
        },
        "cases": [{**vars(case), "peers": {way: measured(way) for way in ways}} for case in CASES],
    }


def followers() -> dict:
    """A record of programs.followers."""
    times = {EAGER: 40.0, COMPILED: 20.0, OURS_COMPILED: 16.0}

    def measured(way: str) -> dict:
        us = times[way]
        ratio = times[OURS_COMPILED] / us
        entry = {
            "us": {"median": us, "low": 0.9 * us, "high": 1.1 * us},
            "ours_over": {OURS_COMPILED: {"median": ratio, "low": 0.98 * ratio, "high": 1.02 * ratio}},
            "rounds": 15,
            "first_s": 1.5,
            "distance": 0.003,
        }
        return entry | ({"became": ["llama_rms_norm"], "left": []} if way == OURS_COMPILED else {})

    return {
        "environment": environment(),
        "bench": "followers",
        "ours": OURS_COMPILED,
        "stream": EAGER,
        "versions": {"triton": "3.6.0"},
        "peers": {
            way.name: {"title": way.title, "versions": {}, "own": way.own, "way": ""}
            for way in WAYS
            if way.name in times
        },
        "cases": [{**vars(case), "peers": {way: measured(way) for way in times}} for case in FOLLOWER_CASES],
    }


def wan_vae_model() -> dict:
    """A record of programs.wan_vae."""
    from graphfuse.benchmarks.programs.wan_vae_cases import CASES

    return _decoded(CASES) | {"start": {"cold_s": 5.0, "kept_s": 3.0, "eager_s": 1.0}}


def every_size_model() -> dict:
    """A record of programs.every_size: rows take 20 us, and 2 more for each column that a multiple of 8 lacks."""
    from graphfuse.benchmarks.programs import every_size

    pairs = [*every_size.lengths()]
    us = {str(size): 20.0 + 2 * (even.columns - size.columns) for odd, even in pairs for size in (odd, even)}
    return {"seed": 1, "results": [{"size": size, "us": {"engine": n}} for size, n in us.items()]}


def autoencoders_model() -> dict:
    """A record of programs.autoencoders."""
    from graphfuse.benchmarks.programs.autoencoder_cases import CASES

    return _decoded(CASES)


def _decoded(of) -> dict:
    """Ours takes 100 ms, the others 250."""
    from graphfuse.benchmarks.programs import kernel_times
    from graphfuse.benchmarks.programs.wan_vae_cases import OURS

    def way(name: str) -> dict:
        ms = 100.0 if name == OURS else 250.0
        entry = {"first_s": 1.0, "error": 0.02, "peak_bytes": 2**30, "kernels": 7}
        spread = {"median": ms, "low": ms, "high": ms}
        return entry | {"ms": spread, "graph_ms": spread, "kinds": dict.fromkeys(kernel_times.ALL, 1.0)}

    cases = [{"name": str(case), "ways": {name: way(name) for name in case.ways}} for case in of]
    return {"environment": record()["environment"], "versions": {"diffusers": "0.42.1"}, "cases": cases}
