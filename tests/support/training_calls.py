"""Calls of every operator of graphfuse.torch, and what they and their gradients are in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphfuse import torch as training

EPS = 1e-5


def norm(x, weight):
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return y if weight is None else y * weight


def layer_norm(x, weight, bias=None):
    apart = x - x.mean(-1, keepdim=True)
    y = apart * (apart.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _added(x, residual, weight):
    total = x + residual
    return norm(total, weight), total


def _silu(x, weight):
    return torch.nn.functional.silu(norm(x, weight))


@dataclass(frozen=True)
class Operator:
    """One operator. tensors: its arguments. of: what it computes, by torch's own operations, in any type. statistics:
    numbers a row that it keeps for backward."""

    function: Callable[..., object]
    tensors: tuple[str, ...]
    of: Callable[..., object]
    statistics: int = 1

    @property
    def kept(self) -> tuple[str, ...]:
        """The full tensors and vectors that backward reads."""
        normalized = "total" if "residual" in self.tensors else "x"
        return (normalized, *(n for n in self.tensors if n in ("gate", "weight")))

    def run(self, tensors: dict[str, torch.Tensor | None], eps: float | None = EPS) -> tuple[torch.Tensor, ...]:
        return results(self.function(*(tensors[name] for name in self.tensors), eps=eps))

    def exact(self, tensors: dict[str, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        return results(self.of(*(tensors[name] for name in self.tensors)))


def results(made) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


OPERATORS = {
    "rms_norm": Operator(training.rms_norm, ("x", "weight"), norm),
    "rms_norm_silu": Operator(training.rms_norm_silu, ("x", "weight"), _silu),
    "rms_norm_silu_gate": Operator(
        training.rms_norm_silu_gate, ("x", "gate", "weight"), lambda x, gate, weight: _silu(x, weight) * gate
    ),
    "add_rms_norm": Operator(training.add_rms_norm, ("x", "residual", "weight"), _added),
    "rms_norm_bias": Operator(
        lambda x, weight, bias, eps: training.rms_norm(x, weight, eps, bias),
        ("x", "weight", "bias"),
        lambda x, weight, bias: norm(x, weight) + bias,
    ),
    "add_rms_norm_bias": Operator(
        lambda x, residual, weight, bias, eps: training.add_rms_norm(x, residual, weight, eps, bias),
        ("x", "residual", "weight", "bias"),
        lambda x, residual, weight, bias: (norm(x + residual, weight) + bias, x + residual),
    ),
    "layer_norm": Operator(
        lambda x, weight, eps: training.layer_norm(x, weight, eps=eps or EPS), ("x", "weight"), layer_norm, 2
    ),
    "layer_norm_bias": Operator(
        lambda x, weight, bias, eps: training.layer_norm(x, weight, bias, eps or EPS),
        ("x", "weight", "bias"),
        layer_norm,
        2,
    ),
    "add_layer_norm": Operator(
        lambda x, residual, weight, eps: training.add_layer_norm(x, residual, weight, eps=eps or EPS),
        ("x", "residual", "weight"),
        lambda x, residual, weight: (layer_norm(x + residual, weight), x + residual),
        2,
    ),
    "add_layer_norm_bias": Operator(
        lambda x, residual, weight, bias, eps: training.add_layer_norm(x, residual, weight, bias, eps or EPS),
        ("x", "residual", "weight", "bias"),
        lambda x, residual, weight, bias: (layer_norm(x + residual, weight, bias), x + residual),
        2,
    ),
    "gemma_rms_norm": Operator(training.gemma_rms_norm, ("x", "weight"), lambda x, weight: norm(x, weight + 1)),
    "gemma_add_rms_norm": Operator(
        training.gemma_add_rms_norm, ("x", "residual", "weight"), lambda x, r, weight: _added(x, r, weight + 1)
    ),
}

"""Those whose gradients are one kernel. Of a layer norm they take two sums of a row beside sums over rows."""
WITHOUT_WEIGHT = [name for name in OPERATORS if not name.startswith("gemma") and not name.endswith("bias")]
SCALES = ("weight", "bias")


def tensors(name, shape=(5, 64), dtype=torch.float32, weight=None, device="cpu", seed=0, grad=True):
    """Random arguments by name. dtype: of full tensors, or one for each by name; weight: its type, by default
    the same; False for none."""
    made, generator = {}, torch.Generator().manual_seed(seed)
    for argument in OPERATORS[name].tensors:
        if argument == "weight" and weight is False:
            made[argument] = None
            continue
        kind = dtype.get(argument, dtype["x"]) if isinstance(dtype, dict) else dtype
        kind = weight or kind if argument in SCALES else kind
        of = shape[-1:] if argument in SCALES else shape
        values = torch.randn(of, generator=generator, dtype=torch.float64)
        made[argument] = values.to(device, kind).requires_grad_(grad)
    return made


def grads(made: tuple[torch.Tensor, ...], seed=1) -> tuple[torch.Tensor, ...]:
    """Random gradients of results."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype) for y in made)


