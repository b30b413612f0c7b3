"""RMSNorm + SiLU written as FP8 E4M3 with a static scale, and as NVFP4 with its block scales."""

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase

MODES = [heur_mode.OPENSOURCE, heur_mode.FALLBACK]
ROWS, COLUMNS, EPS = 1024, 512, 1e-6
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def start():
    """A graph with x and weight, and the tensor that holds SiLU(RMSNorm(x))."""
    graph = graphfuse.pygraph(intermediate_data_type=data_type.FLOAT)
    x = graph.tensor([ROWS, COLUMNS], data_type=data_type.BFLOAT16, name="x")
    weight = graph.tensor([1, COLUMNS], data_type=data_type.BFLOAT16, name="weight")
    y = graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    return graph, graph.swish(y)


def fp8(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """E4M3 of scale * value, saturating at 448."""
    graph, z = start()
    z = graph.mul(z, scale).set_output().set_data_type(data_type.FP8_E4M3).set_name("out")
    graph.build(MODES)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    graph.execute({"x": x, "weight": weight, "out": out})
    print(f"FP8:   {graph.get_plan_name_at_index(0)}")
    for note in graph.get_numerical_notes_at_index(0):
        print(f"       note: {note}")
    return out


def nvfp4(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 pairs (low nibble first) and one E4M3 scale for each 16 elements."""
    graph, z = start()
    codes, scales = graph.block_scale_quantize(z, block_size=16)
    codes.set_output().set_name("codes")
    scales.set_output().set_name("scales")
    graph.build(MODES)
    packed = torch.empty(ROWS, COLUMNS // 2, dtype=torch.uint8, device=x.device)
    block_scale = torch.empty(ROWS, COLUMNS // 16, dtype=torch.float8_e4m3fn, device=x.device)
    graph.execute({"x": x, "weight": weight, "codes": packed, "scales": block_scale})
    print(f"NVFP4: {graph.get_plan_name_at_index(0)}")
    for note in graph.get_numerical_notes_at_index(0):
        print(f"       note: {note}")
    return packed, block_scale


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(ROWS, COLUMNS, device=device).to(torch.bfloat16)
    weight = (torch.rand(1, COLUMNS, device=device) + 0.5).to(torch.bfloat16)
    x64 = x.double()
    exact = torch.nn.functional.silu(x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + EPS) * weight.double())

    scale = 100.0
    relative = ((fp8(x, weight, scale).double() / scale - exact).norm() / exact.norm()).item()
    print(f"       relative error {relative:.3f}\n")

    packed, block_scale = nvfp4(x, weight)
    values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    dequantized = E2M1.to(device)[values].double().unflatten(1, (-1, 16)) * block_scale.double().unsqueeze(-1)
    relative4 = ((dequantized.flatten(1) - exact).norm() / exact.norm()).item()
    print(f"       relative error {relative4:.3f}")
    # E4M3 keeps 3 mantissa bits (errors up to 2^-4, about 0.026 on average), E2M1 one.
    if not (relative < 0.04 and relative4 < 0.15):
        raise SystemExit("the quantized results are too far from the exact ones")


if __name__ == "__main__":
    main()
