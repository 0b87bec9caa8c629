"""One prompt as a client has it: before any tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.client import ChatTurn, Fim


@dataclass(frozen=True, slots=True)
class Ask:
    """Exactly one of ``text``, ``chat`` and ``gap`` is given. ``prediction``: text the answer is expected to be like,
    ``session``: who asks, "" for nobody in particular."""

    name: str
    max_tokens: int
    text: str = ""
    chat: tuple[ChatTurn, ...] = ()
    gap: Fim | None = None
    stop: tuple[str, ...] = ()
    prediction: str = ""
    session: str = ""
