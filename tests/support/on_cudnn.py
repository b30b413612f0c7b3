"""Graphs for cuDNN's engine on a GPU beside the same in float64."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from graphfuse import heur_mode, norm_forward_phase
from support import graphs
from support.graphs import BF16, FLOAT, HALF

INFERENCE, TRAINING = norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING
TORCH = {BF16: torch.bfloat16, HALF: torch.float16, FLOAT: torch.float32}
ENGINES = ["cudnn", "reference"]


def values(shape, dtype=BF16, seed=0, last=False):
    """Random numbers; last: with the second axis innermost in memory."""
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(TORCH[dtype])
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]) if last else x


@dataclass
class Case:
    """A graph under construction beside the same in float64. pack: what is bound, by name."""

    g: object
    pack: dict

    def tensor(self, data, name, dtype=BF16):
        self.pack[name] = data
        return self.g.tensor(data.shape, data.stride(), dtype, name=name)

    def output(self, t, exact, name="out", dtype=BF16, like=None):
        like = torch.empty(exact.shape, dtype=TORCH[dtype], device="cuda") if like is None else torch.empty_like(like)
        t.set_output().set_name(name).set_data_type(dtype).set_dim(like.shape).set_stride(like.stride())
        self.pack[name] = like.fill_(float("nan"))
        return name, exact


def new(name="graph") -> Case:
    return Case(graphs.new(name, device="cuda"), {})


def takes(g) -> dict[str, str]:
    """Node -> the engine that runs it in the selected plan."""
    parts = g._planner.at(g._planner.selected()).parts
    return {node.name: part.engine.name for part in parts for node in part.region.subgraph.nodes}


def run(case: Case, modes=(heur_mode.A,), engines=ENGINES, **kwargs):
    case.g.build(list(modes), engines=engines)
    space = graphs.workspace(case.g.get_workspace_size(), "cuda") if case.g.get_workspace_size() else None
    case.g.execute(case.pack, space, **kwargs)
    torch.cuda.synchronize()
    return space


def hold(case: Case, *wanted, rtol=8e-3, atol=8e-3):
    for name, exact in wanted:
        torch.testing.assert_close(case.pack[name].double(), exact, rtol=rtol, atol=atol)


def all_by_cudnn(case: Case) -> None:
    assert set(takes(case.g).values()) == {"cudnn"}, case.g.explain()
    assert len(case.g._planner.at(case.g._planner.selected()).parts) == 1


EPILOGUES = {
    "bias": (["bias"], lambda y, p: y + p["bias"]),
    "bias, relu": (["bias", "relu"], lambda y, p: (y + p["bias"]).relu()),
    "bias, gelu": (["bias", "gelu_approx_tanh"], lambda y, p: F.gelu(y + p["bias"], approximate="tanh")),
    "swish": (["swish"], lambda y, p: F.silu(y)),
    "bias, residual": (["bias", "residual"], lambda y, p: y + p["bias"] + p["residual"]),
    "scale": (["scale", "bias", "relu"], lambda y, p: (y * 0.5 + p["bias"]).relu()),
    "given scale": (["given", "bias"], lambda y, p: y * 0.25 + p["bias"]),
}


def epilogue(case: Case, y, names, shape, dtype=BF16, channels=False):
    """The pointwise nodes of an epilogue, and the numbers that they read, in float64."""
    of_bias = [1, shape[1], *[1] * (len(shape) - 2)] if channels else [*[1] * (len(shape) - 1), shape[-1]]
    read = {}
    for name in names:
        if name == "bias":
            data = values(of_bias, dtype, 7)
            y, read[name] = case.g.bias(y, case.tensor(data, "bias", dtype)), data.double()
        elif name == "residual":
            data = values(shape, dtype, 8, last=channels)
            y, read[name] = case.g.add(y, case.tensor(data, "residual", dtype)), data.double()
        elif name == "scale":
            y = case.g.mul(y, 0.5)
        elif name == "given":
            factor = case.g.tensor([1] * len(shape), data_type=FLOAT, is_pass_by_value=True, name="factor")
            case.pack["factor"], y = 0.25, case.g.mul(y, factor)
        else:
            y = getattr(case.g, name)(y)
    return y, read


def dense(seed=0, name="graph") -> tuple[Case, tuple]:
    """relu(a @ b + bias)"""
    case = new(name)
    a, b = values([512, 512], seed=seed), (values([512, 256], seed=seed + 1) * 0.04).bfloat16()
    y = case.g.matmul(case.tensor(a, "a"), case.tensor(b, "b"))
    y, read = epilogue(case, y, ["bias", "relu"], [512, 256])
    return case, case.output(y, (a.double() @ b.double() + read["bias"]).relu())
