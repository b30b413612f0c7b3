"""Random functions of torch as source, for comparing what compiles them with eager mode and with float64.

A source names types (FP32, BF16, FP16), so that the same text runs in float64 where these names mean that. Masks come
only of values that are exact: a mask that differs in one element says nothing about the arithmetic.
"""

import random
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
DOUBLE = dict.fromkeys(TYPES, torch.float64)

_EXACT = (
    "-{a}",
    "{a}.abs()",
    "F.relu({a})",
    "{a} * 0.3",
    "{a} + 1",
    "{a} / 3",
    "2 - {a}",
    "{a}.clamp(-0.7, 0.9)",
    "{a}.clamp(min=-0.3)",
    "torch.clamp(max=0.4, input={a})",
    "F.hardtanh({a})",
    "F.leaky_relu({a}, 0.1)",
    "{a}.square()",
    "{a} ** 2",
    "{a} ** 3",
    "{a}.pow(1)",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.detach()",
    "F.dropout({a}, 0.0, True)",
)
_FUNCTIONS = (
    "{a}.clamp(-4, 4).exp()",
    "{a}.tanh()",
    "{a}.sigmoid()",
    "F.silu({a})",
    "F.gelu({a})",
    "F.gelu({a}, approximate='tanh')",
    "({a}.abs() + 1).log()",
    "({a}.abs() + 0.5).sqrt()",
    "({a}.abs() + 0.5).rsqrt()",
    "({a}.abs() + 0.5) ** -0.5",
    "({a}.abs() + 0.5) ** 0.5",
    "1 / ({a}.abs() + 0.5)",
    "({a}.abs() + 0.5).reciprocal()",
    "({a}.abs() + 0.5) ** -1",
    "({a}.abs() + 0.5) ** 1.5",
)
_BINARY = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "torch.add({a}, {b}, alpha=2)",
    "torch.rsub({a}, {b})",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b}.to({a}.dtype))",
    "{a} / ({b}.abs() + 0.5)",
    "torch.where({m}, {a}, {b})",
    "torch.where({m}, {a}, -0.3)",
    "torch.where({m}, 0.7, {a})",
    "{a}.masked_fill({m}, -2.0)",
    "{a} * {m}",
    "torch.addcmul({a}, {a}, {b})",
    "torch.lerp({a}, {b}.to({a}.dtype), 0.3)",
    "{a} * {b}.type_as({a})",
)
_MASKS = (
    "{a} > 0.1",
    "{a} <= {b}",
    "{a} != 0.3",
    "0.1 < {a}",
    "{a}.to(torch.bool)",
    "~{m}",
    "{m} & {k}",
    "{m} + {k}",
    "{m} * {k}",
    "torch.where({m}, {k}, {m})",
    "{m} == {k}",
    "torch.maximum({m}, {k})",
)
_CASTS = ("{a}.float()", "{a}.to(FP32)", "{a}.to(BF16)", "{a}.to(FP16)", "{m}.to(FP32)", "{m}.to(BF16)")
_ROWS = (
    "{a}.mean(-1{keep})",
    "{a}.sum(-1{keep})",
    "{a}.sum(dim=-1, dtype=FP32{keep})",
    "{a}.mean(dim=-1, dtype=BF16{keep})",
    "{a}.amax(-1{keep})",
    "{a}.amin(dim=(-1,){keep})",
    "{a}.max(-1{keep}).values",
    "{a}.norm(dim=-1{keep})",
    "{a}.abs().sum(-1{keep})",
    "torch.linalg.vector_norm({a}, 1, dim=-1{keep})",
    "torch.linalg.vector_norm({a}, float('inf'), dim=-1{keep})",
    "torch.logsumexp({a}, -1{keep})",
    "{a}.var(-1{keep})",
    "{a}.var(-1, correction=0{keep})",
    "{a}.std(-1, unbiased=False{keep})",
    "torch.var_mean({a}, -1{keep})[0]",
    "torch.var_mean({a}, -1, correction=0{keep})[1]",
    "{a}.float().pow(2).mean(-1{keep})",
    "{a}.square().sum({a}.dim() - 1{keep})",
    "{a}.sum(0{keep})",
    "{a}.amax(0{keep})",
    "{a}.norm(dim=0{keep})",
    "torch.logsumexp({a}, 0{keep})",
)
_NORMS = (
    "torch.softmax({a}, -1)",
    "torch.softmax({a}, dim=-1, dtype=FP32)",
    "F.softmax({a} * 0.25, {a}.dim() - 1).to({a}.dtype)",
    "F.log_softmax({a}, -1)",
    "F.log_softmax({a}, -1, dtype=FP32)",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.layer_norm({a}, ({a}.shape[-1],), {v}.to({a}.dtype), {v}.to({a}.dtype), 1e-3)",
    "F.rms_norm({a}, ({a}.shape[-1],))",
    "F.rms_norm({a}, ({a}.shape[-1],), {v}.to({a}.dtype), 1e-3)",
    "F.normalize({a}, dim=-1)",
    "F.normalize({a}, p=1, dim=-1, eps=1e-3)",
    "F.normalize({a}, dim=0)",
    "torch.softmax({a}, 0)",
    "({a}.float() * torch.rsqrt({a}.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to({a}.dtype) * {v}",
    "({a} - {a}.mean(-1, keepdim=True)) / ({a}.float().var(-1, keepdim=True) + 1e-2).sqrt()",
)
_VIEWS = (
    "{a}.unsqueeze(-1)",
    "{a}.unsqueeze(0)",
    "{a}[..., None]",
    "{a}[:, None]",
    "{a}.squeeze()",
    "{a}.squeeze(-1)",
    "{a}.squeeze(0)",
    "{a}.transpose(-1, -2)",
    "{a}.transpose(0, 1)",
    "{a}.view({a}.shape)",
    "{a}.reshape(-1, {a}.shape[-1])",
    "{a}.flatten(0, 1)",
    "{a}.unflatten(-1, (2, -1))",
    "{a}.flatten(-2)",
    "{a}.expand_as({b})",
    "{a}.expand({b}.shape)",
    "{a}[..., : {a}.shape[-1] // 2]",
    "{a}[:1]",
    "{a}[..., ::2]",
    "{a}.chunk(2, -1)[0]",
    "{a}.narrow(-1, 0, 1)",
    "{a}.view_as({b})",
)
_IN_PLACE = ("add_({b})", "mul_(0.5)", "relu_()", "clamp_(-1, 1)", "masked_fill_({m}, 0.5)", "zero_()", "copy_({b})")


