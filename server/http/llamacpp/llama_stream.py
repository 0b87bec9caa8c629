"""A streamed answer of /infill or /completion."""

from __future__ import annotations

from typing import Any

from server.http.llamacpp.ask import Ask
from server.http.llamacpp.probabilities import probabilities
from server.http.llamacpp.result import result
from server.http.sse import MEDIA_TYPE, sse
from server.tokenizer_protocol import TokenizerLike
from specdec.types import Delta, Finished, RequestEvent


class LlamaStream:
    """One event per Delta with text in it and one per sample's end, all with ``content`` and ``stop``; nothing else:
    Tabby's server takes every event for such a one. Where token ids or probabilities are asked for, Deltas without text
    are told too."""

    media_type = MEDIA_TYPE

    def __init__(self, ask: Ask, model: str, tokenizer: TokenizerLike) -> None:
        self._ask, self._model, self._tokenizer = ask, model, tokenizer
        self._made = [0] * ask.request.sampling.n

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The event that ``event`` makes, if it does."""
        if isinstance(event, Finished):
            return sse(result(self._ask, self._model, "", [], event))
        if not isinstance(event, Delta):
            return b""
        self._made[event.index] += len(event.token_ids)
        if not event.text and not self._ask.return_tokens and not event.logprobs:
            return b""
        found: dict[str, Any] = {
            "index": event.index,
            "content": event.text,
            "tokens": event.token_ids if self._ask.return_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._made[event.index],
            "tokens_evaluated": len(self._ask.request.prompt_ids),
        }
        if event.logprobs:
            found["completion_probabilities"] = probabilities(event.logprobs, self._tokenizer)
        return sse(found)

    def last(self) -> bytes:
        """Nothing follows."""
        return b""
