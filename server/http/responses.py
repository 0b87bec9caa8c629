"""OpenAI's /v1/responses: its streamed answer and its whole answer. Nothing of either is kept."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any

from server.http.answering import MEDIA_TYPE, Totals, named_event, stream_answer, whole_answer
from server.http.blocks import Block, Blocks, Step, Steps
from server.http.call import Call, Endpoint
from server.http.errors import Refusal
from server.http.fields import (
    COMMON,
    COUNT,
    FLAG,
    OBJECT,
    PREDICTION,
    SAMPLING,
    STOPPING,
    TEXT,
    TEXTS,
    Schema,
    json_operation,
)
from server.http.openai_format import ChatLogprobs, OpenAIErrors, extras
from server.http.responses_request import LOGPROBS, ResponsesRequest, parse_responses
from server.interfaces import TokenizerLike
from server.served_model import Task
from specdec.core.fields import MAX_LOGPROBS
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent

_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORTED: "abort"}


def usage(totals: Totals) -> dict[str, Any]:
    """What the answer took."""
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.output_tokens,
    }


def response_head(call: Call, parsed: ResponsesRequest) -> dict[str, Any]:
    """An answer that has only begun."""
    return {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": int(time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": call.model.name,
        "output": [],
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **parsed.echo,
        **call.notes(),
    }


def end_fields(event: Finished) -> dict[str, Any]:
    """``status``, and why it is not complete, where that is so."""
    cut = _CUT.get(event.reason)
    return {
        "status": "completed" if cut is None else "incomplete",
        "incomplete_details": None if cut is None else {"reason": cut},
    }


class Items:
    """Blocks as items of an answer's output. ``base``: what their ids are made of."""

    def __init__(self, base: str) -> None:
        self._base = base

    def item(self, block: Block, status: str, logprobs: list[Any]) -> dict[str, Any]:
        """A message, or a call of a function, with what there is of it."""
        if block.call is not None:
            called = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {"id": self.item_id(block), "type": "function_call", "status": status, **called}
        content = [text_part(block.text, logprobs)] if block.text else []
        return {
            "id": self.item_id(block), "type": "message", "status": status, "role": "assistant", "content": content,
        }  # fmt: skip

    def item_id(self, block: Block) -> str:
        """An id that no other item has."""
        return f"{'msg' if block.call is None else 'fc'}_{self._base}_{block.index}"


