"""Arms by key: documented, even, sticky."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from server.experiment.assignment import BUCKETS, Split, bucket, digest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "experiments.md"
_ROW = re.compile(r"^\| `([^`]*)` \| `([^`]*)` \| `([0-9a-f]{16})` \| (\d+) \|$", re.MULTILINE)


def test_the_documented_vectors_hold() -> None:
    rows = _ROW.findall(DOCS.read_text(encoding="utf-8"))
    assert len(rows) >= 6
    for salt, key, found, number in rows:
        assert digest(salt, key).hex() == found
        assert bucket(salt, key) == int(number)


@given(salt=st.text(max_size=20), key=st.text(max_size=40))
def test_a_bucket_follows_the_formula(salt: str, key: str) -> None:
    hashed = blake2b(digest_size=8)
    for part in (salt.encode(), b"\x00", key.encode()):
        hashed.update(part)
    number = 0
    for byte in hashed.digest():
        number = number * 256 + byte
    assert bucket(salt, key) == number % 10_000


def test_buckets_are_even_and_salts_are_independent() -> None:
    keys = [f"user-{i}" for i in range(40_000)]
    first, second = ([bucket(salt, key) for key in keys] for salt in ("a", "b"))
    for found in (first, second):
        counts = Counter(number // 100 for number in found)
        assert stats.chisquare([counts[i] for i in range(100)]).pvalue > 1e-3
    both = Counter((a // 2500, b // 2500) for a, b in zip(first, second, strict=True))
    table = [[both[i, j] for j in range(4)] for i in range(4)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_salt_and_key_are_delimited() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("", "x") != digest("x", "")


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5),
    share=st.floats(0.01, 1),
)
def test_ranges_have_the_width_of_their_weights(weights: list[float], share: float) -> None:
    split = Split({f"arm{i}": weight for i, weight in enumerate(weights)}, share)
    arms = [split.arm(number) for number in range(BUCKETS)]
    counts = Counter(arms)
    for i, weight in enumerate(weights):
        assert counts[f"arm{i}"] == pytest.approx(BUCKETS * share * weight / sum(weights), abs=1.001)
    assert counts[None] == pytest.approx(BUCKETS * (1 - share), abs=1.001)
    order = [arm for i, arm in enumerate(arms) if i == 0 or arm != arms[i - 1]]
    assert len(order) == len(set(order))  # one range each, in order
    assert arms[:1] == ["arm0"] or counts["arm0"] == 0


def test_halves_are_equal() -> None:
    split = Split({"a": 1, "b": 1})
    assert [split.arm(n) for n in (0, 4999, 5000, 9999)] == ["a", "a", "b", "b"]
    part = Split({"a": 1, "b": 3}, 0.2)
    assert [part.arm(n) for n in (499, 500, 1999, 2000)] == ["a", "b", "b", None]
