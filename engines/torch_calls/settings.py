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


def holding(torch, wanted: Sequence[tuple[str, object]], run: Callable[..., None]) -> Callable[..., None]:
    """`run`, during which settings have the wanted values. They have their own again when it returns."""
    if not wanted:
        return run
    settings = tuple((_found(torch, name), value) for name, value in wanted)

    def held(*arguments: object) -> None:
        with _HELD:
            changed = []
            try:
                for setting, value in settings:
                    before = setting.read()
                    if before[0] != value and not (value == "ieee" and before[0] == "none"):
                        changed.append((setting, before))
                        setting.write(value, *before[1:])
                run(*arguments)
            finally:
                for setting, before in changed:
                    setting.write(*before)

    return held
