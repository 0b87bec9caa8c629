"""What a body of /api/chat asks for."""

from __future__ import annotations

from dataclasses import dataclass

from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.fields.prediction import read_prediction
from server.http.ollama.asked_model import asked_model
from server.http.ollama.format import read_format
from server.http.ollama.images import refuse_images
from server.http.ollama.options import read_options
from server.http.openai.messages import read_conversation
from server.http.openai.tools import read_tools
from server.http.validation import validate
from specdec.types import Request


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """``request`` None: nothing is to be generated. ``tools``: the model was told of tools, so its text may hold calls
    of them."""

    model: str
    request: Request | None
    stream: bool
    tools: bool


async def read_chat(call: Call) -> ChatAsk:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    model, stream = asked_model(body, call.face), body.flag("stream", default=True)
    call.field_names["prompt"] = "messages"
    tools = read_tools(body)
    empty = body.raw("messages") in (None, [])
    ids = () if empty else await _read_messages(body, call, tools)
    sampling, stopping = read_options(body, frontend.loaded_tokenizer)
    request = Request(
        request_id=f"ollama-{call.request_id}",
        prompt_ids=ids or (0,),  # a stand-in where there are none: the other fields are checked all the same
        sampling=sampling,
        stopping=stopping,
        prediction_ids=await read_prediction(body, frontend),
        grammar=read_format(body),
        **read_common(call, body),
    )
    body.seen.check(empty or bool(ids) or bool(body.seen.violations), "messages", "must amount to at least one token")
    validate([request], call.face.info, body.seen)
    told = tools is not None and frontend.loaded_tokenizer.has_tool_template
    return ChatAsk(model, None if empty else request, stream, told)


async def _read_messages(body: Body, call: Call, tools: list[dict[str, object]] | None) -> tuple[int, ...]:
    for message in body.objects("messages"):
        refuse_images(message)
    return () if body.seen.violations else await read_conversation(body, call.face.frontend, tools)
