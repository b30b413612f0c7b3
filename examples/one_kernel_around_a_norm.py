"""What stands between two matrix products of a decoder layer, in one kernel: the residual sum, RMSNorm with a weight
around zero (Gemma), SiLU, a gate, and FP8 with a scale for each row; the sum and the scales are written beside it."""

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode

ROWS, COLUMNS, EPS = 256, 1024, 1e-6
LARGEST = 448  # of E4M3
MODES = [heur_mode.OPENSOURCE, heur_mode.FALLBACK]


def build() -> graphfuse.pygraph:
    graph = graphfuse.pygraph(intermediate_data_type=data_type.FLOAT)

    def given(name: str, rows: int = ROWS) -> graphfuse.Tensor:
        return graph.tensor([rows, COLUMNS], data_type=data_type.BFLOAT16, name=name)

    # Read by the norm as it is stored: rounded to bfloat16.
    total = graph.add(given("x"), given("residual"))
    total.set_output().set_name("sum").set_data_type(data_type.BFLOAT16)

    weight = graph.add(given("weight", rows=1), 1.0)
    y = graph.rmsnorm(total, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    y = graph.mul(graph.swish(y), given("gate"))

    amax = graph.reduction(y, mode=reduction_mode.AMAX).set_dim([ROWS, 1])
    scale = graph.max(graph.mul(amax, 1 / LARGEST), 1e-12)  # of rows that are zero, too
    scale.set_output().set_name("scale").set_data_type(data_type.FLOAT)
    graph.div(y, scale).set_output().set_name("codes").set_data_type(data_type.FP8_E4M3)
    graph.build(MODES)
    return graph


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, residual, gate = (torch.randn(ROWS, COLUMNS, device=device).bfloat16() for _ in range(3))
    weight = (0.1 * torch.randn(1, COLUMNS, device=device)).bfloat16()
    total, scale = torch.empty_like(x), torch.empty(ROWS, 1, device=device)
    codes = torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn, device=device)

    graph = build()
    pack = {"x": x, "residual": residual, "gate": gate, "weight": weight, "sum": total, "scale": scale, "codes": codes}
    graph.execute(pack)
    print(graph.get_plan_name_at_index(0))

    s = total.double()
    y = s * torch.rsqrt(s.square().mean(1, keepdim=True) + EPS) * (weight.double() + 1)
    exact = torch.nn.functional.silu(y) * gate.double()
    relative = ((codes.double() * scale.double() - exact).norm() / exact.norm()).item()
    print(f"sum as torch adds: {torch.equal(total, x + residual)}; relative error of the codes {relative:.3f}")
    # E4M3 keeps 3 mantissa bits: errors up to 2^-4, about 0.026 on average.
    if not torch.equal(total, x + residual) or relative > 0.04:
        raise SystemExit("the results are too far from the exact ones")


if __name__ == "__main__":
    main()
