"""Places that cuDNN's op methods give, by position, to what stands behind an op's ports and attributes.

Most have the compute data type before the name, as methods have here unless they are listed. An option that is not
offered has a place where one that is offered stands behind it.
"""

from collections.abc import Mapping

_NAME_FIRST = ("name", "compute_data_type")

TRAILING: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gen_index", "relu", "leaky_relu", "swish"), _NAME_FIRST),
    **dict.fromkeys(("relu_backward", "leaky_relu_backward", "swish_backward"), _NAME_FIRST),
    "matmul": ("compute_data_type", "padding", "name"),
}
