"""Order of the positional parameters that cuDNN's op methods have after an op's ports and attributes.

Most have the compute data type before the name, which is the default; `TRAILING` lists the others. An option that is
not offered keeps its position if one that is offered follows it.
"""

from collections.abc import Mapping

_NAME_FIRST = ("name", "compute_data_type")

TRAILING: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gen_index", "relu", "leaky_relu", "swish"), _NAME_FIRST),
    **dict.fromkeys(("relu_backward", "leaky_relu_backward", "swish_backward"), _NAME_FIRST),
    "matmul": ("compute_data_type", "padding", "name"),
}
