"""What follows a SwiGLU's first product, SiLU(gate) * up, written as FP8 with a float32 scale for each 128 columns.

As nodes, with the scales by columns, as tensor map descriptors of a product read them; and in one call, with a scale
for each token. Both are one kernel. Without a CUDA device the reference engine runs.
"""

import torch

import graphfuse
from graphfuse import data_type, functional, heur_mode

TOKENS, HIDDEN, GROUP = 333, 1536, 128
APART = -(-TOKENS // 4) * 4  # columns of scales begin at multiples of 16 bytes


def by_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 elements, and scales of which those of all tokens are neighbours. x: gate and up side by side."""
    graph = graphfuse.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=data_type.FLOAT)
    gate, up = (graph.tensor([TOKENS, HIDDEN], [2 * HIDDEN, 1], name=name) for name in ("gate", "up"))
    codes, scale = graph.block_scale_quantize(graph.mul(graph.swish(gate), up), block_size=GROUP)
    codes.set_output().set_name("codes")
    scale.set_output().set_name("scale").set_dim([TOKENS, HIDDEN // GROUP]).set_stride([1, APART])
    graph.build([heur_mode.OPENSOURCE, heur_mode.FALLBACK])
    print(graph.get_plan_name_at_index(0))
    out = torch.empty(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(HIDDEN // GROUP, APART, device=x.device)[:, :TOKENS].t()
    graph.execute({"gate": x[:, :HIDDEN], "up": x[:, HIDDEN:], "codes": out, "scale": scales})
    return out, scales


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(TOKENS, 2 * HIDDEN, device=device).bfloat16()
    gate, up = x.double().chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * up
    made = {"groups": by_groups(x), "tokens": functional.silu_mul_fp8(*x.chunk(2, 1))}
    for name, (codes, scale) in made.items():
        stored = codes.double().unflatten(1, (scale.shape[1], -1)) * scale.double().unsqueeze(2)
        relative = ((stored.flatten(1) - exact).norm() / exact.norm()).item()
        print(f"a scale for each of the {name}: relative error {relative:.3f}")
        if relative > 0.04:  # E4M3 keeps 3 mantissa bits
            raise SystemExit("the quantized results are too far from the exact ones")


if __name__ == "__main__":
    main()
