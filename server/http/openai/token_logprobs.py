"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from server.tokenizer_protocol import TokenizerLike
from specdec.types import TokenLogprobs

_FLOOR = -9999.0  # OpenAI's way to write minus infinity, which JSON can not


class LegacyLogprobs:
    """The shape of /v1/completions. One per sample: it counts where each token begins in the text."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def rows(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next positions. Offsets count characters; a special token takes none."""
        offsets = []
        for row in rows:
            offsets.append(self._offset)
            if row.token_id not in self._tokenizer.special_ids:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(row.token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [_number(row.logprob) for row in rows],
            "tokens": [self._text(row.token_id) for row in rows],
            "top_logprobs": [{self._text(token): _number(p) for token, p in row.top} for row in rows],
        }

    def _text(self, token: int) -> str:
        """Part of a character is written as ``bytes:\\xe2\\x80``, so that tokens stay apart."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobs:
    """The shape of /v1/chat/completions."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer

    def rows(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next positions."""
        return {
            "content": [
                self._token(row.token_id, row.logprob) | {"top_logprobs": [self._token(*top) for top in row.top]}
                for row in rows
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(data)}


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)