def gradients(made, given, outer) -> dict[str, torch.Tensor]:
    """Of those arguments that ask for one."""
    asked = {n: t for n, t in given.items() if t is not None and t.requires_grad}
    made, outer = zip(*((y, g) for y, g in zip(made, outer, strict=True) if y.requires_grad), strict=True)
    return dict(zip(asked, torch.autograd.grad(made, [*asked.values()], outer), strict=True))


def check(name: str, given: dict[str, torch.Tensor | None]) -> None:
    """Results and gradients against float64, each to the rounding of its type and float32's of what was added."""
    operator = OPERATORS[name]
    made = operator.run(given)
    outer = grads(made)
    got = dict(zip(("y", "total"), made, strict=False)) | gradients(made, given, outer)
    wide = {n: None if t is None else t.detach().double().requires_grad_(t.requires_grad) for n, t in given.items()}
    if "residual" in given:
        close(made[1], operator.exact(wide)[1])
        wide = with_sum(operator, wide, made[1])
    exact = operator.exact(wide)
    assert [y.requires_grad for y in made] == [y.requires_grad for y in exact]
    want = dict(zip(("y", "total"), exact, strict=False)) | gradients(exact, wide, [g.double() for g in outer])
    for n, value in want.items():
        assert got[n].dtype is (made[1] if n == "total" else given["x" if n == "y" else n]).dtype, n
        close(got[n], value)


def with_sum(operator: Operator, given: dict[str, torch.Tensor], total: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments whose residual sum is `total`, as it was returned, which is what is normalized."""
    apart = total.double() - operator.exact(given)[1]
    residual = given["residual"]
    return given | {"residual": (residual + apart).detach().requires_grad_(residual.requires_grad)}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    if not want.numel():
        return
    unit, scale = torch.finfo(got.dtype).eps, max(1.0, want.abs().max().item())
    torch.testing.assert_close(got.double(), want, rtol=0.51 * unit + 1e-6, atol=1e-5 * scale)


def operator_checks(name: str, weight=None, device: str = "cpu") -> None:
    """torch.library.opcheck of the three operators of a name."""
    packet = lambda suffix: getattr(torch.ops.graphfuse, name + suffix).default  # noqa: E731
    operator = OPERATORS[name]
    for grad in (False, True):
        given = tensors(name, (4, 64), weight=weight, device=device, grad=grad)
        passed(packet(""), [*given.values(), EPS])
    given = {n: None if t is None else t.detach() for n, t in given.items()}
    passed(packet("_training"), [*given.values(), EPS])
    made = packet("_training")(*given.values(), EPS)
    given |= dict(zip(("y", "total"), made[: -operator.statistics], strict=False))
    dy, *dtotal = grads(made[: -operator.statistics])
    read = [dy, *(given[n] for n in operator.kept), *made[-operator.statistics :], *dtotal]
    needed = [argument != "weight" or weight is not False for argument in operator.tensors]
    for asked in {(*needed,), (*needed[:-1], False), (*(False,) * (len(needed) - 1), needed[-1])} - {
        (False,) * len(needed)
    }:
        passed(packet("_backward"), [*read, *asked])


def passed(operator, arguments) -> None:
    found = torch.library.opcheck(operator, tuple(arguments))
    assert set(found.values()) == {"SUCCESS"}
