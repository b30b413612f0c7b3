"""Settings of torch's that products depend on, held at a value for the time of one call.

They belong to the process. So calls hold them one after another, and another thread that multiplies at that moment
does so as exactly.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphfuse.base.dtypes import data_type

_HELD = threading.Lock()


@dataclass(frozen=True, eq=False)
class TorchSetting:
    """One setting. read() -> its value as a tuple, that write(*values) takes."""

    read: Callable[[], tuple]
    write: Callable[..., object]


def _found(torch, name: str) -> TorchSetting:
    c = torch._C
    if name in ("matmul", "conv"):  # how float32 is multiplied: "ieee", "tf32", "none" for ieee
        return TorchSetting(
            lambda: (c._get_fp32_precision_getter("cuda", name),),
            lambda value: c._set_fp32_precision_setter("cuda", name, value),
        )
    read, write = getattr(c, f"_get_{name}"), getattr(c, f"_set_{name}")

    def as_tuple() -> tuple:
        value = read()
        return value if isinstance(value, tuple) else (value,)

    return TorchSetting(as_tuple, write)


REDUCED_BF16 = "cublas_allow_bf16_reduced_precision_reduction"
REDUCED_HALF = "cublas_allow_fp16_reduced_precision_reduction"
ACCUMULATED_IN_HALF = "cublas_allow_fp16_accumulation"
DETERMINISTIC = "cudnn_deterministic"
BENCHMARK = "cudnn_benchmark"

EXACT_PRODUCTS = {
    data_type.BFLOAT16: ((REDUCED_BF16, False),),
    data_type.HALF: ((REDUCED_HALF, False), (ACCUMULATED_IN_HALF, False)),
    data_type.FLOAT: (("matmul", "ieee"),),
}
"""Settings under which cuBLAS adds up in float32 and reads float32 as it is, by the type of what is multiplied."""


def holding(torch, wanted: Sequence[tuple[str, object]]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Makes of a function the same, during which settings have the wanted values. They have their own again when it
    returns."""
    if not wanted:
        return lambda run: run
    settings = tuple(
        (found.read, found.write, value, (value, "none") if value == "ieee" else (value,))
        for found, value in ((_found(torch, name), value) for name, value in wanted)
    )

    def hold(run: Callable[..., object]) -> Callable[..., object]:
        def held(*arguments: object) -> None:
            with _HELD:
                changed = []
                try:
                    for read, write, value, alike in settings:
                        before = read()
                        if before[0] not in alike:
                            changed.append((write, before))
                            write(value, *before[1:])
                    run(*arguments)
                finally:
                    for write, before in changed:
                        write(*before)

        return held

    return hold
