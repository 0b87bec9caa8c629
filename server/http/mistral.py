"""Mistral's dialect: /v1/fim/completions."""

from __future__ import annotations

from typing import Any

from server.completion.requests import DEFAULT_MAX_TOKENS
from server.http.answering import Sample, answering
from server.http.call import Call, Endpoint
from server.http.openai_completions import CompletionAnswer, completion_fields, parse_completion
from server.http.openai_format import OPENAI_ERRORS, ChoicesAnswer
from server.request_fields import RANDOM_SEED, Table
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent
from specdec.errors import InvalidRequestError

_NOT_SHOWN = ("echo", "logprobs", "return_token_ids", "return_step_trees")  # an answer has nothing but text
_FIELDS = completion_fields(DEFAULT_MAX_TOKENS, parse_special=False)  # a prompt is a user's text
FIM_FIELDS: Table = (*(each for each in _FIELDS if each.name not in _NOT_SHOWN), RANDOM_SEED)
_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "error"}


def finish_reason(event: Finished) -> str:
    """Why a sample ended."""
    return _REASONS.get(event.reason, "stop")


class FimAnswer(CompletionAnswer):
    """Each chunk's choice has a ``delta.content``, which Continue requires."""

    id_prefix, kind, chunk_kind = "fim", ChoicesAnswer.kind, ChoicesAnswer.chunk_kind
    is_mistral = True

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


async def parse_fim(call: Call) -> CompletionAnswer:
    """What ``call`` asks for: one prompt of text.

    Raises:
        RequestError: it cannot be served; the error names every bad field.
    """
    if not isinstance(call.data.get("prompt"), str):
        raise InvalidRequestError.of("prompt", "must be text, the part before the gap")
    return await parse_completion(call, FIM_FIELDS, FimAnswer)


MISTRAL = (
    Endpoint("POST", "/v1/fim/completions", answering(parse_fim), OPENAI_ERRORS, "Mistral: fill a gap", FIM_FIELDS,
             ("prompt",), task=Task.FILL, gated=True),
)  # fmt: skip
