"""Group norms of real widths on the GPU: as exact as torch's, in either layout, and none by the reference engine."""

import pytest
import torch
from torch.nn import functional as F

from graphfuse.torch.convolutional import group_norm

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::graphfuse.ReferenceEngineWarning")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["places last", "channels last"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 128, 512, 512), 32),
        ((2, 512, 128, 136), 32),
        ((1, 256, 5, 240, 208), 32),
        ((9, 96, 96, 104), 32),
        ((2, 512, 128, 136), 1),
    ],
    ids=str,
)
def test_as_exact_as_torch(shape, groups, last, dtype):
    norm = torch.nn.GroupNorm(groups, shape[1], eps=1e-6, device="cuda", dtype=dtype).requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    x = (torch.randn(shape, device="cuda") * 2 + 3).to(dtype)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    wanted = F.group_norm(x.double(), groups, norm.weight.double(), norm.bias.double(), norm.eps)
    for silu in (False, True) * 3:  # the third calls are prepared
        own = F.silu(norm(x)) if silu else norm(x)
        exact = F.silu(wanted) if silu else wanted
        made = group_norm.group_norm(x, norm, silu)
        assert made is not None and made.stride() == x.stride()
        assert (made - exact).abs().max() <= 2 * (own - exact).abs().max() + 1e-5
