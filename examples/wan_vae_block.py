"""A residual block of the WAN VAE's decoder as one graph: twice norm, SiLU and a causal 3-D convolution with bias, plus
the input; all channels last.

Each norm becomes one kernel with all that works on the same pixels around it. Convolutions go to another engine: with
the extra cudnn to cuDNN's, which adds bias and input to what it has in registers. On a GPU the shape is that of the
decoder's last stage, four frames of 832 x 480.
"""

import torch
from torch.nn import functional

import graphfuse
from graphfuse import data_type, heur_mode, norm_forward_phase

EPS = 1e-12
BF16 = data_type.BFLOAT16


def build(shape: tuple[int, ...], engines: list[str], modes: list[heur_mode]) -> graphfuse.pygraph:
    """The block on [samples, channels, frames, height, width]."""
    n, c, t, h, w = shape
    # With "declared", what norms and convolutions read is bfloat16 in memory, as it is for torch. What a convolution
    # makes is not rounded before the bias is added: an engine may add it in registers.
    graph = graphfuse.pygraph(
        "wan_vae_block",
        io_data_type=BF16,
        intermediate_data_type=data_type.FLOAT,
        intermediate_rounding="declared",
    )
    x = graph.tensor([n, c, t, h, w], [c * t * h * w, 1, h * w * c, w * c, c], name="x")
    y = x
    for i in (1, 2):
        gamma, bias = (graph.tensor([1, c, 1, 1, 1], name=f"{name}{i}") for name in ("gamma", "bias"))
        weight = graph.tensor([c, c, 3, 3, 3], [27 * c, 1, 9 * c, 3 * c, c], name=f"weight{i}")
        y = graph.rmsnorm(y.set_data_type(BF16), gamma, EPS, norm_forward_phase=norm_forward_phase.INFERENCE)[0]
        y = graph.swish(y).set_data_type(BF16)
        # Causal: a frame sees itself and the two before it.
        y = graph.conv_fprop(y, weight, pre_padding=[2, 1, 1], post_padding=[0, 1, 1])
        y = graph.bias(y, bias)
    graph.add(y, x).set_output().set_name("out")
    graph.build(modes, engines=engines)
    return graph


def exact(pack: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The block by torch's own functions."""
    values = {name: value.to(dtype) for name, value in pack.items()}
    y = values["x"]
    for i in (1, 2):
        y = functional.normalize(y, dim=1) * y.shape[1] ** 0.5 * values[f"gamma{i}"]
        y = functional.pad(functional.silu(y), (1, 1, 1, 1, 2, 0))
        y = functional.conv3d(y, values[f"weight{i}"], values[f"bias{i}"].flatten())
    return y + values["x"]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, 96, 4, 480, 832) if device == "cuda" else (1, 16, 3, 6, 8)
    channels = shape[1]

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = (torch.randn(shape, device=device) * scale).bfloat16()
        return drawn.contiguous(memory_format=torch.channels_last_3d)

    torch.manual_seed(0)
    pack = {"x": values(*shape)}
    for i in (1, 2):
        pack[f"gamma{i}"] = values(1, channels, 1, 1, 1, scale=0.25) + 1
        pack[f"weight{i}"] = values(channels, channels, 3, 3, 3, scale=(27 * channels) ** -0.5)
        pack[f"bias{i}"] = values(1, channels, 1, 1, 1)
    out = torch.empty_like(pack["x"])

    try:
        graph = build(shape, [] if device == "cuda" else ["emulator"], [heur_mode.A])
    except graphfuse.CompilerNotFoundError as error:
        print(f"The reference engine runs instead of kernels: {error}\n")
        graph = build(shape, [], [heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    graph.execute(pack | {"out": out}, workspace)
    print(graph.explain())

    # On a GPU float32 is exact enough, and four times as fast as float64 and more.
    with torch.backends.cudnn.flags(allow_tf32=False):
        wanted = exact(pack, torch.float32 if device == "cuda" else torch.float64)
    error = ((out.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()
    print(f"\n{shape} bfloat16 channels last on {device}: relative error {error:.2e}")
    # Rounded to bfloat16, by 2^-9 at most, around each convolution and at the end.
    if not error < 2.0**-7:
        raise SystemExit("the result is too far from the exact one")


if __name__ == "__main__":
    main()
