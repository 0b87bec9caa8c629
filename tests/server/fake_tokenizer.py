"""A tokenizer whose ids are the text's Latin-1 bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import FieldViolation, InvalidRequestError, ModelError
from specdec.models.chat_template import plain_messages
from specdec.models.tool_forms import ToolForm

BOS = 2


class FakeTokenizer:
    """``add_special`` puts ``BOS`` first; a chat is "role:content;" per message, after "[names of tools]"; the last ";"
    is the generation prompt."""

    special_ids = frozenset({BOS})
    longest_token = 1
    end_id = None
    thought_marks: tuple[int, int, tuple[int, ...]] | None = None

    def __init__(
        self, *, has_chat: bool = True, has_tools: bool = False, tool_form: ToolForm = ToolForm.HERMES
    ) -> None:
        self.has_chat_template, self.has_tool_template = has_chat, has_tools
        self.tool_form = tool_form

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = list(text.encode("latin-1", "replace"))
        if parse_special:
            ids = [255 if i == ord("!") else i for i in ids]
        return [BOS, *ids] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(i for i in ids if not (skip_special and i == BOS)).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<bos>" if token_id == BOS else bytes([token_id])

    def token_id(self, token: str) -> int | None:
        return BOS if token == "<bos>" else None

    def special_id(self, name: str) -> int | None:
        return self.token_id(name)

    def template_mentions(self, variable: str) -> bool:
        return False

    def leaves_thoughts_open(self, ids: Sequence[int]) -> bool:
        return False

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not self.has_chat_template:
            raise ModelError("the model has no chat template")
        for i, message in enumerate(messages):
            if message["role"] == "robot":
                raise InvalidRequestError([FieldViolation(f"messages[{i}].role", "unknown role robot")])
        talk = "".join(f"{m['role']}:{m['content']};" for m in plain_messages(messages))
        names = f"[{','.join(tool['function']['name'] for tool in tools)}]" if tools else ""
        given = dict(variables or {})
        end = "" if given.pop("add_generation_prompt", True) else talk[-1:]
        names += "".join(f"{name}={value!r};" for name, value in given.items())
        return self.encode(names + talk.removesuffix(end), add_special=False)


class ScriptedTokenizer(FakeTokenizer):
    """Bytes, and the marks of a gap, so that fill-in-the-middle works too."""

    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    special_ids = frozenset({BOS, 256, 257, 258})

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:  # type: ignore[override]
        return super().decode([i for i in ids if i < 256], skip_special=skip_special)

    def token_id(self, token: str) -> int | None:
        return 256 + self.names.index(token) if token in self.names else super().token_id(token)
