"""A streamed answer of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from server.http.openai.chat_ask import ChatAsk
from server.http.openai.chunks import Chunks
from server.http.openai.finish import finish_fields
from server.http.openai.step_tree import step_tree_value
from server.http.openai.token_logprobs import ChatLogprobs
from server.http.openai.tool_call import ToolCall
from server.http.openai.tool_call_parser import ToolCallParser
from server.http.sse import MEDIA_TYPE
from server.tokenizer_protocol import TokenizerLike
from specdec.types import Delta, Finished, RequestEvent


class ChatStream:
    """Each sample's first chunk has the role; then one per Delta with text in it, one per tool call, one per end."""

    media_type = MEDIA_TYPE

    def __init__(self, head: dict[str, Any], ask: ChatAsk, tokenizer: TokenizerLike) -> None:
        self._ask, self._n, self._tokenizer = ask, ask.request.sampling.n, tokenizer
        self._chunks = Chunks(head, ask.streaming, self._n)
        self._logprobs = None if ask.request.output.logprobs is None else ChatLogprobs(tokenizer)
        self._parsers = [ToolCallParser() for _ in range(self._n)] if ask.tools else None
        self._calls = [0] * self._n

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The chunks that ``event`` makes."""
        self._chunks.totals.add(event)
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            return self._finished(event)
        # The prompt once, in the very first chunk, as vLLM has it.
        more = {"prompt_token_ids": self._ask.request.prompt_ids} if self._ask.return_token_ids else {}
        role = {"role": "assistant", "content": ""}
        return self._chunk(0, role, {}, **more) + b"".join(self._chunk(i, role, {}) for i in range(1, self._n))

    def last(self) -> bytes:
        """What follows the last sample's end."""
        return self._chunks.ending()

    def _delta(self, event: Delta) -> bytes:
        parts: list[str | ToolCall] = [event.text] if event.text else []
        if self._parsers is not None:
            parts = self._parsers[event.index].push(event.text)
        beside: dict[str, Any] = {}
        if self._logprobs is not None:
            beside["logprobs"] = self._logprobs.rows(event.logprobs)
        if self._ask.return_token_ids:
            beside["token_ids"] = event.token_ids
        if event.tree is not None:
            beside["step_tree"] = step_tree_value(event.tree, self._tokenizer)
        if beside and not parts:  # what goes along with the tokens goes out, whatever their text amounts to for now
            return self._chunk(event.index, {}, beside)
        return self._parts(event.index, parts, beside)

    def _finished(self, event: Finished) -> bytes:
        rest, called = b"", False
        if self._parsers is not None:
            rest = self._parts(event.index, self._parsers[event.index].flush(), {})
            called = self._parsers[event.index].calls > 0
        choice = {"index": event.index, "delta": {}, "logprobs": None, **finish_fields(event, called)}
        return rest + self._chunks.finish(choice)

    def _parts(self, index: int, parts: list[str | ToolCall], beside: dict[str, Any]) -> bytes:
        """A chunk per part; the first has ``beside``."""
        chunks = []
        for part in parts:
            delta: dict[str, Any] = {"content": part}
            if isinstance(part, ToolCall):
                delta = {"tool_calls": [{"index": self._calls[index], **part.fields()}]}
                self._calls[index] += 1
            chunks.append(self._chunk(index, delta, beside))
            beside = {}
        return b"".join(chunks)

    def _chunk(self, index: int, delta: dict[str, Any], beside: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **beside}
        return self._chunks.chunk(choice, **more)
