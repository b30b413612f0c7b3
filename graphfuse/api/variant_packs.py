"""The forms of a variant pack that cuDNN's ``execute`` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphfuse.base.errors import GraphTypeError, VariantPackError
from graphfuse.base.wording import counted


def pack(what: str, variant_pack: object, tensor_dict: object, tensor_uids: object) -> Mapping[Any, object]:
    """The variant pack, given under one of its two names, or as a list of buffers with a list of uids.

    what: the call that errors name. A pack that is no mapping is refused later, where it is read.
    """
    if variant_pack is not None and tensor_dict is not None:
        raise GraphTypeError(f"{what}: tensor_dict is cuDNN's name of variant_pack; give one of them")
    given: Any = tensor_dict if variant_pack is None else variant_pack
    return given if tensor_uids is None else _by_uid(what, given, tensor_uids)


def _by_uid(what: str, buffers: object, uids: object) -> Mapping[Any, object]:
    for name, value in (("variant_pack", buffers), ("tensor_uids", uids)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise GraphTypeError(
                f"{what}: with tensor_uids, {name} must be a list or tuple, got {type(value).__name__}; accepted: "
                "buffers, and the uid of each"
            )
    assert isinstance(buffers, Sequence) and isinstance(uids, Sequence)
    if len(buffers) != len(uids):
        raise VariantPackError(
            f"{what}: {counted(len(buffers), 'buffer')} and {counted(len(uids), 'tensor_uid')}; accepted: a uid of each"
        )
    for place, uid in enumerate(uids):
        if isinstance(uid, bool) or not isinstance(uid, int):
            raise GraphTypeError(f"{what}: tensor_uids[{place}] must be an int, got {uid!r}")
        if uid in uids[:place]:
            raise VariantPackError(f"{what}: tensor_uids has {uid} twice; uids must differ")
    return dict(zip(uids, buffers, strict=True))
