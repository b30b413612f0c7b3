"""Attention with normalized queries and keys as one graph: an RMSNorm of each head, then causal attention in groups.

Queries, keys and values are slices of one projection's result, as [samples, tokens, heads, size]. The graph is told
[samples, heads, tokens, size] and the strides; nothing is copied. The two norms are a kernel each, the attention goes
to another engine. On a GPU the sizes are those of a layer of Qwen3 8B with 2048 tokens.
"""

import torch

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase

EPS = 1e-6
BF16 = data_type.BFLOAT16


def build(tokens: int, heads: int, groups: int, size: int, engines: list[str], modes: list[heur_mode]):
    # With "declared", normalized queries and keys are bfloat16 in memory, as attention takes them.
    graph = graphfuse.pygraph(
        "qk_norm_attention",
        io_data_type=BF16,
        intermediate_data_type=data_type.FLOAT,
        intermediate_rounding="declared",
    )
    wide = (heads + 2 * groups) * size

    def heads_of(name: str, count: int) -> graphfuse.Tensor:
        return graph.tensor([1, count, tokens, size], [tokens * wide, size, wide, 1], name=name)

    def normalized(x: graphfuse.Tensor, name: str) -> graphfuse.Tensor:
        weight = graph.tensor([1, 1, 1, size], name=name)
        y = graph.rmsnorm(x, weight, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        return y.set_data_type(BF16)

    q, k = normalized(heads_of("q", heads), "q_norm"), normalized(heads_of("k", groups), "k_norm")
    v = heads_of("v", groups)
    out = graph.sdpa(q, k, v, attn_scale=size**-0.5, use_causal_mask=True)[0]
    out.set_output().set_name("out").set_dim([1, heads, tokens, size]).set_stride(
        [tokens * heads * size, size, heads * size, 1]
    )
    graph.build(modes, engines=engines)
    return graph


def exact(pack: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """By torch's own functions."""
    values = {name: value.to(dtype) for name, value in pack.items()}

    def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    q, k = normalized(values["q"], values["q_norm"]), normalized(values["k"], values["k_norm"])
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, values["v"]))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, heads, groups, size = (2048, 32, 8, 128) if device == "cuda" else (24, 4, 2, 64)
    torch.manual_seed(0)
    packed = torch.randn(1, tokens, heads + 2 * groups, size, device=device).bfloat16()
    q, k, v = (t.transpose(1, 2) for t in packed.split((heads, groups, groups), dim=2))
    q_norm, k_norm = ((1 + 0.25 * torch.randn(1, 1, 1, size, device=device)).bfloat16() for _ in "qk")
    pack = {"q": q, "k": k, "v": v, "q_norm": q_norm, "k_norm": k_norm}
    out = torch.empty(1, tokens, heads, size, dtype=torch.bfloat16, device=device).transpose(1, 2)

    try:
        graph = build(tokens, heads, groups, size, [] if device == "cuda" else ["emulator"], [heur_mode.A])
    except graphfuse.CompilerNotFoundError as error:
        print(f"The reference engine runs instead of kernels: {error}\n")
        graph = build(tokens, heads, groups, size, [], [heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    graph.execute(pack | {"out": out}, workspace)
    print(graph.explain())

    wanted = exact(pack, torch.float32 if device == "cuda" else torch.float64)
    error = ((out.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()
    print(f"\n{tokens} tokens, {heads} heads on {groups} of {size}, on {device}: relative error {error:.2e}")
    if not error < 2.0**-7:
        raise SystemExit("the result is too far from the exact one")


if __name__ == "__main__":
    main()
