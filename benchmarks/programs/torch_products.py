"""Products, convolutions and attention by the engine of torch's kernels, beside the plain calls of torch.

    python -m graphfuse.benchmarks.programs.torch_products [--record FOLDER]

First, small problems of all kinds against float64, whatever torch is set to. Then times: of the GPU, of a call in a
captured graph, all in turns; of the host, of a call of a problem so small that the GPU waits for it; and, of one call,
that of the reference engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from graphfuse.benchmarks import tables
from graphfuse.benchmarks.programs import torch_attention, turns
from graphfuse.benchmarks.programs.study import Study
from graphfuse.benchmarks.programs.torch_problem import ONE_ROUNDING, ROUNDED_INSIDE, Problem, drawn
from graphfuse.benchmarks.target import Target
from graphfuse.benchmarks.untuned import untuned

OURS, PLAIN, REFERENCE = "graphfuse", "torch", "reference engine"
LIMIT = 1.1
CALLS, ROUNDS = 200, 30


def product(
    batch: tuple[int, ...], m: int, n: int, k: int, dtype: str = "bfloat16", after: str = "", **more
) -> Problem:
    """after: "bias", "bias relu", "bias gelu", or nothing."""
    import torch

    a, b = drawn(*batch, m, k, dtype=dtype), drawn(*batch, k, n, dtype=dtype, seed=1, scale=k**-0.5)
    read = {"a": a, "b": b}
    if after:
        read["bias"] = drawn(*[1] * len(batch), 1, n, dtype=dtype, seed=2)
    activation = after.removeprefix("bias").strip()

    def draw(g, a, b, bias=None):
        y = g.matmul(a, b)
        y = y if bias is None else g.bias(y, bias)
        return getattr(g, activation)(y) if activation else y

    def plain(a, b, bias=None):
        # As users write it: a linear layer, then a function.
        y = torch.matmul(a, b) if bias is None or batch else torch.addmm(bias.flatten(), a, b)
        y = y if bias is None or not batch else y + bias
        return getattr(torch.nn.functional, activation)(y) if activation else y

    name = " ".join(filter(None, ("matmul", "x".join(map(str, (*batch, m, n, k))), dtype, after)))
    out = torch.empty(*batch, m, n, dtype=a.dtype, device=a.device)
    return Problem(name, draw, plain, read, out, ONE_ROUNDING[dtype], **more)


def convolution(
    kind: str,
    shape: tuple[int, ...],
    taps: int,
    last: bool,
    dtype: str = "bfloat16",
    after: str = "",
    window: tuple[int, int, int] = (1, 1, 1),
    uneven: int = 0,
    holes: bool = False,
    **more,
) -> Problem:
    """kind: fprop, dgrad or wgrad. shape: (batch, channels, height, width, channels made). after: "bias relu",
    "bias silu" or nothing. window: stride, dilation and groups. uneven: more padding behind than before. holes: whether
    the image has values that are not numbers."""
    import torch

    n, c, h, w, made = shape
    stride, dilation, groups = window
    pad, gradients = taps // 2, torch.nn.grad
    image = drawn(n, c, h, w, dtype=dtype, last=last)
    if holes:
        image[:, 0, ::7, ::7] = float("nan")
    weight = drawn(made, c // groups, taps, taps, dtype=dtype, last=last, seed=1, scale=(c * taps * taps) ** -0.5)
    high, wide = ((extent + 2 * pad + uneven - dilation * (taps - 1) - 1) // stride + 1 for extent in (h, w))
    loss = drawn(n, made, high, wide, dtype=dtype, last=last, seed=2)
    bias = {"bias": drawn(1, made, 1, 1, dtype=dtype, seed=3)} if after else {}
    activation = after.removeprefix("bias").strip()
    given = {
        "stride": [stride] * 2,
        "dilation": [dilation] * 2,
        "pre_padding": [pad] * 2,
        "post_padding": [pad + uneven] * 2,
    }
    same = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups}

    def draw_fprop(g, image, weight, bias=None):
        y = g.conv_fprop(image, weight, **given)
        y = y if bias is None else g.bias(y, bias)
        return getattr(g, {"silu": "swish"}.get(activation, activation))(y) if activation else y

    def plain_fprop(image, weight, bias=None):
        if uneven:
            image = torch.nn.functional.pad(image, (0, 1, 0, 1))
        y = torch.nn.functional.conv2d(image, weight, None if bias is None else bias.flatten(), **same)
        return getattr(torch.nn.functional, activation)(y) if activation else y

    cases = {
        "fprop": (draw_fprop, plain_fprop, {"image": image, "weight": weight, **bias}, loss),
        "dgrad": (
            lambda g, loss, filter: g.conv_dgrad(loss, filter, **given).set_dim(list(image.shape)),
            lambda loss, filter: gradients.conv2d_input(image.shape, filter, loss, **same),
            {"loss": loss, "filter": weight},
            image,
        ),
        "wgrad": (
            lambda g, image, loss: g.conv_wgrad(image, loss, **given).set_dim(list(weight.shape)),
            lambda image, loss: gradients.conv2d_weight(image, weight.shape, loss, **same),
            {"image": image, "loss": loss},
            weight,
        ),
    }
    draw, plain, read, like = cases[kind]
    words = {"uneven": uneven, "NaN": holes, "rounded between": more.get("rounds")}
    more_of_it = " ".join(
        [after, *([str(window)] * (window != (1, 1, 1))), *(word for word, on in words.items() if on)]
    )
    layout = "NHWC" if last else "NCHW"
    name = " ".join(f"conv {kind} {'x'.join(map(str, shape))} {taps}x{taps} {layout} {dtype} {more_of_it}".split())
    tolerance = ROUNDED_INSIDE if more.get("rounds") else ONE_ROUNDING[dtype]
    return Problem(name, draw, plain, read, torch.empty_like(like), tolerance, **more)


def checks() -> Iterator[Problem]:
    """Small problems of all kinds."""
    for dtype, batch, after in itertools.product(
        ("bfloat16", "float16", "float32"), ((), (3,), (2, 3)), ("", "bias", "bias relu", "bias gelu")
    ):
        yield product(batch, 160, 96, 512, dtype, after)
    for allowed in (True, False):
        yield product((), 256, 256, 4096, "float32", settings={"allow_tf32": allowed})
        yield product((), 64, 64, 65536, "bfloat16", settings={"allow_bf16_reduced_precision_reduction": allowed})
        yield product((), 64, 64, 65536, "float16", settings={"allow_fp16_reduced_precision_reduction": allowed})
        yield product((), 64, 64, 65536, "float16", settings={"allow_fp16_accumulation": allowed})
    for kind, last, dtype in itertools.product(
        ("fprop", "dgrad", "wgrad"), (True, False), ("bfloat16", "float16", "float32")
    ):
        yield convolution(kind, (4, 32, 20, 24, 48), 3, last, dtype)
    for last in (True, False):
        yield convolution("fprop", (4, 32, 20, 24, 48), 3, last, after="bias relu")
        yield convolution("fprop", (4, 32, 20, 24, 48), 3, last, after="bias relu", holes=True)
        yield convolution("fprop", (4, 32, 20, 24, 48), 3, last, after="bias silu")
        yield convolution("fprop", (4, 32, 20, 24, 48), 3, last, after="bias silu", rounds=True)
        yield convolution("fprop", (4, 32, 20, 24, 48), 3, last, uneven=1)
    for kind, window in itertools.product(("fprop", "dgrad", "wgrad"), ((2, 1, 1), (1, 2, 1), (2, 2, 4), (1, 1, 32))):
        yield convolution(kind, (4, 32, 21, 24, 64), 3, True, window=window)
    yield from torch_attention.checks()


def measured() -> Iterator[Problem]:
    """Problems that are timed."""
    yield product((), 4096, 4096, 4096)
    yield product((), 4096, 4096, 4096, "float16")
    yield product((), 4096, 4096, 4096, "float32")
    yield product((32,), 1024, 1024, 1024)
    yield product((), 4096, 4096, 4096, after="bias")
    yield product((), 4096, 4096, 4096, after="bias relu")
    yield product((), 4096, 4096, 4096, after="bias gelu")
    yield product((), 4096, 14336, 4096, after="bias gelu")
    yield convolution("fprop", (32, 256, 56, 56, 256), 3, True)
    yield convolution("fprop", (32, 256, 56, 56, 256), 3, False)
    yield convolution("fprop", (32, 256, 56, 56, 256), 3, True, after="bias relu")
    yield convolution("fprop", (32, 256, 56, 56, 256), 3, True, after="bias silu")
    yield convolution("fprop", (32, 256, 56, 56, 256), 3, True, after="bias silu", rounds=True)
    yield convolution("dgrad", (32, 256, 56, 56, 256), 3, True)
    yield convolution("wgrad", (32, 256, 56, 56, 256), 3, True)
    yield from torch_attention.measured()


TINY = (
    lambda: product((), 64, 64, 64),
    lambda: convolution("fprop", (1, 32, 8, 8, 32), 3, True),
    lambda: torch_attention.attention((1, 2, 64, 64), True),
)
"""Problems whose calls are timed on the host."""


def checked(problem: Problem) -> dict:
    """The record's entry of a check: the distances of ours and of torch's own call over what is accepted."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in problem.settings}
    try:
        for name, value in problem.settings.items():
            setattr(matmul, name, value)
        call, plan = problem.call()
        problem.out.fill_(float("nan"))
        call()
        kept = {name: getattr(matmul, name) for name in before} == problem.settings
        ours, plain = problem.distance(problem.out), problem.distance(problem.by_torch()())
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
    settings = ", ".join(f"{name}={value}" for name, value in problem.settings.items())
    return {
        "name": f"{problem.name} {settings}".strip(),
        "plan": plan,
        "distance": ours,
        "torch": plain,
        "settings_kept": kept,
    }


