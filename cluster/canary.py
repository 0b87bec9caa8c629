"""Which release a session gets, as Envoy computes it: for planning a canary, and for joining its figures afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import xxhash


def session_key(headers: Mapping[str, str], affinity_headers: Sequence[str]) -> str | None:
    """What a call is kept together by: the first of ``affinity_headers`` that it has; None: it has none.

    ``headers``: names in lower case.
    """
    return next((headers[name] for name in affinity_headers if headers.get(name)), None)


def release_of(key: str, shares: Sequence[tuple[str, int]]) -> str:
    """The release of a session: the 64 bits of XXH64 of ``key`` in UTF-8, modulo the sum of the weights, find it among
    ``shares``, as `Fleet.shares` gives them. Nothing is drawn, so everybody who knows the shares gets the same answer.

    Raises:
        ValueError: there is no weight.
    """
    ends = list(accumulate(weight for _, weight in shares))
    if not ends or not ends[-1]:
        raise ValueError("no release has a weight above 0")
    place = xxhash.xxh64_intdigest(key.encode("utf-8")) % ends[-1]
    return next(name for (name, _), end in zip(shares, ends, strict=True) if place < end)
