"""A tokenizer of bytes and special tokens, whose ids encode the text of any prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.completion.documents import FillMode, Gap
from server.completion.prompt_packer import PromptPacker

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>")


class CodeTokenizer:
    """Ids 0..255 are bytes of UTF-8; ``special`` names follow, then ``plain`` ones, which are added tokens that the
    file does not mark as special and that are found in any text."""

    has_chat_template = has_tool_template = False
    longest_token = 16

    def __init__(self, special: Sequence[str] = QWEN, plain: Sequence[str] = (), bos: str = "") -> None:
        self.names = {name: 256 + i for i, name in enumerate((*special, *plain))}
        self.special_ids = frozenset(self.names[name] for name in special)
        self._plain = [re.escape(name) for name in plain]
        self._bos = [self.names[bos]] if bos else []

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        names = [re.escape(name) for name in self.names] if parse_special else self._plain
        pieces = re.split(f"({'|'.join(names)})", text) if names else [text]
        ids: list[int] = []
        for piece in pieces:
            known = self.names.get(piece)
            if known is not None and (parse_special or known not in self.special_ids):
                ids.append(known)
            else:
                ids += piece.encode("utf-8", "surrogatepass")
        return [*self._bos, *ids] if add_special else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Bytes, and names where special tokens are not skipped; invalid text shows as U+FFFD."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return next(name for name, i in self.names.items() if i == token_id).encode()

    def token_id(self, token: str) -> int | None:
        return self.names.get(token)

    def special_id(self, name: str) -> int | None:
        found = self.names.get(name)
        return found if found in self.special_ids else None

    def shown(self, ids: Sequence[int]) -> str:
        """All of a prompt as text."""
        return self.decode(ids, skip_special=False)


def encoded(packer: PromptPacker, prefix: str, suffix: str) -> list[int]:
    """Ids of the prompt for the gap between two texts, without healing."""
    gap = Gap(prefix, suffix, head_from=len(prefix))
    return list(packer.pack(gap, FillMode.MIDDLE, packer.max_context * 7 // 8, heal=False).ids)
