"""Hashes of keys."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.auth.keys import KeyHash, new_key

# The lowest possible costs: the duration is not under test.
CHEAP = KeyHash.parse("scrypt:2:1:1:c2FsdHNhbHQ=:" + "A" * 43 + "=")


@given(key=st.text(max_size=80), other=st.text(max_size=80))
def test_a_fast_hash_matches_its_key_only(key: str, other: str) -> None:
    found = KeyHash.parse(str(KeyHash.of(key)))
    assert found.matches(key)
    assert found.matches(other) == (key == other)
    assert not found.slow


def test_a_slow_hash_is_scrypt_with_a_fresh_salt() -> None:
    first, second = KeyHash.of("pass", slow=True), KeyHash.of("pass", slow=True)
    assert first.salt != second.salt
    again = KeyHash.parse(str(first))
    assert again == first
    assert (again.matches("pass"), again.matches("Pass"), again.slow) == (True, False, True)
    n, r, p = first.cost
    assert first.digest == hashlib.scrypt(b"pass", salt=first.salt, n=n, r=r, p=p, maxmem=1 << 27, dklen=32)
    assert n >= 1 << 14


@given(key=st.text(max_size=20))
def test_a_slow_hash_does_not_match_by_chance(key: str) -> None:
    assert CHEAP.slow
    assert not CHEAP.matches(key)


@pytest.mark.parametrize(
    "text",
    [
        "", "sha256:", "sha256:" + "0" * 63, "sha256:" + "g" * 64, "md5:" + "0" * 32, "sd-abcdef",
        "scrypt:3:8:1:c2FsdHNhbHQ=:" + "A" * 43 + "=",  # not a power of two
        "scrypt:1048576:8:1:c2FsdHNhbHQ=:" + "A" * 43 + "=",  # a gigabyte per check
        "scrypt:2:1:99:c2FsdHNhbHQ=:" + "A" * 43 + "=",
        "scrypt:2:1:1:c2E=:" + "A" * 43 + "=",  # a salt of two bytes
        "scrypt:2:1:1:c2FsdHNhbHQ=:AAAA",
        "scrypt:x:1:1:c2FsdHNhbHQ=:" + "A" * 43 + "=",
        "scrypt:2:1:1:c2FsdHNhbHQ=:!",
    ],
)  # fmt: skip
def test_invalid_hashes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="specdec keys new"):
        KeyHash.parse(text)


def test_keys_are_long_random_and_recognisable() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sd-") and len(key) >= 46 and key.isascii() for key in keys)
