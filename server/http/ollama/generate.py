"""POST /api/generate."""

from __future__ import annotations

from typing import Any

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.ollama.frame import Frame
from server.http.ollama.generate_ask import read_generate
from server.http.ollama.generate_stream import GenerateStream


async def generate(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.face.frontend.gate.enter():
        ask = await read_generate(call)
        frame, request = Frame(ask.model), ask.request
        if request is None:
            await call.reply(200, frame.loaded({"response": ""}))
        elif ask.stream:
            await stream_answer(call, [request], GenerateStream(ask, request))
        else:
            (sample,), totals = await whole_answer(call, [request])
            assert sample.end is not None  # an answer in one piece is made of finished samples
            content: dict[str, Any] = {"response": sample.text}
            if ask.context:
                content["context"] = [*request.prompt_ids, *sample.token_ids]
            await call.reply(200, frame.end(content, totals, sample.end))