def text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    """The one part of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


class ResponseStream:
    """The answer without output, then its items one after the other, then all of it."""

    media_type = MEDIA_TYPE

    def __init__(self, call: Call, parsed: ResponsesRequest, tokenizer: TokenizerLike) -> None:
        self._answer, self._items = response_head(call, parsed), Items(call.request_id)
        self._blocks, self._totals, self._sent = Blocks(parsed.tools), Totals(), 0
        self._logprobs = None if parsed.request.output.logprobs is None else ChatLogprobs(tokenizer)
        self._rows: list[Any] = []  # of the text so far
        self._n_rows_sent = 0
        self._last_status = "completed"

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The events that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            if self._logprobs is not None:
                self._rows += self._logprobs.rows(event.logprobs)["content"]
            return self._steps(self._blocks.push(event.text))
        if isinstance(event, Finished):
            end = end_fields(event)
            self._last_status = end["status"]
            rest = self._steps(self._blocks.end())
            self._answer |= {**end, "usage": usage(self._totals), **extras(self._totals)}
            return rest
        return self._event("response.created", response=self._answer) + self._event(
            "response.in_progress", response=self._answer
        )

    def last(self) -> bytes:
        """All of the answer."""
        return self._event(f"response.{self._answer['status']}", response=self._answer)

    def failed(self, refusal: Refusal) -> bytes:
        """What ends a stream that breaks off."""
        error = {"code": refusal.reason.lower(), "message": refusal.message}
        return self._event("response.failed", response={**self._answer, "status": "failed", "error": error})

    def _steps(self, steps: Steps) -> bytes:
        return b"".join(self._step(*step) for step in steps)

    def _step(self, step: Step, block: Block, text: str) -> bytes:
        at = {"item_id": self._items.item_id(block), "output_index": block.index}
        if block.call is None:
            at["content_index"] = 0
        if step is Step.OPEN:
            return self._open(block, at)
        if step is Step.CLOSE:
            return self._close(block, at)
        if block.call is not None:
            return self._event("response.function_call_arguments.delta", **at, delta=text)
        rows, self._n_rows_sent = self._rows[self._n_rows_sent :], len(self._rows)
        return self._event("response.output_text.delta", **at, delta=text, logprobs=rows)

    def _open(self, block: Block, at: dict[str, Any]) -> bytes:
        item = self._items.item(block, "in_progress", [])
        opened = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.call is not None:
            return opened
        return opened + self._event("response.content_part.added", **at, part=text_part("", []))

    def _close(self, block: Block, at: dict[str, Any]) -> bytes:
        status = self._last_status if block is self._blocks.found[-1] else "completed"
        item = self._items.item(block, status, self._rows)
        self._answer["output"] = [*self._answer["output"], item]
        if block.call is not None:
            done = self._event(
                "response.function_call_arguments.done", **at, name=block.call.name, arguments=block.text
            )
        else:
            done = self._event("response.output_text.done", **at, text=block.text, logprobs=self._rows)
            done += self._event("response.content_part.done", **at, part=text_part(block.text, self._rows))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return named_event({"type": kind, "sequence_number": number, **fields})


async def respond(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    model = call.model
    with model.gate.enter():
        parsed = await parse_responses(call)
        tokenizer = model.tokenizer.loaded
        if parsed.stream:
            stream = ResponseStream(call, parsed, tokenizer)
            call.broken = stream.failed
            await stream_answer(call, [parsed.request], stream)
            return
        (sample,), totals = await whole_answer(call, [parsed.request])
        assert sample.end is not None  # an answer in one piece is made of finished samples
        end, rows = end_fields(sample.end), []
        if parsed.request.output.logprobs is not None:
            rows = ChatLogprobs(tokenizer).rows(sample.logprobs)["content"]
        items, blocks = Items(call.request_id), Blocks.of(sample.text, parsed.tools).found
        output = [items.item(block, end["status"] if block is blocks[-1] else "completed", rows) for block in blocks]
        answer = {**response_head(call, parsed), **end, "output": output, "usage": usage(totals), **extras(totals)}
        await call.reply(200, answer)


_ITEM: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"oneOf": [TEXT, {"type": "array", "items": {"type": "object", "properties": {
            "type": {"enum": ["input_text", "output_text"]}, "text": TEXT,
        }}}]},
        "call_id": TEXT, "name": TEXT, "arguments": TEXT, "output": TEXT,
    },
}  # fmt: skip
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"enum": ["function"]},
        "name": TEXT,
        "description": TEXT,
        "parameters": OBJECT,
        "strict": FLAG,
    },
}
_CHOICE: Schema = {
    "type": "object",
    "description": "The one to call.",
    "properties": {"type": {"enum": ["function"]}, "name": TEXT},
}
_FORMAT: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "name": TEXT, "schema": OBJECT},
}
_NONE: Schema = {"type": "null", "description": "Nothing is kept on the server."}
RESPONSES_FIELDS: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "input": {"oneOf": [TEXT, {"type": "array", "minItems": 1, "items": _ITEM}]},
    "instructions": TEXT,
    "max_output_tokens": {**COUNT, "description": "0: only compute the prompt into the prefix cache."},
    "text": {"type": "object", "properties": {"format": _FORMAT}},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"oneOf": [{"enum": ["auto", "none", "required"]}, _CHOICE]},
    "parallel_tool_calls": {**FLAG, "default": True, "description": "False: at most one call."},
    "stream": FLAG,
    "include": {**TEXTS, "description": f"{LOGPROBS}, or what is ignored."},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "metadata": {**OBJECT, "description": "Told again in the answer."},
    "user": TEXT,
    "truncation": {"enum": ["disabled"]},
    "store": {**FLAG, "description": "Whatever it says, the answer is not kept, and says so."},
    "background": {"enum": [False]},
    "previous_response_id": _NONE,
    "conversation": _NONE,
    "prompt": _NONE,
    **SAMPLING,
    **STOPPING,
    **PREDICTION,
    **COMMON,
}

OPENAI_RESPONSES = (
    Endpoint("POST", "/v1/responses", respond, OpenAIErrors(),
             json_operation("Answer in a conversation of items", RESPONSES_FIELDS, ("input",)), task=Task.CHAT),
)  # fmt: skip
