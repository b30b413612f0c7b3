"""Every small kernel variant on the GPU, in allocations of exactly its tensors' sizes."""

import pytest

import gpu_kernels
from graphfuse.runtime import device
from support.variants import VARIANTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.small])
def test_variant(name):
    assert gpu_kernels.run_variant(VARIANTS[name], device.get("cuda:0")) == 2
