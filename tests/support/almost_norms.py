"""Modules that are almost a norm: each a norm with a twist, by which it computes something else in some calls.

A twist is written in every place where one can stand, and with each of the norms that are rounded in another way. The
modules are written as text, so that their source is there as that of a file is.
"""

import linecache
from collections.abc import Iterator
from types import SimpleNamespace

import torch

COLUMNS = 32

_TEXT = """
import math
import random
import functools
import torch
from torch import nn
from torch.nn import functional as F

FLAG = False
EPS, TWO, KIND, AXES = 1e-5, 2, torch.float32, [-1]
NUMBER = 1.0
TABLE = {{"on": False, "number": 1.0}}
FLAGS = [False]
SETTINGS = SimpleNamespace(on=False, number=1.0)


def number():
    return NUMBER


def helped(y):
    return y * NUMBER


def mode(module):
    return module.training


def closed(number):
    def times(self, y):
        return y * number
    return times


class Switch:
    on = False


class Base(nn.Module):
    shared = False
    factor = 1.0
    small = 1e-5

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, {columns}))
        self.eps, self.n, self.extra, self.on, self.number = 1e-5, 0, None, False, 1.0
        self.flags, self.table, self.settings = [False], {{"on": False}}, SimpleNamespace(on=False)
        self.axis, self.axes, self.kind, self.keep, self.tiny = -1, [-1], torch.float32, True, torch.tensor(1e-5)
        self.normalized_shape, self.power, self.name, self.seen = ({columns},), 2, "plain", []

    @property
    def computed(self):
        return self.n > 3

    @staticmethod
    def still(y):
        return y

    @classmethod
    def of_class(cls, y):
        return y * cls.factor

    def method(self, y):
        return y * self.number

    def plain(self, x):
        v = x.float()
        return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def forward(self, x):
        return self.plain(x)

    times = closed(1.5)


class Norm(Base):
{body}
"""

# What decides in some calls, and should in no replaced one decide otherwise.
_QUESTIONS = """
x.dim() == 2
x.ndim > 2
len(x.shape) == 3
x.shape[0] > 2
x.size(0) > 2
x.shape[:-1] == (4,)
x.numel() > 100
x.dtype == torch.float32
x.dtype is torch.bfloat16
x.dtype in (torch.float16, torch.float32)
self.weight.dtype == torch.float32
self.weight.dtype != x.dtype
x.is_contiguous()
x.stride(-1) == 1
x.stride()[0] > 32
x.requires_grad
x.is_leaf
x.grad_fn is None
self.weight.requires_grad
torch.is_grad_enabled()
torch.is_inference_mode_enabled()
torch.is_autocast_enabled("cpu")
x.device.type == "cpu"
x.storage_offset() > 0
x.data_ptr() == 0
self.training
mode(self)
not self.training
self.n > 3
self.on
self.extra is not None
self.extra is None
bool(self.flags[0])
self.table["on"]
self.settings.on
self.shared
type(self).shared
self.__class__.shared
Norm.shared
self.computed
self.power == 3
self.name == "other"
self.name in ("other", "another")
FLAG
FLAGS[0]
TABLE["on"]
SETTINGS.on
Switch.on
hasattr(self, "late")
getattr(self, "on")
"late" in self.__dict__
isinstance(x, nn.Parameter)
isinstance(self.extra, torch.Tensor)
type(x) is torch.Tensor
bool((x > 0).all())
y.abs().max() > 1.5
y.sum().item() > 0
x.shape[-1] == 32
x.size(-1) == 16
self.weight.shape[0] == 32
self.weight.numel() > 1
self.normalized_shape == (32,)
self.normalized_shape[0] == 16
random.random() > 2
torch.get_default_dtype() == torch.float64
len(self._forward_hooks) > 0
self.weight is None
any(d == 0 for d in x.shape)
math.sqrt(self.number) > 1
"""

_ENDS = (
    "self.weight * y.to(x.dtype)",
    "(y * (1.0 + self.weight.float())).to(x.dtype)",
    "(self.weight * y).to(x.dtype)",
)
_WAYS = (
    "        if {question}:\n            y = y * 2\n        return {end}",
    "        y = y * (2.0 if {question} else 1.0)\n        return {end}",
    "        if not ({question}):\n            return {end}\n        return {end} * 2",
)
_NORM = """    def forward(self, x):
        v = x.float()
        y = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)
"""

