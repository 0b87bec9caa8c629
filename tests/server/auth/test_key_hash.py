"""Keys and their hashes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.auth.keys import KeyEntry, key_hash, new_key


@given(key=st.text(max_size=80))
def test_a_hash_is_the_sha256_of_its_key(key: str) -> None:
    assert key_hash(key) == f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def test_a_hash_is_read_in_either_case() -> None:
    entry = KeyEntry(name="a", tenant="t", hash=key_hash("k").upper())
    assert entry.hash == key_hash("k")


@pytest.mark.parametrize(
    "text",
    [
        "", "sha256:", "sha256:" + "0" * 63, "sha256:" + "g" * 64, "sha256:" + " 0" * 32, "sha256:" + "0" * 64 + "\n",
        "md5:" + "0" * 32, "sd-abcdef", "scrypt:16384:8:1:c2FsdHNhbHQ=:" + "A" * 43 + "=",
    ],
)  # fmt: skip
def test_invalid_hashes_are_rejected(text: str) -> None:
    with pytest.raises(ValidationError, match="make a new key with `specdec keys new`"):
        KeyEntry(name="a", tenant="t", hash=text)


def test_keys_are_long_random_and_recognisable() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sd-") and len(key) >= 46 and key.isascii() for key in keys)
