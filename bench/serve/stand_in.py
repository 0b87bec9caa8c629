"""Texts in the place of prompts that were not recorded: as long, and with the same beginnings in common."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.texts import long_text

CHARACTERS_PER_TOKEN = 3.5  # of code, by common tokenizers
BLOCK_TOKENS = 64


def stand_in(blocks: Sequence[str], tokens: int, name: str) -> str:
    """A text of about ``tokens`` tokens of real code. ``blocks`` stand for the prompt's first tokens, 64 each, in
    chains: prompts with the same names at their beginning get the same text there. What follows is ``name``'s own."""
    source = long_text()
    parts = [_slice(source, block, BLOCK_TOKENS) for block in blocks]
    return "".join(parts) + _slice(source, f"rest of {name}", tokens - BLOCK_TOKENS * len(blocks))


def _slice(source: str, name: str, tokens: int) -> str:
    length = max(0, round(tokens * CHARACTERS_PER_TOKEN))
    start = random.Random(name).randrange(max(1, len(source) - length))
    return (source * (1 + length // len(source)))[start : start + length]
