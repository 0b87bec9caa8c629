"""A tokenizer that costs nothing, so that what is left is the front end: ids are the text's Latin-1 bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import ModelError

VOCAB_SIZE = 256


class ByteTokenizer:
    """No special tokens, no chat template."""

    special_ids: frozenset[int] = frozenset()
    has_chat_template = has_tool_template = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode("latin-1", "replace"))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Raises ModelError: there is no chat template."""
        raise ModelError("the byte tokenizer has no chat template; send text")

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of those bytes."""
        return bytes(ids).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return bytes([token_id])

    def special_id(self, name: str) -> int | None:
        """None: there are none."""
        return None
