"""Sequences for tests that have no engine."""

from __future__ import annotations

from typing import Any, cast

from specdec.config import SpeculationConfig
from specdec.core.sequence import Sequence
from specdec.core.types import Request
from specdec.models.tokenizer import Tokenizer


class NoText:
    """A tokenizer whose tokens have no text and never end."""

    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return b""


def new_sequence(
    request: Request, index: int = 0, seed: int = 0, arrival_s: float = 0.0, vocab_size: int = 1000, **fields: Any
) -> Sequence:
    """A sequence as an engine makes it; ``fields`` are further arguments of `Sequence`."""
    given = {"max_context": 1 << 20, "speculation": SpeculationConfig(), **fields}
    return Sequence(request, index, seed, arrival_s, cast(Tokenizer, NoText()), vocab_size=vocab_size, **given)
