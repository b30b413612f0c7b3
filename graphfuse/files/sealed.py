"""A container of bytes with a digest that detects damage: a head of JSON, pieces of any bytes, and their digest.

    mark and version | kind of digest | lengths of the head and of each piece | head | pieces | digest

The digest is SHA-256 or, with a key, HMAC-SHA256. SHA-256 detects damage only: one can change the bytes and recompute
it. HMAC-SHA256 needs the key. Head and pieces are read only if the digest is right.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence

from graphfuse.base.errors import SerializedError
from graphfuse.base.wording import counted

MARK = b"graphfuse-plan\n"
VERSION = 1
"""Version of the container and of its head. It increases with every change that another version would read wrongly."""

_PLAIN, _KEYED = 0, 1
_FIXED = struct.Struct(f"<{len(MARK)}sHBI")  # mark, version, kind of digest, number of lengths
_DIGEST = hashlib.sha256().digest_size


def seal(head: bytes, pieces: Sequence[bytes], key: bytes | None = None) -> bytes:
    """`head` and `pieces` in one container. key: for HMAC-SHA256; None for SHA-256."""
    lengths = struct.pack(f"<{len(pieces) + 1}Q", len(head), *map(len, pieces))
    fixed = _FIXED.pack(MARK, VERSION, _PLAIN if key is None else _KEYED, len(pieces) + 1)
    content = b"".join((fixed, lengths, head, *pieces))
    return content + _digest(content, key)


def open_sealed(blob: bytes, key: bytes | None = None) -> tuple[bytes, tuple[bytes, ...]]:
    """Head and pieces. Raises SerializedError if damaged, of another version, or not sealed with `key`."""
    if not blob.startswith(MARK):
        raise SerializedError(f"this is no serialized graph: it does not begin with {MARK!r}")
    if len(blob) < _FIXED.size + _DIGEST:
        raise SerializedError(f"the serialized graph is truncated: it has {counted(len(blob), 'byte')}")
    _, version, kind, count = _FIXED.unpack_from(blob)
    if version != VERSION:
        raise SerializedError(f"the serialized graph is of version {version}; accepted: {VERSION}; serialize it anew")
    if kind not in (_PLAIN, _KEYED):
        raise SerializedError(f"the serialized graph is damaged: its digest is of kind {kind}")
    if kind == _KEYED and key is None:
        raise SerializedError("the serialized graph was made with a key; accepted: the same key")
    if kind == _PLAIN and key is not None:
        raise SerializedError("the serialized graph was made without a key; accepted: one made with this key")
    content = blob[:-_DIGEST]
    if not hmac.compare_digest(blob[-_DIGEST:], _digest(content, key)):
        what = "it is damaged" if key is None else "it is damaged, or was made with another key"
        raise SerializedError(f"the serialized graph cannot be used: {what}; its digest does not agree")
    start = _FIXED.size + 8 * count
    if not count or start > len(content):
        raise SerializedError("the serialized graph has no room for its lengths")
    lengths = struct.unpack_from(f"<{count}Q", content, _FIXED.size)
    if start + sum(lengths) != len(content):
        raise SerializedError(
            f"the serialized graph has {counted(len(content) - start, 'byte')}; its lengths say {sum(lengths)}"
        )
    found = []
    for length in lengths:
        found.append(content[start : start + length])
        start += length
    return found[0], tuple(found[1:])


def _digest(content: bytes, key: bytes | None) -> bytes:
    return hashlib.sha256(content).digest() if key is None else hmac.new(key, content, hashlib.sha256).digest()
