"""A model that is fused in place, and compiled: a small decoder, written here in torch with a norm of its own, as
models have it.

`fuse` finds the norms by what they compute, and the residual sums before them, and prints what became of each. The
fused model agrees with itself, and `unfuse` gives it back. `torch.compile(backend="graphfuse")` finds the sums between
layers, too.
"""

import torch
from torch.nn import functional as F

from graphfuse.torch import compile_report, fuse, unfuse

HIDDEN, HEADS, LAYERS = 256, 4, 3


class Norm(torch.nn.Module):
    """Rounded before it is multiplied by the weight."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False),
            torch.nn.Linear(HIDDEN, HIDDEN, bias=False),
        )
        self.q_norm, self.k_norm = Norm(HIDDEN // HEADS), Norm(HIDDEN // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(HIDDEN), Attention()
        self.mlp_norm = Norm(HIDDEN)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.SiLU(), torch.nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)), Norm(HIDDEN)).to(device, torch.bfloat16)
    x = torch.randn(2, 33, HIDDEN, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        own = model(x)
        print(fuse(model))
        fused = model(x)
        torch.testing.assert_close(fused, own, rtol=0.02, atol=0.02)
        unfuse(model)
        assert torch.equal(model(x), own)
        # The rest is inductor's, which on a CPU would need a C++ compiler.
        options = {} if device == "cuda" else {"then": "aot_eager"}
        compiled = torch.compile(model, backend="graphfuse", options=options)(x)
        torch.testing.assert_close(compiled, own, rtol=0.02, atol=0.02)
        print(f"\n{compile_report()}\n")
    print(f"outputs agree; {(fused != own).float().mean():.1%} of them differ in the last place")


if __name__ == "__main__":
    main()
