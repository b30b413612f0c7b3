"""The digest over a head and pieces: what was changed is not read."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import SerializedError
from graphfuse.files.sealed import MARK, VERSION, open_sealed, seal

KEYS = st.one_of(st.none(), st.binary(min_size=1, max_size=8))


@given(st.binary(max_size=50), st.lists(st.binary(max_size=50), max_size=4), KEYS)
def test_what_is_opened_is_what_was_sealed(head, pieces, key):
    assert open_sealed(seal(head, pieces, key), key) == (head, tuple(pieces))


@settings(max_examples=300)
@given(st.data(), KEYS)
def test_any_other_bytes_are_refused(data, key):
    blob = seal(b"a head", [b"", b"a piece"], key)
    at = data.draw(st.integers(0, len(blob) - 1))
    end = data.draw(st.integers(at, len(blob)))
    new = data.draw(st.binary(max_size=6))
    changed = blob[:at] + new + blob[end:]
    if changed != blob:
        with pytest.raises(SerializedError):
            open_sealed(changed, key)


@pytest.mark.parametrize("end", range(0, 110, 7))
def test_truncated(end):
    blob = seal(b"a head", [b"a piece" * 10])
    with pytest.raises(SerializedError):
        open_sealed(blob[:end])


def forged(fixed: bytes, rest: bytes = b"") -> bytes:
    """With a digest that agrees, as anybody can make it."""
    content = MARK + fixed + rest
    return content + hashlib.sha256(content).digest()


FORGED = {
    "another version": (forged(struct.pack("<HBI", VERSION + 1, 0, 1), b"\0" * 8), f"version {VERSION + 1}; accepted"),
    "no lengths": (forged(struct.pack("<HBI", VERSION, 0, 0)), "no room for its lengths"),
    "lengths that are not there": (forged(struct.pack("<HBI", VERSION, 0, 2**32 - 1)), "no room for its lengths"),
    "too long": (forged(struct.pack("<HBIQ", VERSION, 0, 1, 2**64 - 1)), "has 0 bytes; its lengths say 18446744"),
    "too short": (forged(struct.pack("<HBIQ", VERSION, 0, 1, 1), b"ab"), "has 2 bytes; its lengths say 1"),
    "another digest": (forged(struct.pack("<HBI", VERSION, 7, 1)), "digest is of kind 7"),
    "another file": (b"\x7fELF" + b"\0" * 100, "is no serialized graph"),
}


@pytest.mark.parametrize(("blob", "message"), FORGED.values(), ids=FORGED)
def test_whoever_makes_the_digest_anew_is_told(blob, message):
    with pytest.raises(SerializedError, match=message):
        open_sealed(blob)


def test_keys():
    plain, keyed = seal(b"h", []), seal(b"h", [], b"mine")
    for blob, key, message in (
        (plain, b"mine", "made without a key"),
        (keyed, None, "made with a key"),
        (keyed, b"yours", "another key"),
    ):
        with pytest.raises(SerializedError, match=message):
            open_sealed(blob, key)
    # The kind of digest is under it: nobody turns data with a key into data without one.
    at = len(MARK) + 2
    with pytest.raises(SerializedError, match="digest does not agree"):
        open_sealed(keyed[:at] + b"\0" + keyed[at + 1 :])
