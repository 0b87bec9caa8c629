"""Mistral's dialect: /v1/fim/completions."""

from __future__ import annotations

from typing import Any

from server.completion.requests import DEFAULT_MAX_TOKENS
from server.http.answering import Sample, stream_answer, whole_answer
from server.http.call import Call, Endpoint
from server.http.openai_completions import CompletionRequest, CompletionStream, completion_fields, parse_completion
from server.http.openai_format import OpenAIErrors, answer_head, extras, usage
from server.request_fields import INTEGER, Field, Table, read_seed
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent
from specdec.errors import FieldViolation, InvalidRequestError

FIM_FIELDS: Table = (
    *completion_fields(DEFAULT_MAX_TOKENS),
    Field("random_seed", {**INTEGER, "description": "The seed, by Mistral's name."}, read_seed, "sampling.seed"),
)
_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "error"}


def finish_reason(event: Finished) -> str:
    """Why a sample ended."""
    return _REASONS.get(event.reason, "stop")


async def parse_fim(call: Call) -> CompletionRequest:
    """What ``call`` asks for: OpenAI's fields, with ``random_seed`` for the seed, and one prompt, of text.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    if not isinstance(call.data.get("prompt"), str):
        raise InvalidRequestError([FieldViolation("prompt", "must be text: what stands before the gap")])
    return await parse_completion(call, FIM_FIELDS)


class FimStream(CompletionStream):
    """Each chunk has a choice with a ``delta.content``, which Continue takes for granted; nothing but text is told."""

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The chunk that ``event`` makes, if it does."""
        self._chunks.totals.add(event)
        if isinstance(event, Delta) and event.text:
            return self._chunks.chunk(_chunk_choice(event.index, event.text, None))
        if isinstance(event, Finished):
            return self._chunks.finish(_chunk_choice(event.index, "", finish_reason(event)))
        return b""


def _chunk_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}


async def fill(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.model.gate.enter():
        parsed = await parse_fim(call)
        if parsed.streaming.stream:
            head = answer_head(call, "fim", "chat.completion.chunk")
            await stream_answer(call, parsed.requests, FimStream(head, parsed, call.model.tokenizer.loaded), share=True)
            return
        head = answer_head(call, "fim", "chat.completion")
        samples, totals = await whole_answer(call, parsed.requests, share=True)
        choices = [_whole_choice(sample) for sample in samples]
        await call.reply(200, {**head, "choices": choices, "usage": usage(totals), **extras(totals)})


def _whole_choice(sample: Sample) -> dict[str, Any]:
    assert sample.end is not None  # an answer in one piece is made of finished samples
    message = {"role": "assistant", "content": sample.text, "tool_calls": None, "prefix": False}
    return {"index": sample.index, "message": message, "finish_reason": finish_reason(sample.end)}


MISTRAL = (
    Endpoint("POST", "/v1/fim/completions", fill, OpenAIErrors(), "Mistral: fill a gap", FIM_FIELDS, ("prompt",),
             task=Task.FILL),
)  # fmt: skip
