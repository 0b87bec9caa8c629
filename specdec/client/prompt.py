"""What can be asked with."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.client.chat_turn import ChatTurn
from specdec.client.fim import Fim

Prompt = str | Fim | Sequence[int] | Sequence[ChatTurn]
"""A text, a gap in one, token ids as they are, or a conversation."""
