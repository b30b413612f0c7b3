"""Gradients of a graph: a fused block trained by hand, its backward drawn by ``differentiate``.

The block is silu(rmsnorm(x) * weight + bias) * gate. Forward is one generated kernel, and backward another; without a
CUDA device the emulator runs them on the CPU, and without a C++ compiler the reference engine runs the graphs.
"""

import torch
from torch.nn import functional

import graphfuse

ROWS, COLUMNS, EPS, STEPS, RATE = 256, 128, 1e-6, 40, 20.0


def block() -> graphfuse.pygraph:
    graph = graphfuse.pygraph(
        io_data_type=graphfuse.data_type.BFLOAT16, intermediate_data_type=graphfuse.data_type.FLOAT
    )
    x, gate = (graph.tensor([ROWS, COLUMNS], name=name) for name in ("x", "gate"))
    weight, bias = (
        graph.tensor([1, COLUMNS], name=name, data_type=graphfuse.data_type.FLOAT) for name in ("weight", "bias")
    )
    phase = graphfuse.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(x, weight, EPS, bias, norm_forward_phase=phase)
    graph.mul(graph.swish(y), gate).set_output(True).set_name("out")
    return graph


def built(graph: graphfuse.pygraph, device: str) -> None:
    try:
        graph.build([graphfuse.heur_mode.A], engines=[] if device == "cuda" else ["emulator"])
    except graphfuse.CompilerNotFoundError as error:
        print(f"The reference engine runs instead of the kernels: {error}\n")
        graph.build([graphfuse.heur_mode.FALLBACK])


def run(graph: graphfuse.pygraph, tensors: dict[str, torch.Tensor], device: str) -> None:
    size = graph.get_workspace_size()
    graph.execute(tensors, torch.empty(size, dtype=torch.uint8, device=device))


def exact(x, gate, weight, bias):
    return functional.silu(functional.rms_norm(x, (COLUMNS,), eps=EPS) * weight + bias) * gate


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = graphfuse.differentiate(block(), outputs=["out"], wrt=["x", "weight", "bias"])
    built(made.forward, device)
    built(made.backward, device)
    print(made.forward.explain(), made.backward.explain(), f"kept for backward: {', '.join(made.kept)}\n", sep="\n\n")

    torch.manual_seed(0)
    x, gate = (torch.randn(ROWS, COLUMNS, device=device).to(torch.bfloat16) for _ in range(2))
    learned = exact(x.float(), gate.float(), *(torch.randn(1, COLUMNS, device=device) for _ in range(2)))
    weight, bias = torch.ones(1, COLUMNS, device=device), torch.zeros(1, COLUMNS, device=device)

    # Memory for all that the graphs write. What is kept has one name in both of them.
    values = {"x": x, "gate": gate, "weight": weight, "bias": bias, "out": torch.empty_like(x)}
    for name in set(made.kept) - values.keys():
        values[name] = torch.empty(ROWS, 1, device=device)  # one value a row
    gradients = {f"d{name}": torch.empty_like(values[name]) for name in made.gradients}

    losses = []
    for step in range(STEPS):
        run(made.forward, values, device)
        error = values["out"].float() - learned
        losses.append(error.square().mean().item())
        dout = (2 / error.numel() * error).to(torch.bfloat16)
        run(made.backward, {name: values[name] for name in made.kept} | {"dout": dout} | gradients, device)
        if step == 0:
            check(values, dout, gradients)
        for name in ("weight", "bias"):
            values[name] -= RATE * gradients[f"d{name}"]
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps on {device}")
    if not losses[-1] < losses[0] / 4:
        raise SystemExit("nothing was learned")


def check(values: dict[str, torch.Tensor], dout: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    """Gradients against torch.autograd in float64."""
    wide = [values[name].double().requires_grad_() for name in ("x", "gate", "weight", "bias")]
    exact(*wide).backward(dout.double())
    for name, t in zip(("x", "gate", "weight", "bias"), wide, strict=True):
        if f"d{name}" in gradients:
            found = gradients[f"d{name}"].double()
            error = ((found - t.grad).norm() / t.grad.norm()).item()
            print(f"gradient of {name}: relative error {error:.1e} against float64")
            if not error < 2.0**-8:
                raise SystemExit("the gradient is wrong: a correctly rounded bfloat16 result stays below 2^-8")


if __name__ == "__main__":
    main()
