"""A tokenizer whose ids are the text's Latin-1 bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import FieldViolation, InvalidRequestError, ModelError

BOS = 2


class FakeTokenizer:
    """``add_special`` puts ``BOS`` first; a chat is "role:content;" per message."""

    def __init__(self, *, has_chat: bool = True) -> None:
        self.has_chat_template = has_chat

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = list(text.encode("latin-1", "replace"))
        if parse_special:
            ids = [255 if i == ord("!") else i for i in ids]
        return [BOS, *ids] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(i for i in ids if not (skip_special and i == BOS)).decode("latin-1")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        if not self.has_chat_template:
            raise ModelError("the model has no chat template")
        if any(m["role"] == "robot" for m in messages):
            raise InvalidRequestError([FieldViolation("chat", "unknown role robot")])
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages), add_special=False)
