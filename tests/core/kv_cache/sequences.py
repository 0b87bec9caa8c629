"""Short ways to make sequences and to pretend that their KV was computed."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import Sequence
from specdec.core.types import Request, SamplingParams, StoppingParams
from tests.sequences import new_sequence


def text(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids, a prefix of the endless text ``seed``."""
    return random.Random(seed).choices(range(50_000), k=length)


def make_request(
    tokens: Seq[int], salt: str = "", priority: int = 0, n: int = 1, max_tokens: int | None = None, name: str = "r"
) -> Request:
    return Request(
        name,
        tuple(tokens),
        sampling=SamplingParams(n=n),
        stopping=StoppingParams(max_tokens=max_tokens),
        priority=priority,
        cache_salt=salt,
    )


def make_samples(request: Request, arrival_s: float = 0.0) -> list[Sequence]:
    return [new_sequence(request, index, index, arrival_s) for index in range(request.sampling.n)]


def make_sequence(tokens: Seq[int], salt: str = "") -> Sequence:
    return new_sequence(make_request(tokens, salt))


def compute(kv: KvCacheManager, seq: Sequence, n_tokens: int | None = None, draft_tokens: int = 0) -> Sequence:
    """Give ``seq`` its pages and publish it as computed up to ``n_tokens`` (default: all but the pending one)."""
    assert kv.ensure(seq, len(seq.tokens))
    seq.n_computed = len(seq.tokens) - 1 if n_tokens is None else n_tokens
    seq.draft_computed = draft_tokens
    kv.publish(seq)
    return seq