def compared(problem: Problem) -> dict:
    """The record's entry of a problem that is timed."""
    import torch

    from graphfuse.runtime import timing

    call, plan = problem.call()
    slow, _ = problem.call(("reference",))
    problem.out.fill_(float("nan"))
    call()
    distance = problem.distance(problem.out)
    times = timing.compare([timing.capture([each]) for each in (call, problem.by_torch())])
    reference = timing.measure([slow], limit=1000.0)
    torch.cuda.empty_cache()
    return {
        "name": problem.name,
        "plan": plan,
        "distance": distance,
        "us": {who: vars(t) for who, t in zip((OURS, PLAIN, REFERENCE), (*times, reference), strict=True)},
    }


def _entry(of: Callable[[Problem], dict], problem: Problem) -> dict:
    """What `of` has of a problem, or its error: one that fails leaves the others their place in the record."""
    try:
        return of(problem)
    except Exception as error:
        return {"name": problem.name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def host() -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of a call on the host, ours and torch's, by problem."""
    found = {}
    for made in TINY:
        problem = made()
        call, _ = problem.call()
        taken = turns.take({OURS: turns.on_host(call, CALLS), PLAIN: turns.on_host(problem.by_torch(), CALLS)}, ROUNDS)
        found[problem.name] = {name: turns.quartiles(samples) for name, samples in taken.items()}
    return found


def _ratio(case: dict) -> float:
    return case["us"][OURS]["median"] / case["us"][PLAIN]["median"]


TARGETS = (
    Target(
        "time over torch's, at worst",
        LIMIT,
        False,
        lambda content: ((_ratio(case), case["name"]) for case in _found(content["cases"])),
    ),
    Target(
        "distance from float64 over what is accepted, at worst",
        1.0,
        False,
        lambda content: ((case["distance"], case["name"]) for case in _found((*content["checks"], *content["cases"]))),
    ),
)


def _found(entries: Sequence[dict]) -> list[dict]:
    """Those of a record that did not end in an error."""
    return [entry for entry in entries if "error" not in entry]


def failing(content: dict) -> tables.Table:
    """Problems that are too far from float64, that another engine runs, or that ended in an error."""
    wrong = [
        (c["name"], c["plan"], f"{c['distance']:.3g}", f"{c['torch']:.3g}", str(c["settings_kept"]))
        for c in _found(content["checks"])
        if not c["distance"] <= 1.0 or not c["settings_kept"] or "torch" not in c["plan"]
    ]
    failed = [case for case in (*content["checks"], *content["cases"]) if "error" in case]
    wrong += [(c["name"], c["error"], "-", "-", "-") for c in failed]
    return tables.Table(
        f"{len(content['checks'])} problems were compared with float64; those that fail",
        ("problem", "plan or error", "distance over what is accepted", "of torch's own", "settings kept"),
        wrong,
        2,
    )


def on_host(content: dict) -> tables.Table:
    return tables.Table(
        "microseconds of a call on the host: median (quartiles)",
        ("problem", OURS, PLAIN),
        [(name, *(tables.spread(us[who], 2) for who in (OURS, PLAIN))) for name, us in content["host_us"].items()],
    )


def on_gpu(content: dict) -> tables.Table:
    def row(case: dict) -> tuple[str, ...]:
        us, engines = case["us"], " + ".join(part.partition("[")[0] for part in case["plan"].split(" + "))
        times = (*(tables.spread(us[who], 1) for who in (OURS, PLAIN)), f"{_ratio(case):.3f}")
        return (case["name"], engines, *times, f"{case['distance']:.3g}", f"{us[REFERENCE]['median']:.0f}")

    return tables.Table(
        "microseconds of a call on the GPU: median (least to most)",
        ("problem", "engines", OURS, PLAIN, "ratio", "distance over what is accepted", REFERENCE),
        [row(case) for case in _found(content["cases"])],
        2,
    )


STUDY = Study(
    name="torch-products",
    about=__doc__,
    tables=lambda content: (on_gpu(content), on_host(content), failing(content)),
    targets=TARGETS,
    distributions=("torch",),
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = STUDY.asked(arguments)
    with untuned():
        content = {
            "versions": STUDY.versions(),
            "checks": [_entry(checked, problem) for problem in checks()],
            "host_us": host(),
            "cases": [_entry(compared, problem) for problem in measured()],
        }
    STUDY.report(content, given.record)


if __name__ == "__main__":
    main()
