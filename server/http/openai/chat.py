"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.openai.chat_ask import ChatAsk, read_chat
from server.http.openai.chat_stream import ChatStream
from server.http.openai.figures import extras, usage
from server.http.openai.finish import finish_fields
from server.http.openai.head import answer_head
from server.http.openai.token_logprobs import ChatLogprobs
from server.http.openai.tool_call import ToolCall
from server.http.openai.tool_call_parser import ToolCallParser
from server.http.sample import Sample
from server.tokenizer_protocol import TokenizerLike


async def chat(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    frontend = call.face.frontend
    with frontend.gate.enter():
        ask = await read_chat(call)
        tokenizer = frontend.loaded_tokenizer
        if ask.streaming.stream:
            head = answer_head(call, "chatcmpl", "chat.completion.chunk")
            await stream_answer(call, [ask.request], ChatStream(head, ask, tokenizer))
            return
        head = answer_head(call, "chatcmpl", "chat.completion")
        samples, totals = await whole_answer(call, [ask.request])
        choices = [_choice(sample, ask, tokenizer) for sample in samples]
        body = {**head, "choices": choices, "usage": usage(totals), **extras(totals)}
        if ask.return_token_ids:
            body["prompt_token_ids"] = ask.request.prompt_ids
        await call.reply(200, body)


def _choice(sample: Sample, ask: ChatAsk, tokenizer: TokenizerLike) -> dict[str, Any]:
    assert sample.end is not None  # an answer in one piece is made of finished samples
    message, called = _message(sample.text, ask)
    logprobs = None if ask.request.output.logprobs is None else ChatLogprobs(tokenizer).rows(sample.logprobs)
    choice: dict[str, Any] = {
        "index": sample.index,
        "message": message,
        "logprobs": logprobs,
        **finish_fields(sample.end, called),
    }
    if ask.return_token_ids:
        choice["token_ids"] = sample.token_ids
    return choice


def _message(text: str, ask: ChatAsk) -> tuple[dict[str, Any], bool]:
    """The answer, and whether it calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not ask.tools:
        return message, False
    parser = ToolCallParser()
    parts = [*parser.push(text), *parser.flush()]
    calls = [part.fields() for part in parts if isinstance(part, ToolCall)]
    message["content"] = "".join(part for part in parts if isinstance(part, str)) or (None if calls else "")
    return (message | {"tool_calls": calls} if calls else message), bool(calls)