# Lines between the norm and its end, which do, read or write something.
_LINES = """
self.n += 1
self.n = self.n + 1
self.last = y
self.seen.append(1)
self.flags[0] = not self.flags[0]
setattr(self, "late", 1)
object.__setattr__(self, "late", 1)
self.table["on"] = not self.table["on"]
TABLE["number"] = TABLE["number"] + 1
SETTINGS.number += 1
type(self).factor = type(self).factor + 1
self.weight.data.mul_(1.01)
x.mul_(2)
x += 1
y *= 2
y.mul_(2)
y[..., 0] = 0
v[..., 0] = 0
y = y * self.number
y = y * NUMBER
y = y * number()
y = helped(y)
y = self.method(y)
y = self.still(y)
y = self.of_class(y)
y = self.times(y)
y = y * TABLE["number"]
y = y * SETTINGS.number
y = y * self.factor
y = y * Base.factor
y = y * x.shape[0]
y = y * x.dim()
y = y * x.shape[-1] / 32
y = y * (x.shape[-1] // 32)
y = y * self.weight.shape[0] / 32
y = y * self.weight.mean()
y = y.detach()
y = y + y.detach() * 0
y = y.data
y = torch.utils.checkpoint.checkpoint(lambda t: t, y, use_reentrant=False)
y = F.dropout(y, 0.5, self.training)
y = y * torch.rand(1)
y = y + torch.zeros(1)
y = y.clone()
y = y.contiguous()
y = y.view(y.shape)
y = y.view(-1, 32).view(x.shape)
y = y.reshape(x.shape[0], -1, 32).reshape(x.shape)
y = y.view(5, -1, 32).view(x.shape)
y = y.flatten().view_as(x)
y = y.to(torch.bfloat16).float()
y = y.half().float()
y = y.to(x.dtype)
y = y.to(self.weight.dtype)
y = y.double().float()
y = y.to("cpu")
y = y.to(x.device)
y = y.cpu()
y = y.squeeze(0)
y = y.unsqueeze(0)[0]
y = y[..., :32]
y = y[:, :]
y = y[:4]
y = y.transpose(0, -1).transpose(0, -1)
y = y.nan_to_num()
y = y.clamp(-2, 2)
y = torch.where(y > 2, y * 0, y)
y, z = y, v
(y, *z) = (y, v, v)
y = [y, v][self.n]
y = [y, v, x][self.power - 2]
y = (lambda t: t * NUMBER)(y)
y = functools.reduce(lambda a, b: a * b, [y, 1.0])
y = sum([y]) + 0
y = max(y, y, key=id)
for _ in range(self.power - 2): y = y * 2
for _ in range(self.power): y = y * 2
while self.n: y = y * 2
with torch.no_grad(): y = y * 1.0
with torch.autocast("cpu", torch.bfloat16): y = y * 1.0
assert x.shape[-1] == 32
assert x.dim() > 1
assert self.n < 3, "too often"
assert not self.on
if self.on: raise ValueError("on")
y: torch.Tensor = y
pass
global NUMBER; NUMBER = NUMBER + 1
del v
import math as m; y = y * m.sqrt(1.0)
y = getattr(y, "contiguous")()
y = y.__mul__(1.0)
y = eval("y")
y = vars(self)["number"] * y
y = y * len(x.shape) / 3
y = y * (x.dtype.itemsize / 4)
y = y + torch.finfo(x.dtype).eps
y = y * self.get_parameter("weight").numel() / 32
y = y * math.sqrt(self.number)
y = y * max(self.number, 0.5)
y = y * int(self.number)
y = y * bool(self.number)
y = y * -self.number * -1
y = y * self.number ** self.power
y.register_hook(lambda g: g * 2) if y.requires_grad else None
self.register_buffer("late", y.detach())
print(end="")
"""

# What the norm itself is written with: what it adds, to which power, along what, in what type.
_PARTS = {
    "1e-5": """
self.eps + 0
self.eps * 1
self.eps * self.number
--self.eps
float(self.eps)
abs(self.eps)
max(self.eps, 1e-6)
math.sqrt(self.eps) ** 2
(self.eps if self.on else self.eps)
(self.eps or 1e-6)
[self.eps, 1.0][self.n]
EPS
EPS * NUMBER
number() * 1e-5
self.small
Base.small
TABLE["number"] * 1e-5
self.settings.eps
self.tiny
torch.tensor(1e-5)
torch.finfo(torch.float32).eps
torch.finfo(x.dtype).eps
1e-5 * x.shape[0]
1e-5 * x.dim()
1e-5 * x.shape[-1] / 32
1e-5 * len(self.normalized_shape)
(1e-5 if x.dtype == torch.float32 else 1e-6)
(1e-5 if self.extra is None else self.extra)
""",
    "2": """
self.power
TWO
self.power * 1
2.0
(2 if FLAG else 2)
""",
    "-1": """
self.axis
self.axes
AXES
(-1,)
[-1]
list(AXES)
tuple(self.axes)
x.dim() - 1
self.axis * self.power // 2
""",
    "torch.float32": """
self.kind
KIND
torch.float
self.weight.dtype
torch.get_default_dtype()
torch.promote_types(x.dtype, torch.float32)
torch.bfloat16
torch.float64
(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
(torch.float32 if x.dim() > 1 else x.dtype)
""",
    "True": """
self.keep
not self.on
bool(self.power)
self.extra is None
""",
}
_SPELLED = """    def forward(self, x):
        v = x.to(torch.float32)
        y = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(x.dtype)
"""

