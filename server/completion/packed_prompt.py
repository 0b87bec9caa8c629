"""A prompt that fills a gap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """``ids``: all of it, but for the word that the gap is in, ``healed``, which the filling has to begin with; it has
    ``n_healed`` tokens by itself. ``fills_in``: the text behind the gap is part of it. ``ends``: ids that end the
    filling."""

    ids: tuple[int, ...]
    fills_in: bool
    ends: tuple[int, ...]
    healed: str = ""
    n_healed: int = 0
