"""What the front end needs of a tokenizer; `specdec.models.tokenizer.Tokenizer` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TokenizerLike(Protocol):
    """Text to ids and back; safe to use from several threads."""

    special_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""

    @property
    def has_tool_template(self) -> bool:
        """Whether `encode_chat` tells the model of tools, which then calls them in ``<tool_call>`` elements."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of ``text``."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation.

        Raises:
            ModelError: the model has no chat template.
            InvalidRequestError: the template refuses the messages.
        """

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a special token gives its name."""

    def special_id(self, name: str) -> int | None:
        """Id of the special token ``name``; None when there is none of that name."""