@dataclass
class _Value:
    name: str
    is_exact: bool
    made: torch.Tensor
    text: str = ""
    """What it is made of."""


@dataclass
class RandomFunction:
    """A function by its seed. inputs: makes what it is called with, for rows of leading extents. exact: by output,
    whether nothing in it may be rounded otherwise than in eager mode."""

    seed: int
    source: str = ""
    names: tuple[str, ...] = ()
    exact: tuple[bool, ...] = ()
    columns: int = 16
    extents: tuple[int, int] = (2, 3)
    kinds: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    trained: tuple[str, ...] = ()

    @property
    def is_of_rows(self):
        """True if it is made for tensors of any leading extents: what is joined or split is not."""
        return not any(f"{a}, {b}" in self.source for a, b in [self.extents])

    def function(self, types=TYPES):
        names = {"torch": torch, "F": F, **types}
        exec(self.source, names)
        return names["function"]

    def inputs(self, extents=None, double=False):
        """Tensors by name; in float64 with the same values."""
        rows, columns = extents or self.extents, self.columns
        generator = torch.Generator().manual_seed(self.seed)
        made = {}
        for name in self.names:
            kind, dtype = self.kinds[name], TYPES[self.types[name]]
            if kind in ("same", "view"):
                made[name] = made[self.names[0]] if kind == "same" else made[self.names[0]][..., :1]
                continue
            t = _tensor(kind, rows, columns, dtype, generator)
            if double and t.is_floating_point():
                t = t.double()
            made[name] = t
        return made


def _tensor(kind, rows, columns, dtype, generator):
    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    if kind == "mask":
        return torch.randn(*rows, columns, generator=generator) > 0.3
    if kind == "transposed":
        return draw(rows[0], columns, rows[1]).transpose(1, 2)
    if kind == "strided":
        return draw(*rows, 2 * columns)[..., :columns]
    if kind == "swapped":
        return draw(rows[1], rows[0], columns).transpose(0, 1)
    if kind == "repeated":
        return draw(1, rows[1], columns).expand(*rows, columns)
    shapes = {
        "full": (*rows, columns),
        "vector": (columns,),
        "row": (*rows, 1),
        "flat": rows,
        "sample": (rows[0], 1, columns),
        "place": (rows[1], columns),
        "ones": (1, 1, columns),
        "one": (),
        "element": (1,),
        "same": (),
        "view": (),
    }
    return draw(*shapes[kind])


_KINDS = ("full", "full", "vector", "row", "flat", "sample", "place", "ones", "one", "element", "transposed", "strided")
_RARE = ("swapped", "repeated", "same", "view")


def random_function(seed: int, steps: int = 20, writes: bool = True) -> RandomFunction:
    """A function of up to that many operations."""
    rng = random.Random(seed)
    found = RandomFunction(seed)
    found.columns = rng.choice((16, 16, 16, 8, 24, 2, 1))
    found.extents = rng.choice(((2, 3), (2, 3), (4, 2), (1, 3), (3, 1), (1, 1)))
    kinds = ["full", *rng.choices(_KINDS, k=rng.randint(1, 4)), "mask", "mask"]
    if rng.random() < 0.2:
        kinds.append(rng.choice(_RARE))
    main = rng.choice(("BF16", "BF16", "FP32", "FP16"))
    for number, kind in enumerate(kinds):
        name = f"t{number}"
        found.kinds[name] = kind
        found.types[name] = main if kind == "full" or rng.random() < 0.6 else rng.choice(("FP32", "BF16", "FP16"))
    found.names = tuple(found.kinds)
    shared = any(kind in ("same", "view") for kind in kinds)
    floats = [n for n in found.names if found.kinds[n] not in ("mask", "same", "view")]
    found.trained = tuple(n for n in floats if rng.random() < 0.7) if not shared else ()
    _write(found, rng, steps, writes)
    return found


