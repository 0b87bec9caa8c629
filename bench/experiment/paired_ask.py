"""A request that both arms are asked."""

from __future__ import annotations

from typing import NamedTuple

from bench.serve.ask import Ask


class PairedAsk(NamedTuple):
    """``pair``: what the records of both arms name; ``offset_s``: seconds after the beginning of its turn."""

    pair: str
    offset_s: float
    ask: Ask