# Whole forwards, and how they are made.
_BODIES = """
def forward(self, x):
    v = x.float()
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + x.shape[0] * 0.01)).to(x.dtype)
---
def forward(self, x):
    with torch.no_grad():
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.weight * (x.float() * inverse).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return self.weight * (v * torch.rsqrt(v.detach().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
@torch.no_grad()
def forward(self, x):
    return self.plain(x)
---
forward = torch.no_grad()(Base.forward)
---
forward = lambda self, x: F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
---
forward = functools.partialmethod(Base.plain)
---
def forward(self, *x):
    return self.plain(*x)
---
def forward(self, x, **more):
    return self.plain(x, **more)
---
def forward(self, x, scale=1.0):
    return self.plain(x) * scale
---
def forward(self, x, scale=None):
    return self.plain(x) if scale is None else self.plain(x) * scale
---
def forward(self, x, table={}):
    return self.plain(x) if not table else x
---
def forward(self, x, flags=[]):
    flags.append(1)
    return self.plain(x)
---
def forward(self, x):
    return super().forward(x)
---
def forward(self, x):
    return Base.forward(self, x)
---
def forward(self, x):
    return super(Norm, self).forward(x)
---
def forward(self, x):
    return self.plain(x=x)
---
def forward(self, x):
    return self.plain(x) if x.dim() > 1 else self.plain(x) * 2
---
def forward(self, x):
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
---
def forward(self, x):
    return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
---
def forward(self, x):
    return F.rms_norm(x, self.normalized_shape, self.weight)
---
def forward(self, x):
    return F.rms_norm(x, self.normalized_shape, self.weight, self.eps * 2)
---
def forward(self, x):
    return F.rms_norm(x, self.normalized_shape, self.weight, max(self.eps, 1e-6))
---
def forward(self, x):
    return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)
---
def forward(self, x):
    return F.layer_norm(x, x.shape[1:], None, None, self.eps)
---
def forward(self, x):
    return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), None, self.eps).type_as(x)
---
def forward(self, x):
    return F.layer_norm(x.float(), self.normalized_shape, self.weight, None, self.eps).type_as(x)
---
def forward(self, x):
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
---
def forward(self, x):
    dtype = x.dtype
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight * x).to(dtype)
---
def forward(self, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(self.weight.dtype)
    return self.weight * x
---
def forward(self, x):
    x = x.to(self.weight.dtype)
    v = x.float()
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(x.dim() - 1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(2, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(self.power).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) / 32 + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    return (v / torch.sqrt(v.square().mean(-1, True) + self.eps) * self.weight.float()).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    y = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    return y.to(x.dtype) if self.eps < 0.1 else x
---
def forward(self, x):
    v = x.float()
    y = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps) * (self.eps + self.weight.float())
    return y.to(x.dtype)
---
def forward(self, x):
    b, *rest = x.shape
    v = x.float().view(b, *rest)
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
def forward(self, x):
    b, s, d = x.shape
    v = x.float().view(b, s, d)
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
def forward(self, x):
    *rows, d = x.shape
    v = x.float().view(*rows, d // 8, 8)
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).view(*rows, d).to(x.dtype)
---
def forward(self, x):
    v = x.float().reshape(-1, 32)
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).view(x.shape).to(x.dtype)
---
def forward(self, x):
    v = x.float().unflatten(-1, (self.power, -1))
    return self.weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    w = self.weight if self.extra is None else self.weight * self.extra
    return w * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
def forward(self, x):
    v = x.float()
    w = 1.0 + self.weight if self.shared else self.weight
    return w * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
---
def forward(self, x):
    inner = lambda t: t * NUMBER
    return inner(self.plain(x))
---
def forward(self, x):
    def inner(t):
        return t * NUMBER
    return inner(self.plain(x))
---
def forward(self, x):
    return [self.plain(t) for t in (x,)][0]
---
def forward(self, x):
    return self.plain(x), x
---
def forward(self, x):
    return self.__getattr__("weight") * self.plain(x) / self.weight
---
def forward(self, x):
    return self.plain(x * NUMBER) / NUMBER
---
def __getattr__(self, name):
    return 0.5 if name == "eps" else super().__getattr__(name)
---
def __getattribute__(self, name):
    return 0.5 if name == "eps" else super().__getattribute__(name)
---
eps = property(lambda self: 0.5 if self.on else 1e-5, lambda self, value: None)
---
def plain(self, x):
    return super().plain(x) * (2.0 if self.on else 1.0)
---
def forward(self, x):
    return torch.utils.checkpoint.checkpoint(self.plain, x, use_reentrant=False)
---
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 2

def forward(self, x):
    return self.plain(self.Own.apply(x))
---
def forward(self, x):
    if torch.jit.is_scripting():
        return x
    return self.plain(x)
---
def forward(self, x):
    if x.shape[-1] != 32:
        raise ValueError("columns")
    return self.plain(x)
---
def forward(self, x):
    if x.shape[-1] == 1:
        return x
    return self.plain(x)
---
def forward(self, x):
    out = torch.empty_like(x)
    torch.mul(self.plain(x), 1.0, out=out)
    return out
"""


