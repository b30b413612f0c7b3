"""The kernel variants that the lanes share: compiled for every chip, run on the CPU and under the GPU's sanitizers.

A variant is a problem and the knobs to run it with; together they cover whatever changes
the code of a kernel. A new engine adds its variants to VARIANTS and nothing else.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from graphfuse.base.device import ARCHES, Device, for_arch
from graphfuse.base.enums import heur_mode
from graphfuse.contract import match
from graphfuse.contract.engine import KernelEngine
from graphfuse.engines.rows import RowEngine
from graphfuse.engines.rows.across import AcrossKnobs
from graphfuse.engines.rows.across.split import AcrossSplit as AcrossSplit
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.over_grid import OverGridKnobs
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.op_graph.freeze import freeze
from graphfuse.op_graph.lower import lower
from graphfuse.patterns.rows import PATTERN
from support import covering, graphs
from support.channels import Channels
from support.gradients import ACTIVATIONS, TYPES, WEIGHTS, Gradient
from support.graphs import BF16, E4M3, E5M2, FLOAT, FP4, HALF, Norm, Op
from support.losses import INT32, INT64, CrossEntropy, Window
from support.quantized import E8M0, INT8, Quantized
from support.row_functions import KINDS, RowFunction

TARGETS = {arch: for_arch(arch) for arch in ARCHES} | {"sm_120a": for_arch("sm_120")}
"""What kernels are compiled for: every chip's plain or own instruction set, and the device to plan for."""


