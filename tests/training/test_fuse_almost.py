"""Modules that are almost norms, fused and not: values, gradients, errors, and what they write are the same in every
call, whatever changes between calls."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from graphfuse.torch import fuse
from support.almost_norms import COLUMNS, bodies, layers, made, tensor

HALF, OTHER_HALF = torch.bfloat16, torch.float16

MODULES, LAYERS = list(bodies()), list(layers())
PARTS = 8


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: threads would wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def calls() -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Inputs, and whether gradients are on."""
    yield "rows", tensor(4, COLUMNS), True
    yield "without gradients", tensor(4, 3, COLUMNS), False
    yield "a row", tensor(COLUMNS), False
    yield "four dimensions", tensor(2, 3, 2, COLUMNS), False
    yield "strided", tensor(COLUMNS, 5, 2).transpose(0, 2), True
    yield "bfloat16", tensor(2, 3, COLUMNS, dtype=HALF), True
    yield "float16", tensor(5, COLUMNS, dtype=OTHER_HALF), False
    yield "double", tensor(5, COLUMNS, dtype=torch.float64), False
    yield "none", tensor(0, COLUMNS), False
    yield "other columns", tensor(4, COLUMNS // 2), False


def changes(names: dict[str, object]) -> Iterator[tuple[str, Callable[[torch.nn.Module], object]]]:
    """What is changed between calls, one after the other, of a module; or of its file, with no harm if twice."""
    yield "training", lambda m: m.train()
    yield "evaluation", lambda m: m.eval()
    for name, value in {
        "on": True,
        "extra": torch.full((COLUMNS,), 2.0),
        "number": 2.0,
        "eps": 0.5,
        "power": 3,
        "name": "other",
        "n": 1,
        "shared": True,
        "normalized_shape": (COLUMNS // 2,),
        "late": 1,
        "kind": HALF,
        "axis": 0,
        "keep": 1,
    }.items():
        yield name, lambda m, name=name, value=value: setattr(m, name, value)
        if name in ("power", "normalized_shape", "n", "on"):
            old = {"power": 2, "normalized_shape": (COLUMNS,), "n": 0, "on": False}[name]
            yield f"{name} again", lambda m, name=name, old=old: setattr(m, name, old)
    yield "axes", lambda m: m.axes.__setitem__(0, 0)
    yield "tiny", lambda m: m.tiny.fill_(0.25)
    yield "KIND", lambda m: names.update(KIND=HALF)
    yield "EPS", lambda m: names.update(EPS=0.75)
    yield "TWO", lambda m: names.update(TWO=4)
    yield "AXES", lambda m: names["AXES"].__setitem__(0, 0)
    yield "small", lambda m: setattr(names["Base"], "small", 0.125)
    yield "flags", lambda m: m.flags.__setitem__(0, True)
    yield "table", lambda m: m.table.update(on=True)
    yield "settings", lambda m: setattr(m.settings, "on", True)
    yield "FLAG", lambda m: names.update(FLAG=True)
    yield "NUMBER", lambda m: names.update(NUMBER=3.0)
    yield "TABLE", lambda m: names["TABLE"].update(on=True, number=4.0)
    yield "FLAGS", lambda m: names["FLAGS"].__setitem__(0, True)
    yield "SETTINGS", lambda m: vars(names["SETTINGS"]).update(on=True, number=5.0)
    yield "a class", lambda m: setattr(names["Switch"], "on", True)
    yield "its class", lambda m: setattr(names["Norm"], "factor", 2.0)
    yield "its base", lambda m: setattr(names["Base"], "factor", 3.0)
    yield "a function", lambda m: names.update(helped=lambda y: y * 7)
    yield "a method", lambda m: setattr(names["Base"], "method", lambda self, y: y * 8)
    yield "an own method", lambda m: setattr(m, "still", lambda y: y * 9)
    yield "a number of another type", lambda m: setattr(m, "number", torch.tensor(2.5))
    if "before" in names["Norm"]().__dict__["_modules"]:
        yield "the epsilon of a norm", lambda m: setattr(m.after, "eps", 0.25)
        yield "another norm", lambda m: setattr(m, "after", m.before)
        yield "a hook of a norm", lambda m: m.before.register_forward_hook(lambda m, given, y: y * 2)
        yield "another module", lambda m: setattr(m, "mixer", torch.nn.Identity())
        yield "no norm", lambda m: setattr(m, "before", torch.nn.Identity())
    yield "bfloat16", lambda m: m.to(HALF)
    yield "float", lambda m: m.float()
    yield "a weight with one element", lambda m: setattr(m, "weight", torch.nn.Parameter(torch.ones(1)))
    yield "no weight", lambda m: setattr(m, "weight", None)
    yield "another weight", lambda m: setattr(m, "weight", torch.nn.Parameter(torch.full((COLUMNS,), 1.25)))
    yield "base's forward", lambda m: setattr(names["Base"], "plain", lambda self, x: x * 3)
    yield "another class", lambda m: setattr(m, "__class__", names["Twice"])
    yield "forward", lambda m: setattr(names["Twice"], "forward", lambda self, x: x * 4)


def result(module: torch.nn.Module, x: torch.Tensor, has_gradients: bool) -> object:
    """What a call returns or raises, with gradients, and what is left in the module."""
    torch.random.default_generator.manual_seed(0)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(has_gradients and x.dtype.is_floating_point)
    given = x * 1.0 if has_gradients else x
    module.zero_grad()
    with torch.set_grad_enabled(has_gradients):
        try:
            y = module(given)
            found = [given.detach(), *(y if isinstance(y, tuple) else (y,))]
            if has_gradients and found[1].requires_grad:
                found[1].float().mul(found[1].detach().float().cos()).sum().backward()
                found += [x.grad, None if module.weight is None else module.weight.grad]
        except Exception as error:
            found = [type(error)]
    state = {n: v for n, v in vars(module).items() if not n.startswith("_") and n not in ("forward", "still")}
    return found, state, dict(module.named_buffers())


def same(a: object, b: object, rounds: bool) -> bool:
    """rounds: whether something is rounded to a half type on the way. What gradients are summed of is then rounded in
    one and not in the other, so that they differ by their largest."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype is not b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad:
            return False
        rtol = 4e-2 if rounds or a.dtype in (HALF, OTHER_HALF) else 2e-4
        largest = b.detach().float().abs().max().item() if rounds and b.numel() else 0.0
        atol = max(rtol, largest / 32 if largest == largest and largest != float("inf") else 0.0)
        return torch.allclose(a.float(), b.float(), rtol=rtol, atol=atol, equal_nan=True)
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(same(v, w, rounds) for v, w in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[n], rounds) for n, v in a.items())
    return type(a) is type(b) and a == b


def is_rounded(module: torch.nn.Module, x: torch.Tensor, names: dict[str, object], body: str) -> bool:
    """True if a call may round something to a half type."""
    kinds = {
        x.dtype,
        module.kind if hasattr(module, "kind") else None,
        names["KIND"],
        *(p.dtype for p in module.parameters()),
    }
    return bool(kinds & {HALF, OTHER_HALF}) or "bfloat16()" in body or "half()" in body or "to(torch.bfloat16" in body


def replaced_and_same(name: str, body: str) -> bool:
    names = made(name, body)
    names["Twice"] = type("Twice", (names["Norm"],), {"forward": lambda self, x: x * 2})
    own = names["Norm"]()
    fused = copy.deepcopy(own)
    fuse(fused)
    if "forward" not in vars(fused):
        return False  # it is what it was

    def check(after: str, cases: list[tuple[str, torch.Tensor, bool]]) -> None:
        for case, x, has_gradients in cases:
            start = {n: copy.copy(names[n]) for n in ("TABLE", "SETTINGS", "FLAGS", "NUMBER")}
            shared = names["Norm"].__dict__.get("factor")
            want = result(own, x, has_gradients)
            # What the first of both wrote that both share is taken back.
            names.update(start)
            if shared is not None:
                names["Norm"].factor = shared
            rounds = is_rounded(own, x, names, body)
            assert same(result(fused, x, has_gradients), want, rounds), f"{name}: {case}, after {after}"

    everything = list(calls())
    check("nothing", everything)
    for after, change in changes(names):
        for module in (own, fused):
            change(module)
        check(after, everything[:2] if "weight" in after else everything[1:2])
    return True


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_modules_that_are_almost_norms(part):
    """Each part has some of every kind of twist."""
    modules = dict(MODULES[part::PARTS])
    replaced = {name for name, body in modules.items() if replaced_and_same(name, body)}
    # Those whose twist is compared at each call, or changes nothing.
    assert len(replaced) >= 80 // PARTS
    kinds = {"self.on", "Norm.shared", "1e-5: EPS", "2: self.power", "-1: AXES", "y = self.still(y)"}
    assert kinds & modules.keys() <= replaced


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_layers_that_are_almost_straight(part):
    """Whose sums and norms are one where nothing else can come in."""
    found = dict(LAYERS[part::PARTS])
    replaced = {name for name, body in found.items() if replaced_and_same(name, body)}
    kinds = {
        "pass",
        "h = h * self.gain",
        "h, _ = self.parts(h)",
        "h = h * NUMBER",
        "h = h * (2 if self.on else 1)",
    }
    assert kinds & found.keys() <= replaced
    assert len(replaced) >= 20 // PARTS and len(found) - len(replaced) >= 10 // PARTS


def test_twists_have_names_of_their_own():
    for cases, least in ((MODULES, 250), (LAYERS, 45)):
        assert len(cases) >= least and len({name for name, _ in cases}) == len(cases)
