"""A streamed answer of /v1/completions."""

from __future__ import annotations

from typing import Any

from server.http.openai.chunks import Chunks
from server.http.openai.completion_ask import CompletionAsk
from server.http.openai.finish import finish_fields
from server.http.openai.step_tree import step_tree_value
from server.http.openai.token_logprobs import LegacyLogprobs
from server.http.sse import MEDIA_TYPE
from server.tokenizer_protocol import TokenizerLike
from specdec.types import Delta, Finished, RequestEvent


class CompletionStream:
    """One chunk per Delta with text in it, one per sample's end."""

    media_type = MEDIA_TYPE

    def __init__(self, head: dict[str, Any], ask: CompletionAsk, tokenizer: TokenizerLike) -> None:
        sampling, output = ask.requests[0].sampling, ask.requests[0].output
        samples = sampling.n * len(ask.requests)
        self._ask, self._n, self._tokenizer = ask, sampling.n, tokenizer
        self._chunks = Chunks(head, ask.streaming, samples)
        self._logprobs = None if output.logprobs is None else [LegacyLogprobs(tokenizer) for _ in range(samples)]

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The chunks that ``event`` makes."""
        self._chunks.totals.add(event)
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            choice = {"index": event.index, "text": "", "logprobs": None, **finish_fields(event)}
            return self._chunks.finish(choice)
        return b"".join(self._beginning(prompt, prompt * self._n + i) for i in range(self._n))

    def last(self) -> bytes:
        """What follows the last sample's end."""
        return self._chunks.ending()

    def _beginning(self, prompt: int, index: int) -> bytes:
        """What comes before a sample's own tokens, where anything was asked for."""
        text = self._ask.echo[prompt]
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._ask.return_token_ids:
            choice |= {"prompt_token_ids": self._ask.requests[prompt].prompt_ids, "token_ids": []}
        elif not text:
            return b""
        return self._chunks.chunk(choice)

    def _delta(self, event: Delta) -> bytes:
        if not (event.text or self._logprobs or self._ask.return_token_ids or event.tree):
            return b""
        logprobs = None if self._logprobs is None else self._logprobs[event.index].rows(event.logprobs)
        choice: dict[str, Any] = {
            "index": event.index, "text": event.text, "logprobs": logprobs, "finish_reason": None
        }  # fmt: skip
        if self._ask.return_token_ids:
            choice["token_ids"] = event.token_ids
        if event.tree is not None:
            choice["step_tree"] = step_tree_value(event.tree, self._tokenizer)
        return self._chunks.chunk(choice)
