"""Calls of every norm of graphfuse.functional, with what they have to leave behind in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from graphfuse import functional
from support import oracle

F8, F8_WIDE, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
EPS = 1e-5


@dataclass(frozen=True)
class Call:
    """One call of a function. tensors: by argument. exact: float64 results by the argument that holds them, or of
    `returned`; None for codes, which `codes` tests. options: other arguments."""

    function: Callable[..., object]
    tensors: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    returned: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=lambda: {"eps": EPS})

    @property
    def leads(self) -> str:
        """The argument that the shapes of all others follow from."""
        return next(name for name in ("input", "q", "gate") if name in self.tensors)

    def run(self, **change) -> dict[str, torch.Tensor]:
        """The tensors after the call, those returned among them."""
        arguments = self.tensors | self.options | change
        result = self.function(**arguments)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        assert len(results) == len(self.returned)
        made = dict(zip(self.returned, results, strict=True))
        for name, value in made.items():
            assert arguments.get(name) is None or arguments[name] is value
        return arguments | made


@dataclass(frozen=True)
class Tensors:
    """Random tensors of one device and seed."""

    device: str = "cpu"
    seed: int = 0

    def __call__(self, shape, dtype, number: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return (torch.randn(shape, generator=generator) * scale).to(self.device, dtype)


def norm(x, weight):
    return oracle.rmsnorm(x, weight, EPS)[0]


def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), EPS)


def call(name: str, shape=(5, 64), dtype=torch.bfloat16, weight=None, tensors=Tensors()) -> Call:
    """A call of the function `name`. dtype: of its full tensors; weight: of its weight, by default the same."""
    x, r, g = (tensors(shape, dtype, n) for n in range(3))
    w = tensors(shape[-1:], weight or dtype, 3)
    scale = torch.full((1,), 0.05, device=tensors.device)
    empty = lambda kind, columns=shape[-1]: torch.empty((*shape[:-1], columns), dtype=kind, device=x.device)  # noqa: E731
    total, function = x.double() + r.double(), getattr(functional, name)
    added = {"residual": total}
    match name:
        case "rmsnorm":
            return Call(function, {"input": x, "weight": w}, {"out": norm(x, w)}, ("out",))
        case "gemma_rmsnorm":
            return Call(function, {"input": x, "weight": w}, {"out": norm(x, w.double() + 1)}, ("out",))
        case "fused_add_rmsnorm" | "gemma_fused_add_rmsnorm":
            factor = w.double() + name.startswith("gemma")
            given = {"input": x, "residual": r, "weight": w}
            return Call(function, given, added | {"input": norm(total, factor)})
        case "sandwich_rmsnorm" | "gemma_sandwich_rmsnorm":
            more = name.startswith("gemma")
            total = norm(x, w.double() + more) + r.double()
            given = {"input": x, "residual": r, "weight": w, "next_weight": w.flip(0)}
            exact = {"out": norm(total, w.flip(0).double() + more), "residual_out": total}
            return Call(function, given, exact, ("out", "residual_out"))
        case "rmsnorm_quant":
            given = {"out": empty(F8), "input": x, "weight": w, "scale": scale}
            return Call(function, given, {"out": norm(x, w) / scale.double()})
        case "fused_add_rmsnorm_quant":
            given = {"out": empty(F8), "input": x, "residual": r, "weight": w, "scale": scale}
            return Call(function, given, added | {"out": norm(total, w) / scale.double()})
        case "rmsnorm_quant_dynamic" | "fused_add_rmsnorm_quant_dynamic":
            plain = name.startswith("rmsnorm")
            y = norm(x if plain else total, w)
            row = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
            given = {"input": x, "weight": w} | ({} if plain else {"residual": r})
            exact = {"out": y / row, "scale": row} | ({} if plain else added)
            return Call(function, given, exact, ("out", "scale"))
        case "qk_rmsnorm":
            k, k_weight = (
                tensors((*shape[:-2], *(max(1, e // 2) for e in shape[-2:-1]), shape[-1]), dtype, 4),
                w.flip(0),
            )
            given = {"q": x, "k": k, "q_weight": w, "k_weight": k_weight}
            return Call(function, given, {"q_out": norm(x, w), "k_out": norm(k, k_weight)}, ("q_out", "k_out"))
        case "fused_rmsnorm_silu":
            return Call(function, {"input": x, "weight": w}, {"out": oracle.swish(norm(x, w))}, ("out",))
        case "rmsnorm_silu_gate":
            given = {"input": x, "weight": w, "gate": g}
            return Call(function, given, {"out": oracle.swish(norm(x, w)) * g.double()}, ("out",))
        case "silu_mul_fp8" | "quantize_fp8":
            fused = name.startswith("silu")
            y = oracle.swish(x) * g.double() if fused else x.double()
            row = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
            given = {"gate": x, "up": g} if fused else {"input": x}
            return Call(function, given, {"out": y / row, "scale": row}, ("out", "scale"), {"group_size": None})
        case "rmsnorm_fp4quant":
            return Call(function, {"input": x, "weight": w}, {}, ("y_fp4", "block_scale"))
        case "add_rmsnorm_fp4quant":
            given = {"input": x, "residual": r, "weight": w}
            return Call(function, given, added, ("y_fp4", "block_scale"))
        case "layernorm":
            b = tensors(shape[-1:], weight or dtype, 5)
            return Call(function, {"input": x, "weight": w, "bias": b}, {"out": layer_norm(x, w, b)}, ("out",))
        case "layernorm_quant":
            b = tensors(shape[-1:], weight or dtype, 5)
            given = {"out": empty(F8), "input": x, "weight": w, "bias": b, "scale": scale}
            return Call(function, given, {"out": layer_norm(x, w, b) / scale.double()})
        case "add_layernorm":
            b = tensors(shape[-1:], weight or dtype, 5)
            c = tensors((*shape[:-1][:1], *(1 for _ in shape[1:-1]), shape[-1]), weight or dtype, 8)
            total = r.double() + x.double() * c.double()
            given = {"input": x, "residual": r, "weight": w, "bias": b, "gate": c}
            return Call(
                function, given, {"out": layer_norm(total, w, b), "residual_out": total}, ("out", "residual_out")
            )
        case "fused_add_layernorm":
            b = tensors(shape[-1:], weight or dtype, 5)
            given = {"input": x, "residual": r, "weight": w, "bias": b}
            return Call(function, given, added | {"input": layer_norm(total, w, b)})
        case "adalayernorm" | "add_adalayernorm":
            of = (*shape[:-1][:1], *(1 for _ in shape[1:-1]), shape[-1])
            a, b, c = (tensors(of, weight or dtype, n) for n in (6, 7, 8))
            given, exact = {"input": x, "scale": a, "shift": b}, {}
            if name.startswith("add"):
                given |= {"residual": r, "gate": c}
                exact["residual_out"] = r.double() + x.double() * c.double()
            y = torch.nn.functional.layer_norm(exact.get("residual_out", x.double()), shape[-1:], eps=EPS)
            exact = {"out": y * (1 + a.double()) + b.double()} | exact
            return Call(function, given, exact, tuple(exact))
        case "softmax" | "log_softmax":
            return Call(function, {"input": x}, {"out": getattr(torch, name)(x.double(), -1)}, ("out",), {})
        case "logsumexp":
            return Call(function, {"input": x}, {"out": x.double().logsumexp(-1, keepdim=True)}, ("out",), {})
        case "normalize":
            length = x.double().square().sum(-1, keepdim=True).sqrt()
            return Call(function, {"input": x}, {"out": x.double() / length.clamp(min=EPS)}, ("out",))
    raise KeyError(name)


LOSSES = ["cross_entropy", "cross_entropy_backward"]  # whose tests are test_cross_entropy.py
ROTATED = ["qk_norm_rope", "qk_norm_rope_cache"]  # whose tests are test_rope.py
ROTATED += ["qk_norm_rope_across_heads", "cos_sin_of_grid"]  # whose tests are test_rope_across_heads.py
OVER_RANKS = [name for name in functional.__all__ if "all_reduce" in name or "scatter" in name or "gather" in name]
NAMES = [name for name in functional.__all__ if name not in (*LOSSES, *ROTATED, *OVER_RANKS, "explain")]
WITH_EPS = [name for name in NAMES if "eps" in call(name).options]


def check(results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """Results against float64: the nearest value of their type or one beside it, of float32 to 1e-5 of the scale.

    A float32 value one place off makes another FP8 value where it is close to a midpoint.
    """
    for name, want in exact.items():
        got = results[name]
        assert got.shape == want.shape, name
        if got.dtype is torch.float32:
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        else:
            apart = oracle.ulps(got, oracle.rounded(want, got.dtype))
            small = (got.double() - want).abs() < 1e-6  # cancelled: a place of the sum, not of the result
            assert ((apart <= 1) | small).all(), f"{name}: {int(apart.max())} apart"
            assert not (apart != 0).float().mean() >= 0.05, f"{name}: too many are not the nearest"


# As operators

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
BYTES = torch.uint8  # of FP4, which torch's checks cannot copy

OUTS = {
    "rmsnorm": {"out": F8},
    "gemma_rmsnorm": {"out": torch.float32},
    "qk_rmsnorm": {"q_out": torch.bfloat16, "k_out": torch.bfloat16},
    "sandwich_rmsnorm": {"out": F8, "residual_out": torch.bfloat16},
    "gemma_sandwich_rmsnorm": {"out": torch.bfloat16, "residual_out": torch.float32},
    "fused_rmsnorm_silu": {"out": torch.bfloat16},
    "rmsnorm_silu_gate": {"out": torch.float16},
    "layernorm": {"out": F8},
    "adalayernorm": {"out": F8},
    "add_adalayernorm": {"out": torch.float16, "residual_out": torch.float32},
    "add_layernorm": {"out": torch.float16, "residual_out": torch.float32},
    "softmax": {"out": F8},
    "log_softmax": {"out": torch.float32},
    "logsumexp": {"out": torch.bfloat16},
    "normalize": {"out": torch.float16},
    "rmsnorm_quant_dynamic": {"out": F8, "scale": torch.float32},
    "fused_add_rmsnorm_quant_dynamic": {"out": F8, "scale": torch.float32},
    "silu_mul_fp8": {"out": F8, "scale": torch.float32},
    "quantize_fp8": {"out": F8, "scale": torch.float32},
    "rmsnorm_fp4quant": {"y_fp4": BYTES, "block_scale": BYTES},
    "add_rmsnorm_fp4quant": {"y_fp4": BYTES, "block_scale": BYTES},
}
"""Tensors that functions allocate where none are given, with a type each."""

OPTIONAL = {
    "rmsnorm": {"bias": torch.bfloat16},
    "fused_add_rmsnorm": {"out": torch.bfloat16, "bias": torch.float32},
    "gemma_fused_add_rmsnorm": {"out": torch.float32},
    "fused_add_layernorm": {"out": torch.float16},
    "rmsnorm_quant_dynamic": {"y_out": torch.bfloat16},
    "fused_add_rmsnorm_quant_dynamic": {"y_out": torch.float32},
    "rmsnorm_fp4quant": {"global_scale": torch.float32},
    "add_rmsnorm_fp4quant": {"global_scale": torch.float32, "y_out": torch.bfloat16},
}

OPERATORS = (
    {f"{name}-new": (name, {}) for name in NAMES}
    | {f"{name}-given": (name, kinds) for name, kinds in OUTS.items()}
    | {f"{name}-optional": (name, kinds) for name, kinds in OPTIONAL.items()}
)


def outs(made: Call, kinds: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors for arguments of these types, of the shapes that the call gives them."""
    results = made.run(**{n: t.clone() for n, t in made.tensors.items()})
    x = made.tensors[made.leads]
    shapes = {n: results[n].shape if n in results else x.shape for n in kinds}
    shapes |= {"global_scale": (1,), "bias": x.shape[-1:]}
    return {n: torch.ones(shapes[n], device=x.device).to(kind) for n, kind in kinds.items()}


def operator_check(name: str, kinds: dict[str, torch.dtype], tensors=Tensors()) -> None:
    """torch.library.opcheck of the operator that takes these arguments."""
    made, packet = call(name, (4, 64), tensors=tensors), getattr(torch.ops.graphfuse, name)
    operator = packet.out if kinds is OUTS.get(name) else packet.default
    known = {a.name for a in operator._schema.arguments}
    given = made.tensors | outs(made, kinds) | made.options
    arguments = {n: given[n] for n in known & {*given}} | {n: None for n in known & {"block_scale"} - {*given}}
    # test_schema compares arguments by torch.allclose, which knows no FP8.
    checks = CHECKS[any(getattr(v, "dtype", None) is F8 for v in arguments.values()) :]
    found = torch.library.opcheck(operator, (), arguments, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}