@dataclass(frozen=True)
class Variant:
    """A problem, the engine that runs it, and its knobs; None for what the engine proposes first, but for knobs that
    spread rows over the grid."""

    problem: Norm | Gradient | RowFunction | CrossEntropy | Window | Channels | Quantized
    knobs: object = None
    engine: KernelEngine = RowEngine()
    pattern: match.Pattern = PATTERN

    def facts(self, rows: int | None = None) -> object:
        """What the engine looks at, by way of the pattern; for another number of rows if given."""
        problem = self.problem if rows is None else dataclasses.replace(self.problem, rows=rows)
        return _facts(problem, self.pattern)

    def knobs_on(self, device: Device) -> object:
        clusters = getattr(self.knobs, "cluster", 1) > 1
        return self.knobs if self.knobs and (device.sm >= 90 or not clusters) else _proposed(self, device)

    def source(self, device: Device) -> str:
        """The kernel's translation unit."""
        return self.engine.source(self.facts(), self.knobs_on(device))

    def waits(self, device: Device) -> bool:
        """Whether the kernel may be started before the one before it has ended."""
        return self.engine.launch(self.facts(), self.knobs_on(device)).waits

    def row_counts(self, device: Device) -> tuple[int, ...]:
        """Rows to run it with: one, and as many as fill two CTAs and begin a third. Of channels, rows of positions."""
        knobs = self.knobs_on(device)
        if isinstance(self.problem, Channels):
            return 1, 2 * self.together(knobs) // self.problem.positions + 1
        together = self.together(knobs)
        return 1, 2 * together + 1 if together else 2

    def together(self, knobs: object) -> int:
        """Rows, of one position each, that a CTA takes at a time; of those that several CTAs share, none."""
        if isinstance(self.problem, Channels):
            return knobs.threads_across * AcrossSplit.of(self.facts()).piece
        return knobs.threads // knobs.threads_per_row

    def ctas(self, rows: int, knobs: object) -> int:
        """Of a grid."""
        if isinstance(self.problem, Channels):
            return -(-rows * self.problem.positions // self.together(knobs))
        wanted = -(-rows * knobs.threads_per_row // knobs.threads)
        return min(wanted, getattr(knobs, "ctas", wanted))

    def hold(self, rows: int, pack: dict, outputs: dict) -> None:
        """Results of so many rows against float64."""
        problem = dataclasses.replace(self.problem, rows=rows)
        graphs.hold(problem, pack, outputs) if isinstance(problem, Norm) else problem.hold(pack, outputs)

    @property
    def small(self) -> bool:
        """Whether its rows are short enough to be run under a checker."""
        return self.problem.columns <= 1 << 17


@functools.cache
def _facts(problem: object, pattern: match.Pattern) -> object:
    found = match.find(pattern, lower(freeze(problem.graph())))
    return next(m for m in found if isinstance(m, match.Region)).facts


@functools.cache
def _proposed(variant: Variant, device: Device) -> object:
    found = variant.engine.propose(variant.facts(), device, heur_mode.B)
    return next(knobs for knobs in found if not isinstance(knobs, OverGridKnobs))


@functools.cache
def _unit(variant: Variant, device: Device) -> str:
    return hashlib.sha256(variant.source(device).encode()).hexdigest()


def digest() -> str:
    """SHA-256 over the set of distinct translation units that all variants have on all chips: templates,
    headers and what Python generates, but not names, the order or the number of variants that share one."""
    units = {_unit(v, d) for v in VARIANTS.values() for d in TARGETS.values()}
    return hashlib.sha256("\n".join(sorted(units)).encode()).hexdigest()


_FLOATS = (BF16, HALF, FLOAT)
_QUANTIZED = (E4M3, E5M2, FP4)
# Every pointwise op, each attribute set, the factor on either side.
_EVERY_OP = (
    Op("identity", (0,)),
    Op("gelu", (0,)),
    Op("add", (0, -1)),
    Op("tanh", (0,)),
    Op("scale", (0, -1)),
    Op("relu", (0,), (("negative_slope", 0.5), ("lower_clip", -0.25), ("upper_clip", 6.0))),
    Op("gelu_approx_tanh", (0,)),
    Op("swish_backward", (-1, 0), (("swish_beta", 0.5),)),
    Op("relu_backward", (0, -1), (("negative_slope", 0.5), ("lower_clip", -0.25), ("upper_clip", 6.0))),
    Op("gelu_backward", (-1, 0)),
    Op("tanh_backward", (0, -1)),
    Op("gelu_approx_tanh_backward", (-1, 0)),
    Op("sigmoid_backward", (-1, 0)),
    Op("sub", (-1, 0)),
    Op("sigmoid", (0,)),
    Op("sqrt", (0,)),
    Op("reciprocal", (0,)),
    Op("rsqrt", (0,)),
    Op("exp", (0,)),
    Op("log", (0,)),
    Op("neg", (0,)),
    Op("min", (0, -1)),
    Op("abs", (0,)),
    Op("div", (0, -1)),
    Op("max", (0, -1)),
    Op("div", (-1, 0)),  # by what varies along a row
)

_SMOOTH_OPS = (
    Op("sin", (0,)),
    Op("add_square", (-1, 0)),
    Op("cos", (0,)),
    Op("erf", (0,)),
    Op("elu", (0,), (("elu_alpha", 0.5),)),
    Op("softplus", (0,), (("softplus_beta", 2.0),)),
    Op("log1p", (0,)),
    Op("expm1", (0,)),
    Op("pow", (0, -1)),
    Op("elu_backward", (-1, 0), (("elu_alpha", 0.5),)),
    Op("sub", (0, -1)),
    Op("softplus_backward", (0, 0), (("softplus_beta", 2.0),)),
    Op("pow", (-1, 0)),
    Op("tan", (0,)),
    Op("add_square", (0, -1)),
)
# From whole numbers on, all is exact.
_OPS_THAT_JUMP = (
    Op("floor", (0,)),
    Op("mod", (0, -1)),
    Op("add", (0, -1)),
    Op("mod", (-1, 0)),
    Op("logical_not", (0,)),
    Op("logical_or", (0, 0)),
    Op("logical_and", (0, -1)),
    Op("add", (0, -1)),
    Op("ceil", (0,)),
    Op("mul", (0, -1)),
)
_OPS_OF_C = (
    Op("mul", (0, -1)),
    Op("exp2", (0,)),
    Op("log2", (0,)),
    Op("trunc", (0,)),
    Op("add", (0, -1)),
    Op("round", (0,)),
)


def _types() -> Iterator[tuple[str, Variant]]:
    """Every type of input with every type of output; weight and bias go through theirs beside them."""
    for i, x in enumerate(_FLOATS):
        for j, y in enumerate(_FLOATS + _QUANTIZED):
            weight, bias = _FLOATS[(i + j) % 3], (*_FLOATS, None)[(i + 2 * j) % 4]
            problem = Norm(1, 512, x, weight, y, bias, training=(i + j) % 2 == 1, blocks=y is FP4)
            yield f"{x.name} to {y.name}", Variant(problem)


def _knobs() -> Iterator[tuple[str, Variant]]:
    """Every number of threads a row: rows that share a warp, a warp, several with one barrier and with two.
    Each with one chunk and with two to a piece, some with four."""
    for power in range(11):
        threads = 1 << power
        # Several rows a CTA, but for 32 and 1024.
        cta = 32 if threads <= 32 else min(1024, 2 * threads)
        for chunks in (1, 2, 4) if threads in (2, 16, 128) else (1, 2):
            # Two pieces a thread, of which half the threads lack the second.
            columns = 8 * chunks * (threads + threads // 2)
            name = f"{threads} a row" + ("" if chunks == 1 else f" in pieces of {chunks}")
            yield name, Variant(Norm(1, columns), ByRowKnobs(threads, cta, chunks))


def _blocks() -> Iterator[tuple[str, Variant]]:
    """Blocks of one lane and of two, each with a row whose last step some lanes lack."""
    for x in (BF16, HALF, FLOAT):
        for chunks in (1, 2):
            lanes = 2 // chunks
            threads = 4 * lanes
            problem = Norm(1, 16 * 6, x, FLOAT, FP4, bias=BF16, training=x is HALF, blocks=True)
            yield f"{x.name} blocks in {lanes} lanes", Variant(problem, ByRowKnobs(threads, 32, chunks))


def _row_functions() -> Iterator[tuple[str, Variant]]:
    """Each of them in rows of any length, from one element to more than threads can hold, and in all types."""
    for i, kind in enumerate(KINDS):
        for j, columns in enumerate((1, 7, 96, 1000, 4096, 20000, 1 << 18)):
            x, y, weight = _FLOATS[(i + j) % 3], (*_FLOATS, E4M3)[(i + 2 * j) % 4], _FLOATS[j % 3]
            y = FLOAT if KINDS[kind].per_row else y
            if columns % KINDS[kind].part:
                continue
            yield f"{kind} of {columns}", Variant(RowFunction(kind, 1, columns, x, y, weight))


ROW_FUNCTIONS: dict[str, Variant] = {
    **dict(_row_functions()),
    "softmax of a row in a cluster": Variant(RowFunction("softmax", 1, 4000), ByRowKnobs(512, 128)),
    "layer norm of pieces": Variant(RowFunction("layer norm", 1, 528), ByRowKnobs(16, 64, 2)),
}


def _groups() -> Iterator[tuple[str, Variant]]:
    """Every type of input with all that stands before quantization, scales in either order, the value beside it or
    not; a scale for each row of each."""
    for i, of in enumerate(("x", "silu", "norm")):
        for j, x in enumerate(_FLOATS):
            beside, element = (None, FLOAT, BF16)[(i + j) % 3] if i else None, (E4M3, E5M2)[(i + 2 * j) % 2]
            problem = Quantized(1, 512, of, 128, x, element, FLOAT, (i + j) % 2 == 0, beside)
            yield f"groups of {x.name} {of}", Variant(problem)
        yield f"rows of {of}", Variant(Quantized(1, 640, of, None, beside=BF16 if of == "norm" else None))
        yield f"rows of {of} to int8", Variant(Quantized(1, 768, of, None, _FLOATS[i], INT8))


def _lanes() -> Iterator[tuple[str, Variant]]:
    """Blocks of 128 in every number of lanes, each with a row whose last step some lanes lack."""
    for chunks, x in ((1, FLOAT), (1, BF16), (2, FLOAT), (4, HALF)):
        lanes = 16 // chunks * (2 if (chunks, x) == (1, FLOAT) else 1)
        problem = Quantized(1, 128 * 3, "silu", 128, x, by_columns=chunks == 2)
        yield f"groups in {lanes} lanes", Variant(problem, ByRowKnobs(2 * lanes, 64, chunks))


FORWARD: dict[str, Variant] = {
    **dict(_types()),
    **dict(_knobs()),
    **dict(_blocks()),
    **dict(_groups()),
    **dict(_lanes()),
    "one group": Variant(Quantized(1, 128)),
    "groups by E8M0": Variant(Quantized(1, 256, "silu", 128, HALF, E5M2, E8M0)),
    "groups by E8M0 by columns": Variant(Quantized(1, 256, "x", 128, FLOAT, E4M3, E8M0, True)),
    "groups of a norm beside it": Variant(Quantized(1, 7168, "norm", by_columns=True, beside=BF16)),
    "groups of long silu": Variant(Quantized(1, 14336, "silu")),
    "groups of few rows": Variant(Quantized(1, 1920, "silu", by_columns=True)),
    "groups in passes": Variant(Quantized(1, 65536, "norm", input=FLOAT, by_columns=True), ByRowKnobs(1024, 1024)),
    "groups in passes of none": Variant(Quantized(1, 65536, "x", input=FLOAT), ByRowKnobs(1024, 1024)),
    "rows of long silu": Variant(Quantized(1, 14336, "silu", None)),
    # Row lengths: tails, chunks narrower than 16 bytes, rows held and read twice, 64-bit offsets.
    "silu 1024": Variant(Norm(1, 1024)),
    "one column": Variant(Norm(1, 1, FLOAT, FLOAT, HALF, training=True)),
    "odd columns": Variant(Norm(1, 111, BF16, FLOAT, BF16, HALF)),
    "half a chunk": Variant(Norm(1, 3420, HALF, BF16, HALF, BF16, training=True)),
    "odd e4m3": Variant(Norm(1, 33, HALF, FLOAT, E4M3)),
    "one block": Variant(Norm(1, 16, output=FP4, blocks=True)),
    "three blocks": Variant(Norm(1, 48, FLOAT, output=FP4, blocks=True)),
    "long e5m2": Variant(Norm(1, 7168, FLOAT, HALF, E5M2, BF16, training=True)),
    "long nvfp4": Variant(Norm(1, 8192, FLOAT, FLOAT, FP4, FLOAT, training=True, blocks=True)),
    "long": Variant(Norm(1, 32768, BF16, FLOAT, BF16, FLOAT, training=True)),
    "longest held": Variant(Norm(1, 40960, output=E4M3, bias=BF16)),
    "read twice": Variant(Norm(1, 65536, FLOAT, FLOAT, FP4, FLOAT, training=True, blocks=True), ByRowKnobs(1024, 1024)),
    "odd read twice": Variant(Norm(1, 65537), ByRowKnobs(1024, 1024)),
    "64-bit columns": Variant(Norm(1, (1 << 28) + 8)),
    # Alignment of addresses and of rows.
    "aligned to 8": Variant(Norm(1, 512, alignment=8, offset=4)),
    "aligned to 4": Variant(Norm(1, 512, alignment=4, offset=2)),
    "aligned to 2": Variant(Norm(1, 512, HALF, HALF, FLOAT, alignment=2, beta=None)),
    "rows apart": Variant(Norm(1, 512, input_stride=520, output_stride=640)),
    "odd rows apart": Variant(Norm(1, 512, input_stride=513, output_stride=514, training=True)),
    "float aligned to 4": Variant(Norm(1, 512, FLOAT, FLOAT, FLOAT, FLOAT, alignment=4, offset=1)),
    "e4m3 aligned to 1": Variant(Norm(1, 512, output=E4M3, alignment=2, output_stride=513)),
    "nvfp4 rows apart": Variant(Norm(1, 96, output=FP4, blocks=True, output_stride=98)),
    # The same, and several types, in pieces of several chunks.
    "512 a row in pieces of 4": Variant(Norm(1, 24576), ByRowKnobs(512, 512, 4)),
    "pieces aligned to 4": Variant(Norm(1, 528, alignment=4, offset=2), ByRowKnobs(16, 64, 2)),
    "pieces of odd rows apart": Variant(
        Norm(1, 512, HALF, input_stride=513, output_stride=514, training=True), ByRowKnobs(32, 32, 2)
    ),
    "pieces of float": Variant(Norm(1, 544, FLOAT, FLOAT, FLOAT, FLOAT), ByRowKnobs(16, 64, 4)),
    "pieces to e4m3": Variant(Norm(1, 640, weight=HALF, output=E4M3, bias=FLOAT), ByRowKnobs(32, 128, 2)),
    "pieces to e5m2 apart": Variant(Norm(1, 640, output=E5M2, output_stride=644), ByRowKnobs(64, 128, 2)),
    "pieces to nvfp4 apart": Variant(Norm(1, 96, output=FP4, blocks=True, output_stride=98), ByRowKnobs(4, 64, 2)),
    "pieces to nvfp4 aligned to 4": Variant(Norm(1, 96, output=FP4, blocks=True, alignment=4), ByRowKnobs(4, 64, 2)),
    "long pieces": Variant(Norm(1, 7680, bias=BF16, training=True), ByRowKnobs(128, 128, 2)),
    "long pieces to nvfp4": Variant(Norm(1, 8192, HALF, FLOAT, FP4, HALF, blocks=True), ByRowKnobs(128, 256, 2)),
    # What the L2 gives up last, or first, in accesses of every width.
    "reads last": Variant(Norm(1, 512), ByRowKnobs(64, 128, 1, 1)),
    "reads last aligned to 8": Variant(Norm(1, 512, alignment=8, offset=4), ByRowKnobs(64, 128, 1, 1)),
    "reads last aligned to 4": Variant(Norm(1, 512, alignment=4, offset=2), ByRowKnobs(64, 128, 1, 1)),
    "reads last aligned to 2": Variant(Norm(1, 512, HALF, alignment=2, offset=1), ByRowKnobs(64, 128, 1, 1)),
    "all first": Variant(Norm(1, 512, FLOAT, output=FP4, blocks=True), ByRowKnobs(32, 128, 1, 2)),
    "all first aligned to 2": Variant(Norm(1, 512, HALF, alignment=2, offset=1), ByRowKnobs(64, 128, 1, 2)),
    # Epilogues and scalars.
    "norm alone": Variant(Norm(1, 1024, beta=None)),
    "every op": Variant(Norm(1, 1024, beta=1.5, factor="device", scalars=BF16, eps="device", chain=_EVERY_OP)),
    "smooth ops": Variant(Norm(1, 1024, FLOAT, output=FLOAT, factor="device", chain=_SMOOTH_OPS)),
    "ops that jump": Variant(Norm(1, 1024, factor="device", chain=_OPS_THAT_JUMP)),
    "ops of C": Variant(Norm(1, 1024, factor="device", chain=_OPS_OF_C)),
    "scalars in half": Variant(Norm(1, 256, factor="device", eps="device", scalars=HALF)),
    "scalars in float": Variant(Norm(1, 256, factor="device", eps="device")),
    "scalars by value": Variant(Norm(1, 256, factor="value", eps=None, output=E4M3)),
    **ROW_FUNCTIONS,
}


def _backward(problem: Gradient, knobs: PersistentKnobs | None = None) -> Variant:
    return Variant(problem, knobs, RowEngine(), PATTERN)


def _gradients() -> Iterator[tuple[str, Variant]]:
    """Every type with every kind of weight and what stands before and after."""
    kinds = zip(
        WEIGHTS * 3, ACTIVATIONS + ACTIVATIONS[1:] + ACTIVATIONS[:1] + ACTIVATIONS[::-1], TYPES * 4, strict=True
    )
    for i, (weight, activation, dtype) in enumerate(kinds):
        problem = Gradient(1, 512, dtype, weight, activation, residual=i % 2 == 1, dbias=i % 3 == 1)
        yield f"backward {dtype.name} {activation} of weight {weight}", _backward(problem)


def _stays() -> Iterator[tuple[str, Variant]]:
    """Every number of threads a row of those that stay: several rows a CTA where it can have them, copied up to two
    ahead; two pieces a thread, of which half the threads lack the second, where there are registers for it."""
    for power, stages in enumerate((1, 2, 3, 1, 2, 3, 1, 2, 1, 2, 2)):
        threads = 1 << power
        cta = max(32, min(512, 2 * threads), threads)
        columns = 8 * (threads + threads // 2) if power < 10 else 8 * threads - 64
        knobs = PersistentKnobs(threads, cta, stages, 1, 2)
        yield f"backward {threads} a row", _backward(Gradient(1, columns, dbias=power % 2 == 1), knobs)


BACKWARD: dict[str, Variant] = {
    **dict(_gradients()),
    **dict(_stays()),
    "backward one column": _backward(Gradient(1, 1, FLOAT, dbias=True)),
    "backward odd columns": _backward(Gradient(1, 111, activation="silu", dbias=True)),
    "backward half a chunk": _backward(Gradient(1, 3420, HALF, "other type", "gate", True, True)),
    "backward 4096": _backward(Gradient(1, 4096), PersistentKnobs(256, 512, 2, 1, 84)),
    "backward delayed": _backward(Gradient(1, 1024, residual=True, dbias=True), PersistentKnobs(128, 256, 3, 1, 2, 1)),
    "backward 4096 delayed": _backward(Gradient(1, 4096), PersistentKnobs(256, 256, 3, 1, 84, 1)),
    "backward 8192": _backward(Gradient(1, 8192), PersistentKnobs(512, 512, 2, 1, 84)),
    "backward 8192 with a gate": _backward(Gradient(1, 8192, activation="gate", residual=True)),
    "backward 16384": _backward(Gradient(1, 16384)),
    "backward read again": _backward(
        Gradient(1, 40960, activation="silu", residual=True, dbias=True), PersistentKnobs(512, 512, 1, 1, 84)
    ),
    "backward odd read again": _backward(Gradient(1, 65537), PersistentKnobs(512, 512, 1, 2, 168)),
    "backward 64-bit columns": _backward(Gradient(1, (1 << 28) + 8), PersistentKnobs(512, 512, 1, 1, 84)),
    "backward aligned to 8": _backward(Gradient(1, 512, alignment=8, offset=4)),
    "backward aligned to 4": _backward(Gradient(1, 512, alignment=4, offset=2, dbias=True)),
    "backward aligned to 2": _backward(Gradient(1, 512, HALF, alignment=2, offset=1)),
    "backward rows apart": _backward(Gradient(1, 512, x_stride=520, grad_stride=640, dx_stride=528)),
    "backward odd rows apart": _backward(Gradient(1, 512, x_stride=513, grad_stride=514, dx_stride=515, residual=True)),
}


def _losses() -> Iterator[tuple[str, Variant]]:
    """Cross entropy and its gradient: every type with every type of target, rows of every length."""
    for i, dtype in enumerate(_FLOATS):
        for j, target in enumerate((INT32, INT64)):
            problem = CrossEntropy(1, 1000, dtype, target, label_smoothing=0.1 * ((i + j) % 2))
            yield f"loss {dtype.name} {target.name}", Variant(problem)
            yield f"loss gradient {dtype.name} {target.name}", Variant(dataclasses.replace(problem, backward=True))
    for columns in (1, 7, 32000, 50257, 131072, 262144):
        for backward in (False, True):
            problem = CrossEntropy(1, columns, _FLOATS[columns % 3], backward=backward)
            yield f"loss {'gradient ' * backward}of {columns}", Variant(problem)


_ANY_LENGTH = ByRowKnobs(1024, 1024)

LOSSES: dict[str, Variant] = {
    **dict(_losses()),
    "loss read again": Variant(CrossEntropy(1, 50257, FLOAT, label_smoothing=0.1, z_loss=1e-4), _ANY_LENGTH),
    "loss gradient read again": Variant(CrossEntropy(1, 65536, FLOAT, backward=True), _ANY_LENGTH),
    "loss in pieces of 2": Variant(CrossEntropy(1, 528, z_loss=1e-4), ByRowKnobs(16, 64, 2)),
    "loss gradient in pieces of 4": Variant(CrossEntropy(1, 544, FLOAT, backward=True), ByRowKnobs(16, 64, 4)),
    "loss in a cluster": Variant(CrossEntropy(1, 1000, FLOAT, ignore_index=0), ByRowKnobs(256, 64)),
    "loss gradient in four CTAs": Variant(
        CrossEntropy(1, 1000, HALF, backward=True, ignore_index=3, z_loss=1e-2), ByRowKnobs(256, 64)
    ),
    "loss alone": Variant(CrossEntropy(1, 512, sums=False)),
    "loss rows apart": Variant(CrossEntropy(1, 512, stride=520, offset=4, alignment=8)),
    "loss gradient rows apart": Variant(CrossEntropy(1, 512, backward=True, stride=513, offset=1, alignment=2)),
    # Of two rows: what there is one a row of is, of one row as nodes, one number in all.
    "loss by hand": Variant(CrossEntropy(2, 1000, by_hand=True)),
    "window": Variant(Window(2, 1000)),
}


def _channels(knobs: AcrossKnobs | None = None, **problem) -> Variant:
    return Variant(Channels(1, **problem), knobs)


ACROSS: dict[str, Variant] = {
    "across 96 in 12 groups": _channels(AcrossKnobs(16, 12, 3, 1), positions=96),
    "across 96 in 4 groups": _channels(AcrossKnobs(32, 4, 2, 1), bias=FLOAT, training=True),
    "across 96 in 8 groups": _channels(AcrossKnobs(16, 8, 1, 2), output=E4M3, training=True),
    "across 96 in one group": _channels(AcrossKnobs(64, 1), positions=24, weight=FLOAT),
    "across of float": _channels(columns=384, input=FLOAT, weight=HALF, output=FLOAT),
    "across of half": _channels(columns=64, input=HALF, output=E5M2, bias=HALF),
    "across float to bf16": _channels(columns=40, input=FLOAT, positions=20),
    "across bf16 to float": _channels(columns=192, output=FLOAT, beta=None),
    "across residual": _channels(columns=96, residual=True, training=True),
    "across one column": _channels(AcrossKnobs(32, 1), columns=1, training=True),
    "across odd columns": _channels(columns=111, weight=FLOAT),
    "across half a chunk": _channels(columns=100, input=HALF, output=HALF),
    "across odd positions": _channels(columns=48, positions=7, training=True),
    "across positions of 8 bytes": _channels(columns=48, positions=12, output=E4M3),
    "across columns apart": _channels(columns=48, positions=16, input_stride=24, output_stride=40),
    "across columns an odd number apart": _channels(columns=48, positions=16, input_stride=25, output_stride=40),
    "across aligned to 8": _channels(columns=48, alignment=8, offset=4, positions=12),
    "across aligned to 2": _channels(columns=48, input=HALF, alignment=2, offset=1, positions=24),
    "across read again": _channels(AcrossKnobs(32, 4), columns=2000, training=True, positions=16),
    "across sum read again": _channels(AcrossKnobs(16, 16), columns=1600, residual=True, positions=8),
}


def _over_grid(ctas: int, threads: int, ctas_per_sm: int, problem) -> Variant:
    return Variant(problem, OverGridKnobs(ctas, threads, ctas_per_sm))


OVER_GRID: dict[str, Variant] = {
    # Fewer CTAs than warps that read what they leave, as many, and more.
    "softmax over 2 CTAs": _over_grid(2, 512, 2, RowFunction("softmax", 1, 10000)),
    "layer norm over 4 CTAs": _over_grid(4, 128, 2, RowFunction("layer norm", 1, 4000, FLOAT, HALF, BF16)),
    "log_softmax over 32 CTAs": _over_grid(32, 32, 1, RowFunction("log_softmax", 1, 9000, HALF, FLOAT)),
    "L2 normalization over 8 CTAs": _over_grid(8, 256, 1, RowFunction("L2 normalization", 1, 16385, BF16, E4M3)),
    "logsumexp over 64 CTAs": _over_grid(64, 1024, 1, RowFunction("logsumexp", 1, 1 << 22, BF16, FLOAT)),
    "norm over 4 CTAs to e5m2": _over_grid(4, 64, 1, Norm(1, 3420, HALF, BF16, E5M2, BF16, training=True)),
    "norm over 2 CTAs to nvfp4": _over_grid(
        2, 128, 4, Norm(1, 4096, FLOAT, FLOAT, FP4, FLOAT, training=True, blocks=True)
    ),
    "groups over 2 CTAs": _over_grid(2, 128, 4, Quantized(1, 7168, "norm", by_columns=True, beside=BF16)),
    "rows over 4 CTAs": _over_grid(4, 128, 8, Quantized(1, 65536, "silu", None)),
    "loss over 4 CTAs": _over_grid(4, 128, 1, CrossEntropy(1, 5000, label_smoothing=0.1, z_loss=1e-4)),
    "parts over 2 CTAs": _over_grid(2, 256, 4, RowFunction("parts", 1, 32000, FLOAT, BF16)),
    "layer norm over 2 CTAs read again": _over_grid(2, 128, 8, RowFunction("layer norm", 1, 30000, HALF, BF16)),
    "softmax over 4 CTAs read again": _over_grid(4, 64, 16, RowFunction("softmax", 1, 20003, FLOAT, FLOAT)),
    "64-bit columns over 128 CTAs": _over_grid(128, 1024, 1, Norm(1, (1 << 28) + 8)),
}

VARIANTS: dict[str, Variant] = FORWARD | BACKWARD | LOSSES | ACROSS | OVER_GRID


def _features(variant: Variant) -> frozenset:
    """The values of all fields of its problem and its knobs; of lengths and strides, what code depends on."""
    found = set()
    for part in filter(None, (variant.problem, variant.knobs)):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "columns":
                value = min(value.bit_length(), 16) // 4, value.bit_length() > 28, value % 8 == 0
            elif "stride" in field.name or field.name == "offset":
                value = bool(value)
            values = (op.name for op in value) if field.name == "chain" else [value]
            found |= {(type(part).__name__, field.name, str(v)) for v in values}
    return frozenset(found)


def _first(variants: dict[str, Variant]) -> Iterator[str]:
    names = tuple(variants)
    yield from (names[n] for n in covering.covering([_features(v) for v in variants.values()]))


FIRST = frozenset([*_first(FORWARD | BACKWARD | LOSSES | ACROSS), *_first(OVER_GRID)])
"""Those that `make test` runs: they have all that any variant has. The others are further cases."""


def cases(names: Iterable[str]) -> list:
    """Variants' names as parameters of a test."""
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.further) for name in names]
