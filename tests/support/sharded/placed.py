"""Tensors placed on a mesh, and how what calls on them return is compared."""

import re

import torch


def dtensor(mesh, t, *placements):
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = placements or (Replicate(),) * mesh.ndim
    made = distribute_tensor(t.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_(t.requires_grad)


def same(got, want) -> None:
    """Bit by bit."""
    assert got.shape == want.shape and got.dtype == want.dtype
    whole = got.full_tensor()
    assert torch.equal(whole.view(torch.uint8), want.contiguous().view(torch.uint8)), (
        (whole.float() - want.float()).abs().max()
    )


def near(got, want) -> None:
    """Sums over ranks: in another order, rounded once on each."""
    assert got.shape == want.shape and got.dtype == want.dtype
    scale = max(1.0, want.abs().max().item())
    rounding = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.full_tensor(), want, rtol=rounding, atol=max(1e-6, rounding) * scale)


def refuses(error, said, function, *given, **named):
    try:
        function(*given, **named)
    except error as raised:
        assert re.search(said, str(raised)), raised
    else:
        raise AssertionError(f"not refused: {said}")