_LAYER = """    def __init__(self):
        super().__init__()
        self.mixer, self.mlp = nn.Linear({columns}, {columns}), nn.Linear({columns}, {columns})
        self.before, self.after = Base(), Base()
        self.gain = nn.Parameter(torch.full(({columns},), 0.5))
        with torch.no_grad():
            for p in (*self.mixer.parameters(), *self.mlp.parameters()):
                p.copy_(torch.linspace(-0.3, 0.4, p.numel()).cos().view_as(p))

    def mixed(self, x):
        return self.mixer(x)

    def parts(self, x):
        return [self.mixer(x), x]

    def forward(self, x{argument}):
        h = self.mixer(self.before(x))
        {line}
        x = x + h
        return x + self.mlp(self.after(x))
"""

# Lines of a layer before the sum that goes into its second norm.
_LAYER_LINES = """
pass
h = h * NUMBER
h = h * number()
h = helped(h)
h = self.method(h)
h = self.mixed(h)
h, _ = self.parts(h)
h = h * TABLE["number"]
h = h * self.number
h = h * self.factor
h = h * Base.factor
h = h * SETTINGS.number
h = h * self.gain
h = h * self.mlp.weight.mean()
h = h * torch.rand(1)
h = h + torch.zeros(1)
h = h * float(torch.is_grad_enabled())
h = h * torch.rand_like(h).gt(2)
h = h * x.shape[0]
h = h * x.dim()
h = h * (2 if x.shape[0] > 2 else 1)
h = h * (2 if self.on else 1)
h = h * (2 if FLAG else 1)
h = h * (2 if self.extra is not None else 1)
h = h * (2 if self.training else 1)
h = h if self.extra is None else h + self.extra
h = F.dropout(h, 0.5, self.training)
h = h * (scale if scale is not None else 1.0)
h = h.float().to(x.dtype)
h = h.detach()
h = h.mul_(2)
h *= 2
x = x.clone(); h = torch.add(h, x)
self.last = h
self.n += 1
self.seen.append(1)
with torch.no_grad(): h = h * 1.0
h = h * len(x.shape)
h = [h, x][self.n]
h = torch.stack([h, x])[0]
h = torch.where(h > 0, h, x)
a, b = h.unbind(0)[:2]; h = torch.stack([a, b])
h = h.view(x.shape)
h = h.transpose(0, -1).transpose(0, -1)
h = h.double().to(x.dtype)
"""


def layers() -> Iterator[tuple[str, str]]:
    """The text of layers of two norms and a sum between them."""
    for line in _LAYER_LINES.strip().splitlines():
        argument = ", scale=None" if "scale" in line else ""
        lines = "\n        ".join(line.split("; "))
        yield line, _LAYER.format(columns=COLUMNS, line=lines, argument=argument)


def bodies() -> Iterator[tuple[str, str]]:
    """The text of classes, each with a name of its own."""
    for i, question in enumerate(_QUESTIONS.strip().splitlines()):
        yield question, _NORM + _WAYS[i % 3].format(question=question, end=_ENDS[i // 3 % 3])
    for i, line in enumerate(_LINES.strip().splitlines()):
        lines = "".join(f"        {part}\n" for part in line.split("; "))
        yield line, f"{_NORM}{lines}        return {_ENDS[i % 3]}"
    for part, others in _PARTS.items():
        before, after = _SPELLED.rsplit(f"({part}" if part == "torch.float32" else part, 1)
        for other in others.strip().splitlines():
            opening = "(" if part == "torch.float32" else ""
            yield f"{part}: {other}", f"{before}{opening}{other}{after}"
    for body in _BODIES.strip().split("\n---\n"):
        yield body.strip(), "".join(f"    {line}\n" for line in body.strip().splitlines())


def made(name: str, body: str) -> dict[str, object]:
    """The names of the file that a class is in; its class is ``Norm``."""
    text = _TEXT.format(columns=COLUMNS, body=body)
    file = f"<almost a norm: {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, object] = {"__name__": "a file of its own", "SimpleNamespace": SimpleNamespace}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel()).sin().view(shape).to(dtype)
