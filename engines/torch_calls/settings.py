"""Settings of torch that products depend on, which have certain values during a call.

They are global to the process. So such calls are serialized, and products of other threads at that time use these
values, too.
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
"""Settings: the module in torch.backends, and the name in it."""

EXACT_PRODUCTS = {
    data_type.BFLOAT16: ((REDUCED_BF16, False),),
    data_type.HALF: ((REDUCED_HALF, False), (ACCUMULATED_IN_HALF, False)),
    data_type.FLOAT: ((PRODUCTS_OF_FLOAT, "ieee"),),
}
"""Settings with which cuBLAS adds in float32 and does not round float32 operands, by the type of the operands."""


Wanted = Sequence[tuple[tuple[str, str], object]]
"""Settings with their values."""


TorchSetting = Callable[[str, str], tuple[Callable[[], tuple], Callable[..., object]]]
"""Function that returns those that read and write a setting (``Site.torch_setting``)."""


def holding(found: TorchSetting, wanted: Wanted) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Decorator of a function during whose calls settings have the wanted values. They are restored afterwards."""
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
