"""What an attention mask allows, by its values."""

import pytest
import torch

from graphfuse.torch.attention.mask import ALL, CAUSAL, MaskKind, mask_kind

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_what_masks_allow(dtype, monkeypatch):
    monkeypatch.setattr("graphfuse.torch.attention.mask._AT_ONCE", 16)  # rows at a time

    def made(seen):
        return seen if dtype is torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    assert (
        mask_kind(made(lower), 7, 7) == CAUSAL and mask_kind(made(lower)[None, None].expand(3, 2, 7, 7), 7, 7) == CAUSAL
    )
    assert mask_kind(made(torch.ones(5, 7).bool()), 5, 7) == ALL and mask_kind(made(torch.ones(7).bool()), 5, 7) == ALL
    assert mask_kind(made(torch.ones(1, 1).bool()), 1, 1) == ALL
    for other, keys in ((lower.T, 7), (~lower, 7), (lower[:, :5], 5), (lower[:1].expand(7, 7), 7), (lower & ~lower, 7)):
        assert mask_kind(made(other), 7, keys) is None
    assert mask_kind(made(lower[-1:]).expand(7, 7), 7, 7) == ALL
    for width in (1, 3, 6):
        assert mask_kind(made(lower.triu(1 - width)), 7, 7) == MaskKind(True, width)
        assert mask_kind(made(lower.triu(1 - width)[:5]), 5, 7) is None
    for i, j in ((0, 0), (6, 6), (6, 1), (3, 4)):
        changed = lower.clone()
        changed[i, j] = not changed[i, j]
        for other in (changed, torch.stack([lower, changed]), torch.stack([changed, lower])):
            assert mask_kind(made(other), 7, 7) is None
        changed = lower.triu(-3)
        changed[i, j] = not changed[i, j]
        assert mask_kind(made(changed), 7, 7) is None
    assert mask_kind(torch.ones(2, 2, dtype=torch.int64), 2, 2) is None and mask_kind(made(lower)[:0], 0, 7) is None
    if dtype is not torch.bool:
        assert mask_kind(torch.full((2, 2), float("nan"), dtype=dtype), 2, 2) is None
