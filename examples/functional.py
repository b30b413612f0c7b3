"""The norms of a decoder layer by the functional API, which has FlashInfer's names: called one by one, then compiled.

Residual sum and norm in place, queries and keys normalized where they lie in a packed tensor, a gated norm, and FP8
with a scale for each token. Every call is one generated kernel (queries and keys one each); without a CUDA device
the reference engine runs.
"""

import torch

from graphfuse import functional

TOKENS, HIDDEN, HEADS, HEAD_DIM = 333, 1024, 8, 128


def layer(hidden, residual, qkv, gate, weight, head_weight):
    """All norms around attention; hidden and residual are updated in place, as queries and keys are in qkv."""
    functional.fused_add_rmsnorm(hidden, residual, weight)
    q, k = qkv[:, :HEADS], qkv[:, HEADS : 2 * HEADS]
    functional.qk_rmsnorm(q, k, head_weight, head_weight, q_out=q, k_out=k)
    gated = functional.rmsnorm_silu_gate(hidden, weight, gate)
    return functional.rmsnorm_quant_dynamic(gated, weight)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def inputs(device: str, tokens: int) -> list[torch.Tensor]:
    shapes = (tokens, HIDDEN), (tokens, HIDDEN), (tokens, 3 * HEADS, HEAD_DIM), (tokens, HIDDEN), (HIDDEN,), (HEAD_DIM,)
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = inputs(device, TOKENS)
    hidden, residual, qkv, gate, weight, head_weight = (t.clone() for t in given)
    codes, scale = layer(hidden, residual, qkv, gate, weight, head_weight)

    total = given[0].double() + given[1].double()
    gated = torch.nn.functional.silu(norm(hidden, weight)) * gate.double()
    heads = 2 * HEADS
    wanted = {
        "residual sum": (residual, total),
        "norm of the sum": (hidden, norm(total, weight)),
        "queries and keys": (qkv[:, :heads], norm(given[2][:, :heads], head_weight)),
        "FP8 with scales": (codes.float() * scale, norm(gated.bfloat16(), weight)),
    }
    print(f"{TOKENS} tokens on {device}")
    for what, (got, exact) in wanted.items():
        error = ((got.double() - exact).norm() / exact.norm()).item()
        print(f"{what:18} relative error {error:.1e} against float64")
        # bfloat16 keeps 8 bits, E4M3 4.
        if not error < (2.0**-4 if "FP8" in what else 2.0**-8):
            raise SystemExit("the result is wrong")
    if not torch.equal(qkv[:, heads:], given[2][:, heads:]):
        raise SystemExit("values have changed")

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (TOKENS, 7, 64):
        one, other = (inputs(device, tokens) for _ in range(2))
        for a, b in zip(one, other, strict=True):
            b.copy_(a)
        same = zip((*compiled(*one), *one), (*layer(*other), *other), strict=True)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in same):
            raise SystemExit("compiled and plain calls differ")
    operators = [str(node.target) for node in graphs[0].graph.nodes if "graphfuse" in str(node.target)]
    print(f"torch.compile: {len(graphs)} graph for 3 numbers of tokens, with {', '.join(operators)}")
    if len(graphs) != 1:
        raise SystemExit("more than one graph")


if __name__ == "__main__":
    main()
