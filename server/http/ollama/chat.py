"""POST /api/chat."""

from __future__ import annotations

from collections.abc import Sequence

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.ollama.chat_ask import read_chat
from server.http.ollama.chat_stream import ChatStream
from server.http.ollama.frame import Frame
from server.http.ollama.message_parts import message
from server.http.openai.tool_call import ToolCall
from server.http.openai.tool_call_parser import ToolCallParser


async def chat(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.face.frontend.gate.enter():
        ask = await read_chat(call)
        frame = Frame(ask.model)
        if ask.request is None:
            await call.reply(200, frame.loaded({"message": message([])}))
        elif ask.stream:
            await stream_answer(call, [ask.request], ChatStream(ask))
        else:
            (sample,), totals = await whole_answer(call, [ask.request])
            assert sample.end is not None  # an answer in one piece is made of finished samples
            content = {"message": message(_parts(sample.text) if ask.tools else [sample.text])}
            await call.reply(200, frame.end(content, totals, sample.end))


def _parts(text: str) -> Sequence[str | ToolCall]:
    parser = ToolCallParser()
    return [*parser.push(text), *parser.flush()]
