"""RMSNorm + SiLU against the stream limit: an elementwise kernel over the same bytes.

python benchmarks/kernel_time.py [--record FOLDER]
"""

import argparse
import functools
from pathlib import Path

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase, record
from graphfuse.runtime import timing

ROOT = Path(__file__).resolve().parent.parent

SIZES = ((1560, 512), (24960, 1024), (99840, 512), (399360, 64), (399360, 1024))
OUTPUTS = {"bf16": (torch.bfloat16, data_type.BFLOAT16), "fp8_e4m3": (torch.float8_e4m3fn, data_type.FP8_E4M3)}


def graph_for(rows: int, columns: int, output: data_type) -> graphfuse.pygraph:
    graph = graphfuse.pygraph(intermediate_data_type=data_type.FLOAT)
    x = graph.tensor([rows, columns], data_type=data_type.BFLOAT16, name="x")
    weight = graph.tensor([1, columns], data_type=data_type.BFLOAT16, name="weight")
    y = graph.rmsnorm(x, weight, 1e-6, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    graph.swish(y).set_output().set_name("out").set_data_type(output)
    graph.build([heur_mode.OPENSOURCE])
    return graph


def case(rows: int, columns: int, name: str) -> dict[str, object]:
    dtype, output = OUTPUTS[name]
    graph = graph_for(rows, columns, output)
    moved = rows * columns * (2 + dtype.itemsize)
    sets = timing.buffer_sets(moved)
    weight = (torch.rand(1, columns, device="cuda") + 0.5).to(torch.bfloat16)
    xs = [torch.randn(rows, columns, device="cuda").to(torch.bfloat16) for _ in range(sets)]
    outs = [torch.empty(rows, columns, dtype=dtype, device="cuda") for _ in range(sets)]
    calls = [
        functools.partial(graph.execute, {"x": x, "weight": weight, "out": out})
        for x, out in zip(xs, outs, strict=True)
    ]
    ours = timing.measure(calls)
    # Same bytes, half read and half written, four at a time.
    sources = [torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    words = [source.view(torch.int32) for source in sources]
    stream = timing.measure([functools.partial(torch.neg, word, out=torch.empty_like(word)) for word in words])
    return {
        "rows": rows,
        "columns": columns,
        "output": name,
        "plan": graph.get_plan_name_at_index(0),
        "us": vars(ours),
        "stream_us": vars(stream),
        "times_stream": ours.median / stream.median,
        "GB/s": moved / ours.median / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write kernel-time-DEVICE.json into FOLDER")
    arguments = parser.parse_args()
    results = []
    print(f"{'output':9} {'rows':>7} {'columns':>7} {'us':>9} {'stream us':>9} {'x stream':>8} {'GB/s':>6}")
    for name in OUTPUTS:
        for rows, columns in SIZES:
            r = case(rows, columns, name)
            results.append(r)
            print(
                f"{name:9} {rows:7} {columns:7} {r['us']['median']:9.2f} {r['stream_us']['median']:9.2f} "
                f"{r['times_stream']:8.3f} {r['GB/s']:6.0f}  {r['plan']}"
            )
    if arguments.record:
        print(record.write(arguments.record, "kernel-time", record.environment(ROOT), {"results": results}))


if __name__ == "__main__":
    main()
