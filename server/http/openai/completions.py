"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.openai.completion_ask import CompletionAsk, read_completion
from server.http.openai.completion_stream import CompletionStream
from server.http.openai.figures import extras, usage
from server.http.openai.finish import finish_fields
from server.http.openai.head import answer_head
from server.http.openai.token_logprobs import LegacyLogprobs
from server.http.sample import Sample
from server.tokenizer_protocol import TokenizerLike


async def complete(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    frontend = call.face.frontend
    with frontend.gate.enter():
        ask = await read_completion(call)
        share = bool(call.data.get("suffix"))  # editors ask for the same gap several times at once
        head, tokenizer = answer_head(call, "cmpl", "text_completion"), frontend.loaded_tokenizer
        if ask.streaming.stream:
            await stream_answer(call, ask.requests, CompletionStream(head, ask, tokenizer), share=share)
            return
        samples, totals = await whole_answer(call, ask.requests, share=share)
        choices = [_choice(sample, ask, tokenizer) for sample in samples]
        await call.reply(200, {**head, "choices": choices, "usage": usage(totals), **extras(totals)})


def _choice(sample: Sample, ask: CompletionAsk, tokenizer: TokenizerLike) -> dict[str, Any]:
    assert sample.end is not None  # an answer in one piece is made of finished samples
    request = ask.requests[sample.prompt]
    logprobs = None if request.output.logprobs is None else LegacyLogprobs(tokenizer).rows(sample.logprobs)
    choice: dict[str, Any] = {
        "index": sample.index,
        "text": ask.echo[sample.prompt] + sample.text,
        "logprobs": logprobs,
        **finish_fields(sample.end),
    }
    if ask.return_token_ids:
        choice |= {"prompt_token_ids": request.prompt_ids, "token_ids": sample.token_ids}
    return choice
