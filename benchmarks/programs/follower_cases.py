"""Functions of rows as models write them in torch: a norm, a softmax or a loss, and what stands around it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]
Dropout = Callable[[Tensor], Tensor]

COLUMNS, ROWS = 4096, (1024, 4096, 32768)
FORWARD, BOTH = "forward", "forward + backward"
SAMPLES = 4
EPS, LARGEST, BLOCK, RATE = 1e-5, 448.0, 128, 0.1


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """A function of tensors by name.

    run: what it computes. given: the names of what it reads. dtype: of those that are not of float32 for good.
    has_gradients: whether it is measured with its backward, too. is_dynamic: whether the number of rows varies.
    kept: which elements a function that drops some has kept, by its results and what it was given.
    """

    name: str
    title: str
    run: Callable[..., object]
    given: str
    dtype: str = "bfloat16"
    has_gradients: bool = True
    is_dynamic: bool = False
    kept: Callable[[Sequence[Tensor], Tensors], Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class FollowerCase:
    """A function at one size, with its backward or without."""

    function: str
    work: str
    rows: int
    columns: int = COLUMNS

    def __str__(self) -> str:
        return f"{self.function}/{'both' if self.work == BOTH else self.work}/{self.rows}x{self.columns}"


def tensors(function: RowFunction, case: FollowerCase, seed: int, device: str) -> dict[str, Tensor]:
    """Arguments of a function by name, drawn anew for each seed; with gradients, where the case has them.

    x, r, g: rows. w, v, b: vectors, W one in float32. c, s, t: a number for each column of a sample; SAMPLES have all
    rows then. m: a mask. n: numbers of columns. q: a scale of FP8.
    """
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, function.dtype)
    samples = (SAMPLES,) * ("c" in function.given)
    many = (*samples, case.rows // (SAMPLES if samples else 1), case.columns)
    few, vector = (*samples, 1, case.columns), (case.columns,)
    shapes = dict.fromkeys("xrgmn", many) | dict.fromkeys("cst", few) | dict.fromkeys("wvbW", vector)

    def drawn(name: str) -> Tensor:
        if name == "q":
            return torch.full((), 0.02, device=device)
        made = torch.randn(shapes[name], device=device, generator=generator)
        if name in "mn":
            return made < -1 if name == "m" else made.argmax(-1)
        return (made if name in "xrg" else 0.1 * made + (name in "wvW")).to(torch.float32 if name == "W" else dtype)

    made = {name: drawn(name) for name in function.given.split()}
    for name, t in made.items():
        t.requires_grad_(case.work == BOTH and t.is_floating_point() and name != "q")
        if function.is_dynamic and name in "xrg":
            torch._dynamo.mark_dynamic(t, 0)
    return made


# The functions. What is written here is what models write.


def rms(x, w):
    """RMSNorm of transformers' Llama: rounded to x's type before the weight."""
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def dropout(x):
    return F.dropout(x, RATE)


def fp8(y, scale):
    return (y / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def fp8_by_row(y):
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-4) / LARGEST
    return fp8(y.float(), scale), scale


def fp8_by_block(y):
    blocks = y.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return fp8(blocks, scale).flatten(-2), scale.squeeze(-1)


def rms_and_gelu(x, w):
    y = rms(x, w)
    return y, F.gelu(y)


def add_rms(x, r, w):
    total = x + r
    return rms(total, w), total


def add_rms_fp8_by_row(x, r, w):
    total = x + r
    return *fp8_by_row(rms(total, w)), total


def add_two_rms(x, r, w, v):
    total = x + r
    return rms(total, w), rms(total, v)


def rms_add_rms(x, r, w, v):
    total = rms(x, w) + r
    return rms(total, v), total


def dropout_add_rms(x, r, w, dropout=dropout):
    total = r + dropout(x)
    return rms(total, w), total


def add_layer(x, r, w, b):
    total = x + r
    return layer(total, w, b), total


def add_adaptive(x, r, c, s, t):
    total = r + c * x
    return F.layer_norm(total, total.shape[-1:], eps=EPS) * (1 + s) + t, total


def masked_softmax(x, m):
    return F.softmax((x * x.shape[-1] ** -0.5).masked_fill(m, float("-inf")), -1)


def is_kept(outputs: Sequence[Tensor], given: Tensors) -> Tensor:
    """Where a sum is nearer to one with x, whose dropout is before it, than to one without."""
    added = outputs[1].float() - given["r"].float()
    return (added - given["x"].float() / (1 - RATE)).abs() < added.abs()


def _functions() -> tuple[RowFunction, ...]:
    of, n = RowFunction, "RMSNorm"
    no = {"has_gradients": False}
    return (
        of("rms", n, rms, "x w"),
        of("rms-half", f"{n} in float16", rms, "x w", dtype="float16"),
        of("rms-float-weight", f"{n} with a weight in float32", lambda x, W: rms(x, W).to(x.dtype), "x W"),
        of("rms-gelu", f"{n} → GELU", lambda x, w: F.gelu(rms(x, w)), "x w"),
        of("rms-gelu-tanh", f"{n} → GELU by tanh", lambda x, w: F.gelu(rms(x, w), approximate="tanh"), "x w"),
        of("rms-gelu-dynamic", f"{n} → GELU, rows vary", lambda x, w: F.gelu(rms(x, w)), "x w", is_dynamic=True),
        of("rms-relu2", f"{n} → ReLU²", lambda x, w: F.relu(rms(x, w)) ** 2, "x w"),
        of("rms-tanh", f"{n} → tanh", lambda x, w: torch.tanh(rms(x, w)), "x w"),
        of("rms-silu", f"{n} → SiLU", lambda x, w: F.silu(rms(x, w)), "x w"),
        of("rms-swiglu", f"SiLU({n}) · gate", lambda x, g, w: F.silu(rms(x, w)) * g, "x g w"),
        of("rms-fp8", f"{n} → FP8, static", lambda x, w, q: fp8(rms(x, w), q), "x w q", **no),
        of("rms-fp8-row", f"{n} → FP8 by row", lambda x, w: fp8_by_row(rms(x, w)), "x w", **no),
        of("rms-fp8-block", f"{n} → FP8 by 1 × {BLOCK}", lambda x, w: fp8_by_block(rms(x, w)), "x w", **no),
        of("rms-add", f"{n} + residual", lambda x, r, w: rms(x, w) + r, "x r w"),
        of("rms-dropout", f"{n} → dropout", lambda x, w, dropout=dropout: dropout(rms(x, w)), "x w", kept=_nonzero),
        of("rms-and-gelu", f"{n}, and GELU of it", rms_and_gelu, "x w"),
        of("gelu-rms", f"GELU → {n}", lambda x, w: rms(F.gelu(x), w), "x w"),
        of("add-rms", f"sum → {n}, both", add_rms, "x r w"),
        of("add-rms-alone", f"sum → {n}", lambda x, r, w: rms(x + r, w), "x r w"),
        of("add-rms-gelu", f"sum → {n} → GELU", lambda x, r, w: F.gelu(rms(x + r, w)), "x r w"),
        of("add-rms-fp8-row", f"sum → {n} → FP8 by row, and sum", add_rms_fp8_by_row, "x r w", **no),
        of("add-two-rms", f"sum → two {n}s", add_two_rms, "x r w v"),
        of("rms-add-rms", f"{n} + residual → {n}, and sum", rms_add_rms, "x r w v"),
        of("dropout-add-rms", f"dropout + residual → {n}, and sum", dropout_add_rms, "x r w", kept=is_kept),
        of("layer", "layer norm", layer, "x w b"),
        of("layer-gelu", "layer norm → GELU", lambda x, w, b: F.gelu(layer(x, w, b)), "x w b"),
        of("layer-fp8", "layer norm → FP8, static", lambda x, w, b, q: fp8(layer(x, w, b), q), "x w b q", **no),
        of("layer-add", "layer norm + residual", lambda x, r, w, b: layer(x, w, b) + r, "x r w b"),
        of("add-layer", "sum → layer norm, both", add_layer, "x r w b"),
        of("add-layer-alone", "sum → layer norm", lambda x, r, w, b: layer(x + r, w, b), "x r w b"),
        of("add-adaptive", "gated sum → adaptive layer norm, both", add_adaptive, "x r c s t"),
        of("l2", "L2 normalization", lambda x: F.normalize(x, dim=-1), "x"),
        of("l2-scaled", "L2 normalization · weight", lambda x, w: F.normalize(x, dim=-1) * w, "x w"),
        of("softmax", "softmax", lambda x: F.softmax(x, -1), "x"),
        of("log-softmax", "log-softmax", lambda x: F.log_softmax(x, -1), "x"),
        of("masked-softmax", "scale → mask → softmax", masked_softmax, "x m"),
        of("cross-entropy", "cross entropy", lambda x, n: F.cross_entropy(x.float(), n), "x n"),
    )


def _nonzero(outputs: Sequence[Tensor], given: Tensors) -> Tensor:
    return outputs[0] != 0


FUNCTIONS = {function.name: function for function in _functions()}


def cases(rows: Sequence[int] = ROWS, columns: int = COLUMNS) -> tuple[FollowerCase, ...]:
    """Each function at each size, forward and with its backward."""
    works = {name: (FORWARD, BOTH) if one.has_gradients else (FORWARD,) for name, one in FUNCTIONS.items()}
    return tuple(FollowerCase(name, work, n, columns) for name in FUNCTIONS for work in works[name] for n in rows)


CASES = cases()
QUICK = tuple(case for case in CASES if case.rows == ROWS[1] and case.work == FORWARD)
