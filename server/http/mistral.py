"""Mistral's dialect: /v1/fim/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.completion.requests import DEFAULT_MAX_TOKENS
from server.http.answering import Sample, answer
from server.http.call import Call, Endpoint
from server.http.openai_completions import CompletionAnswer, CompletionRequest, completion_fields, parse_completion
from server.http.openai_format import OPENAI_ERRORS, chat_head
from server.request_fields import RANDOM_SEED, Table
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent
from specdec.errors import InvalidRequestError

FIM_FIELDS: Table = (
    *completion_fields(DEFAULT_MAX_TOKENS, parse_special=False),  # a prompt is a user's text
    RANDOM_SEED,
)
_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "error"}


def finish_reason(event: Finished) -> str:
    """Why a sample ended."""
    return _REASONS.get(event.reason, "stop")


async def parse_fim(call: Call) -> CompletionRequest:
    """What ``call`` asks for: one prompt of text.

    Raises:
        RequestError: it cannot be served; the error names every bad field.
    """
    if not isinstance(call.data.get("prompt"), str):
        raise InvalidRequestError.of("prompt", "must be text, the part before the gap")
    parsed = await parse_completion(call, FIM_FIELDS)
    return replace(parsed, options=replace(parsed.options, is_mistral=True))


class FimAnswer(CompletionAnswer):
    """Each chunk's choice has a ``delta.content``, which Continue requires. There is nothing but text."""

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta) and event.text:
            return self._chunk(_chunk_choice(event.index, event.text, None))
        if isinstance(event, Finished):
            return self._last_chunk(_chunk_choice(event.index, "", finish_reason(event)))
        return b""

    def _choice(self, sample: Sample) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "tool_calls": None, "prefix": False}
        return {"index": sample.index, "message": message, "finish_reason": finish_reason(sample.end)}


def _chunk_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}


async def fill(call: Call) -> None:
    """Answer a call of /v1/fim/completions."""
    parsed = await parse_fim(call)
    await answer(call, FimAnswer(call, chat_head(call, "fim", parsed.options), parsed))


MISTRAL = (
    Endpoint("POST", "/v1/fim/completions", fill, OPENAI_ERRORS, "Mistral: fill a gap", FIM_FIELDS, ("prompt",),
             task=Task.FILL, gated=True),
)  # fmt: skip
