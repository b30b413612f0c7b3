"""Settings of torch's that products depend on, held at a value for the time of one call.

They belong to the process. So calls hold them one after another, and another thread that multiplies at that moment
does so as exactly.
"""

import threading
from collections.abc import Callable, Sequence

from graphfuse.base.dtypes import data_type

_HELD = threading.Lock()


REDUCED_BF16 = ("cuda.matmul", "allow_bf16_reduced_precision_reduction")
REDUCED_HALF = ("cuda.matmul", "allow_fp16_reduced_precision_reduction")
ACCUMULATED_IN_HALF = ("cuda.matmul", "allow_fp16_accumulation")
PRODUCTS_OF_FLOAT = ("cuda.matmul", "fp32_precision")
CONVOLUTIONS_OF_FLOAT = ("cudnn.conv", "fp32_precision")
DETERMINISTIC = ("cudnn", "deterministic")
BENCHMARK = ("cudnn", "benchmark")
"""Settings: the module in torch.backends, and the name there."""

EXACT_PRODUCTS = {
    data_type.BFLOAT16: ((REDUCED_BF16, False),),
    data_type.HALF: ((REDUCED_HALF, False), (ACCUMULATED_IN_HALF, False)),
    data_type.FLOAT: ((PRODUCTS_OF_FLOAT, "ieee"),),
}
"""Settings under which cuBLAS adds up in float32 and reads float32 as it is, by the type of what is multiplied."""


Wanted = Sequence[tuple[tuple[str, str], object]]
"""Settings with their values."""


TorchSetting = Callable[[str, str], tuple[Callable[[], tuple], Callable[..., object]]]
"""Finds what reads and what writes a setting (``Site.torch_setting``)."""


def holding(found: TorchSetting, wanted: Wanted) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Makes of a function the same, during which settings have the wanted values. They have their own again when it
    returns."""
    if not wanted:
        return lambda run: run
    settings = [(*found(*name), value, ("none",) if value == "ieee" else ()) for name, value in wanted]

    def hold(run: Callable[..., object]) -> Callable[..., object]:
        def held(*arguments: object) -> None:
            with _HELD:
                changed = []
                try:
                    for read, write, value, alike in settings:
                        before = read()
                        if before[0] != value and before[0] not in alike:
                            changed.append((write, before))
                            write(value, *before[1:])
                    run(*arguments)
                finally:
                    for write, before in changed:
                        write(*before)

        return held

    return hold
