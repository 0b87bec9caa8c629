"""POST /v1/fim/completions."""

from __future__ import annotations

from typing import Any

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.mistral.fim_ask import read_fim
from server.http.mistral.fim_stream import FimStream
from server.http.mistral.words import finish_reason
from server.http.openai.figures import extras, usage
from server.http.openai.head import answer_head
from server.http.sample import Sample


async def fill(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.face.frontend.gate.enter():
        ask = await read_fim(call)
        if ask.streaming.stream:
            head = answer_head(call, "fim", "chat.completion.chunk")
            await stream_answer(call, ask.requests, FimStream(head, ask), share=True)
            return
        head = answer_head(call, "fim", "chat.completion")
        samples, totals = await whole_answer(call, ask.requests, share=True)
        choices = [_choice(sample) for sample in samples]
        await call.reply(200, {**head, "choices": choices, "usage": usage(totals), **extras(totals)})


def _choice(sample: Sample) -> dict[str, Any]:
    assert sample.end is not None  # an answer in one piece is made of finished samples
    message = {"role": "assistant", "content": sample.text, "tool_calls": None, "prefix": False}
    return {"index": sample.index, "message": message, "finish_reason": finish_reason(sample.end)}
