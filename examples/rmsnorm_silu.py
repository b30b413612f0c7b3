"""The main job: RMSNorm feeding SiLU as one graph, planned, run and checked.

Mirrors the cuDNN frontend's RMSNorm + SiLU sample. The graph becomes one generated kernel;
without a CUDA device the emulator runs that kernel on the CPU, and without a C++ compiler
for it the reference engine runs the graph.
"""

import torch

import graphfuse as cudnn


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    C, num_tokens, eps = 512, 24960 if device == "cuda" else 1560, 1e-5

    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    X = graph.tensor(name="X", dim=[num_tokens, C, 1, 1], stride=[C, 1, 1, 1], data_type=cudnn.data_type.BFLOAT16)
    scale = graph.tensor(name="scale", dim=[1, C, 1, 1], stride=[C, 1, 1, 1], data_type=cudnn.data_type.BFLOAT16)
    epsilon = graph.tensor(
        name="epsilon",
        dim=[1, 1, 1, 1],
        stride=[1, 1, 1, 1],
        data_type=cudnn.data_type.FLOAT,
        is_pass_by_value=True,
    )
    Y = graph.rmsnorm(norm_forward_phase=cudnn.norm_forward_phase.INFERENCE, input=X, scale=scale, epsilon=epsilon)[0]
    Y.set_data_type(cudnn.data_type.BFLOAT16)
    Z = graph.swish(input=Y, swish_beta=1.0)
    Z.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)

    # OPENSOURCE: one generated kernel, or an error that says why not. FALLBACK: the reference engine.
    try:
        graph.build([cudnn.heur_mode.OPENSOURCE], engines=[] if device == "cuda" else ["emulator"])
    except cudnn.CompilerNotFoundError as error:
        print(f"The reference engine runs instead of the kernel: {error}\n")
        graph.build([cudnn.heur_mode.FALLBACK])

    x = torch.randn(num_tokens, C, dtype=torch.bfloat16, device=device)
    w = torch.rand(1, C, 1, 1, device=device).to(torch.bfloat16) + 0.5
    out = torch.empty(num_tokens, C, dtype=torch.bfloat16, device=device)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    graph.execute(
        {
            X: x.view(num_tokens, C, 1, 1),
            scale: w,
            epsilon: torch.full((1, 1, 1, 1), eps, dtype=torch.float32),
            Z: out.view(num_tokens, C, 1, 1),
        },
        workspace,
    )

    x64 = x.double()
    normalized = x64 / torch.sqrt(x64.square().mean(dim=1, keepdim=True) + eps) * w.double().view(1, C)
    exact = torch.nn.functional.silu(normalized)
    error = (out.double() - exact).norm() / exact.norm()
    print(graph.explain())
    print(f"\n{num_tokens} x {C} bfloat16 on {device}: relative error {error:.2e} against float64")
    if not error < 2.0**-8:
        raise SystemExit("the result is wrong: a correctly rounded bfloat16 result stays below 2^-8")


if __name__ == "__main__":
    main()
