"""The offline half of a canary: which release a key gets."""

from __future__ import annotations

from collections import Counter

import pytest
import xxhash

from cluster.canary import release_of, session_key

SHARES = [("green", 10), ("blue", 90)]


def test_a_key_is_the_first_header_that_is_there() -> None:
    order = ("x-workspace-id", "x-session-id")
    assert session_key({"x-session-id": "s", "x-workspace-id": "w"}, order) == "w"
    assert session_key({"x-session-id": "s", "x-workspace-id": ""}, order) == "s"
    assert session_key({"authorization": "a"}, order) is None


def test_the_arm_is_xxh64_modulo_the_weights_in_the_order_of_the_shares() -> None:
    assert xxhash.xxh64_intdigest(b"abc") == 0x44BC2CF5AD770999  # the algorithm's own test vector
    assert 0x44BC2CF5AD770999 % 100 == 49
    assert release_of("abc", [("green", 49), ("blue", 51)]) == "blue"
    assert release_of("abc", [("green", 50), ("blue", 50)]) == "green"
    assert release_of("größe", SHARES) == release_of("größe", SHARES)


def test_a_growing_canary_keeps_whom_it_has() -> None:
    keys = [f"session-{i}" for i in range(4000)]
    small = {key for key in keys if release_of(key, SHARES) == "green"}
    large = {key for key in keys if release_of(key, [("green", 30), ("blue", 70)]) == "green"}
    assert small < large
    counts = Counter(release_of(key, SHARES) for key in keys)
    assert counts["green"] == pytest.approx(400, abs=80)


def test_somebody_has_to_serve() -> None:
    with pytest.raises(ValueError, match="no release has a weight"):
        release_of("a", [])