def _write(found: RandomFunction, rng: random.Random, steps: int, writes: bool) -> None:
    space = {"torch": torch, "F": F, **TYPES}
    values = [_Value(name, True, t) for name, t in found.inputs().items()]
    space |= {v.name: v.made for v in values}
    lines, count, wanted = [], 0, rng.randint(3, steps)
    weights = {"unary": 4, "function": 3, "binary": 6, "mask": 1, "cast": 3, "rows": 5, "norm": 4, "view": 2}
    if writes:
        weights |= {"write": 1}
    tries = 0
    while count < wanted and tries < 400:
        tries += 1
        kind = rng.choices([*weights], [*weights.values()])[0]
        floats = [v for v in values if v.made.is_floating_point()]
        recent = floats[-4:] if rng.random() < 0.5 else floats
        if rng.random() < 0.6:  # rows, of which most is made
            recent = [v for v in recent if v.made.shape == values[0].made.shape] or recent
        a = rng.choice(recent if kind != "mask" else [v for v in floats if v.is_exact])
        b = rng.choice([v for v in floats if v.is_exact] if kind == "mask" else floats)
        masks = [v for v in values if v.made.dtype is torch.bool and v.is_exact]
        m, k = rng.choice(masks), rng.choice(masks)
        vectors = [v for v in floats if v.made.shape == (found.columns,)]
        texts = {
            "unary": _EXACT,
            "function": _FUNCTIONS,
            "binary": _BINARY,
            "mask": _MASKS,
            "cast": _CASTS,
            "rows": _ROWS,
            "norm": _NORMS,
            "view": _VIEWS,
            "write": _IN_PLACE,
        }[kind]
        text = rng.choice(texts)
        if "{v}" in text and not vectors:
            continue
        read = {"a": a, "b": b, "m": m, "k": k, "v": rng.choice(vectors) if vectors else a}
        used = [v for key, v in read.items() if f"{{{key}}}" in text or kind == "write" and key == "a"]
        names = {key: v.name for key, v in read.items()} | {"keep": rng.choice(("", ", keepdim=True"))}
        name = f"v{count}"
        line = f"{name} = {text.format(**names)}"
        exact = all(v.is_exact for v in used) and kind in ("unary", "binary", "mask", "cast", "view", "write")
        exact = exact and "lerp" not in text and "addcmul" not in text
        if "** 3" in text and a.made.dtype is torch.float16:  # whose square no CPU rounds, and GPUs do
            exact = False
        if kind == "write":
            # In place on a copy, which has been read before or is read behind it.
            copy = rng.choice((f"{a.name} * 1", f"{a.name}.clone()", f"{a.name} + 0.5"))
            line = f"{name} = {copy}\n    u{count} = {name}.view({name}.shape) * 2\n    {name}.{text.format(**names)}"
        elif rng.random() < 0.05:
            line = f"with torch.no_grad():\n        {line}"
        before = {v.name: v.made._version for v in values}
        try:
            trial = dict(space)
            exec(line.replace("\n    ", "\n"), trial)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        made = trial[name]
        if not isinstance(made, torch.Tensor) or made.numel() > 4096 or made.numel() == 0 or made.dim() > 4:
            continue
        if made.is_floating_point() and not bool(made.isfinite().all() and made.abs().max() < 1e3):
            continue
        if any(v.made._version != before[v.name] for v in values):
            continue
        space[name] = made
        values.append(_Value(name, exact, made, line.partition(" = ")[2]))
        if kind == "write":
            space[f"u{count}"] = trial[f"u{count}"]
            values.append(_Value(f"u{count}", a.is_exact, trial[f"u{count}"]))
        lines.append(line)
        count += 1
    made = [v for v in values if v.name not in found.names]
    ends = [v for v in made[:-1] if not any(f"{v.name}" in re.findall(r"\w+", other.text) for other in made)]
    ends = rng.sample(ends, min(len(ends), 3))  # few values that nobody reads
    outputs = [made[-1], *ends, *rng.sample([v for v in made[:-1] if v not in ends], min(len(made) - 1 - len(ends), 1))]
    given = ", ".join(found.names)
    body = "\n".join(f"    {line}" for line in lines)
    found.source = f"def function({given}):\n{body}\n    return {', '.join(v.name for v in outputs)},\n"
    found.exact = tuple(v.is_exact for v in outputs)
