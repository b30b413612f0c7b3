"""The WAN VAE decoder's L2 norm + SiLU, through RMSNorm with an adjusted epsilon.

The decoder computes  x / sqrt(sum(x^2) + e) * sqrt(C) * gamma.  Since
sqrt(C) / sqrt(sum(x^2) + e) = 1 / sqrt(mean(x^2) + e / C), that is RMSNorm with
epsilon e / C. Channels are the second axis of a channels-last video tensor, so the
graph is told [N, C, T, H, W] and the strides; nothing is copied.
"""

import torch

import graphfuse


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    N, C, T, H, W, eps_l2 = 1, 96, 4, 30, 52, 1e-5
    x = torch.randn(N, C, T, H, W, device=device).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last_3d)
    gamma = (torch.rand(C, device=device) + 0.5).to(torch.bfloat16)
    out = torch.empty_like(x)

    graph = graphfuse.pygraph(intermediate_data_type=graphfuse.data_type.FLOAT)
    X = graph.tensor_like(x, name="X")
    scale = graph.tensor([1, C, 1, 1, 1], data_type=graphfuse.data_type.BFLOAT16, name="gamma")
    Y = graph.rmsnorm(X, scale, eps_l2 / C, norm_forward_phase=graphfuse.norm_forward_phase.INFERENCE)[0]
    Z = graph.swish(Y).set_output().set_data_type(graphfuse.data_type.BFLOAT16).set_name("Z")
    graph.build([graphfuse.heur_mode.OPENSOURCE, graphfuse.heur_mode.FALLBACK])
    graph.execute({X: x, scale: gamma.view(1, C, 1, 1, 1), Z: out})

    x64 = x.double()
    l2 = x64 / torch.sqrt(x64.square().sum(dim=1, keepdim=True) + eps_l2)
    l2norm_silu = torch.nn.functional.silu(l2 * C**0.5 * gamma.double().view(1, C, 1, 1, 1))
    mismatches = int((out != l2norm_silu.to(torch.bfloat16)).sum())
    worst = ((out.double() - l2norm_silu).abs() / l2norm_silu.abs().clamp(min=1e-30)).max()
    print(f"plan: {graph.get_plan_name_at_index(0)}")
    print(f"{tuple(x.shape)} channels last on {device}: {mismatches} of {out.numel()} elements differ from")
    print(f"the L2 norm in float64 rounded to bfloat16; largest relative difference {worst:.2e} (one ulp is 7.8e-03)")
    if not worst < 2.0**-7:
        raise SystemExit("the two are not the same function")


if __name__ == "__main__":
    main()
