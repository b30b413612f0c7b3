"""The scalar forms of pointwise ops as the GPU computes them."""

import numpy as np
import pytest
import torch

from graphfuse.contract.engine import Address, Constant, Launch
from graphfuse.runtime import device, launch, nvrtc
from support import launching, scalar_forms

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def form():
    """(index of a case, a, b) -> the results, all float32 arrays."""
    chip = device.get("cuda:0")
    cubin = nvrtc.compile(scalar_forms.kernels(), chip.arch, "forms.cu")

    def run(index: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        tensors = [torch.from_numpy(values).cuda() for values in (a, b, np.zeros_like(a))]

        class Buffers:
            def address(self, tensor):
                return tensors[tensor].data_ptr()

        torch.cuda.synchronize()
        arguments = (*map(Address, range(3)), Constant("int32", a.size))
        kernel = launch.load(cubin, f"form_{index}", chip)
        launching.run(kernel, Launch(grid=-(-a.size // 256), block=256, arguments=arguments), Buffers())
        torch.cuda.synchronize()
        return tensors[2].cpu().numpy()

    return run


@pytest.mark.parametrize("index", range(len(scalar_forms.CASES)), ids=scalar_forms.IDS)
def test_scalar_form_against_torch(form, index):
    a, b = scalar_forms.operands(index)
    scalar_forms.hold(index, a, b, form(index, a, b), sigmoid=8e-6)


def test_max_and_min_order_zeros_and_pass_nan(form):
    """The bits of the emulator: tests/codegen/test_expressions.py."""
    numbers = {op.name: i for i, (op, _) in enumerate(scalar_forms.CASES)}
    nan = float("nan")
    a = np.array([0.0, -0.0, -0.0, 0.0, nan, 1.0, -2.0], np.float32)
    b = np.array([-0.0, 0.0, -0.0, 0.0, 1.0, nan, 1.0], np.float32)
    larger = [hex(bits) for bits in form(numbers["max"], a, b).view(np.uint32)]
    smaller = [hex(bits) for bits in form(numbers["min"], a, b).view(np.uint32)]
    assert larger == ["0x0", "0x0", "0x80000000", "0x0", "0x7fffffff", "0x7fffffff", "0x3f800000"]
    assert smaller == ["0x80000000", "0x80000000", "0x80000000", "0x0", "0x7fffffff", "0x7fffffff", "0xc0000000"]


@pytest.mark.parametrize("name", ["div", "reciprocal", "sqrt"])
def test_rounded_to_nearest(form, name):
    index = next(i for i, (op, _) in enumerate(scalar_forms.CASES) if op.name == name)
    a, b = scalar_forms.operands(index)
    with np.errstate(all="ignore"):
        want = {"div": lambda: a / b, "reciprocal": lambda: np.float32(1) / a, "sqrt": lambda: np.sqrt(a)}[name]()
    np.testing.assert_array_equal(form(index, a, b), want)
