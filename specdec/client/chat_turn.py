"""One message of a conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """``role``: "system", "user", "assistant", or whatever the model's template knows."""

    role: str
    content: str
