"""A prompt and when it is to be sent."""

from __future__ import annotations

from typing import NamedTuple

from bench.serve.ask import Ask


class TimedAsk(NamedTuple):
    """``offset_s``: seconds after the beginning of the run."""

    offset_s: float
    ask: Ask
