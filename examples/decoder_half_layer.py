"""The MLP half of a decoder layer in FP8 as one graph: residual sum, RMSNorm and quantization; the gate's and the up
projection; SiLU times gate and quantization; the down projection.

What stands before and between the matrix products is one kernel each, which computes the scales of its rows, too. Only
FP8 codes and one scale a row go from there to the products, whose results the scales multiply afterwards. On a GPU the
sizes are those of a layer of Llama 3 8B with 2048 tokens.
"""

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase, reduction_mode

EPS = 1e-5
LARGEST = 448  # of E4M3
BF16, FLOAT, FP8 = data_type.BFLOAT16, data_type.FLOAT, data_type.FP8_E4M3


def quantized(graph: graphfuse.pygraph, y: graphfuse.Tensor) -> tuple[graphfuse.Tensor, graphfuse.Tensor]:
    """FP8 codes, and for each row the number that they are multiples of."""
    rows = y.get_dim()[1]
    amax = graph.reduction(y, mode=reduction_mode.AMAX).set_dim([1, rows, 1])
    scale = graph.max(graph.mul(amax, 1 / LARGEST), 1e-12)  # of rows that are zero, too
    return graph.div(y, scale).set_data_type(FP8), scale


def build(tokens: int, hidden: int, inner: int, engines: list[str], modes: list[heur_mode]) -> graphfuse.pygraph:
    # With "declared", codes are FP8 in memory between the parts, and what products make is bfloat16.
    graph = graphfuse.pygraph(
        "decoder_half_layer", io_data_type=BF16, intermediate_data_type=FLOAT, intermediate_rounding="declared"
    )
    x, residual = (graph.tensor([1, tokens, hidden], name=name) for name in ("x", "residual"))
    norm = graph.tensor([1, 1, hidden], name="norm")

    def weight(name: str, rows: int, columns: int) -> tuple[graphfuse.Tensor, graphfuse.Tensor]:
        """FP8 codes by columns, as tensor cores read them, and a scale for each column."""
        codes = graph.tensor([1, rows, columns], [rows * columns, 1, rows], data_type=FP8, name=name)
        return codes, graph.tensor([1, 1, columns], data_type=FLOAT, name=f"{name}_scale")

    def product(codes, scale, weight, weight_scale):
        made = graph.matmul(codes, weight).set_data_type(BF16)
        return graph.mul(graph.mul(made, scale), weight_scale)

    total = graph.add(x, residual).set_output().set_name("sum")
    y = graph.rmsnorm(total, norm, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
    codes, scale = quantized(graph, y.set_dim([1, tokens, hidden]))
    gate, up = (product(codes, scale, *weight(name, hidden, inner)) for name in ("gate", "up"))
    y = graph.mul(graph.swish(gate), up)
    codes, scale = quantized(graph, y.set_dim([1, tokens, inner]))
    product(codes, scale, *weight("down", inner, hidden)).set_output().set_name("out").set_data_type(BF16)
    graph.build(modes, engines=engines)
    return graph


def exact(pack: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The layer's half without quantization of what is computed on the way."""
    values = {name: value.to(dtype) for name, value in pack.items()}
    weights = {name: values[name] * values[f"{name}_scale"] for name in ("gate", "up", "down")}
    total = (pack["x"] + pack["residual"]).to(dtype)
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * values["norm"]
    return (torch.nn.functional.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, hidden, inner = (2048, 4096, 14336) if device == "cuda" else (8, 128, 256)
    torch.manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    pack = {"x": values(1, tokens, hidden), "residual": values(1, tokens, hidden), "norm": values(1, 1, hidden)}
    for name, rows, columns in (("gate", hidden, inner), ("up", hidden, inner), ("down", inner, hidden)):
        drawn = torch.randn(1, columns, rows, device=device) * rows**-0.5
        scale = drawn.abs().amax(-1, keepdim=True) / LARGEST
        pack[name] = (drawn / scale).to(torch.float8_e4m3fn).mT
        pack[f"{name}_scale"] = scale.mT
    out, total = (torch.empty(1, tokens, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))

    try:
        graph = build(tokens, hidden, inner, [] if device == "cuda" else ["emulator"], [heur_mode.A])
    except graphfuse.CompilerNotFoundError as error:
        print(f"The reference engine runs instead of kernels: {error}\n")
        graph = build(tokens, hidden, inner, [], [heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    graph.execute(pack | {"out": out, "sum": total}, workspace)
    print(graph.explain())

    wanted = exact(pack, torch.float32 if device == "cuda" else torch.float64)
    error = ((out.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()
    same = torch.equal(total, pack["x"] + pack["residual"])
    print(
        f"\n{tokens} tokens, {hidden} -> {inner} -> {hidden} in FP8 on {device}: relative error {error:.3f}; ", end=""
    )
    print(f"sum as torch adds: {same}")
    # E4M3 keeps 3 mantissa bits, an error of about 0.026 for each of the two quantizations.
    if not same or not error < 0.08:
        raise SystemExit("the results are too far from the exact ones")


if __name__ == "__main__":
    main()
