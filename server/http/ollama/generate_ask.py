"""What a body of /api/generate asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from server.http.call import Call
from server.http.fields.common import read_common
from server.http.fields.prediction import read_prediction
from server.http.ollama.asked_model import asked_model
from server.http.ollama.format import read_format
from server.http.ollama.options import read_options
from server.http.ollama.prompt import PromptFields
from server.http.validation import validate
from specdec.types import Request

DEFAULT_ROOM = 512  # tokens kept free for what fills a gap, where no limit is given


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """``request`` None: nothing is to be generated. ``context``: tell the ids that go on from here."""

    model: str
    request: Request | None
    stream: bool
    context: bool


async def read_generate(call: Call) -> GenerateAsk:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    model = asked_model(body, call.face)
    fields, stream = PromptFields(body), body.flag("stream", default=True)
    sampling, stopping = read_options(body, frontend.loaded_tokenizer)
    ids, ends = await fields.encode(frontend, stopping.max_tokens or DEFAULT_ROOM)
    request = Request(
        request_id=f"ollama-{call.request_id}",
        prompt_ids=ids,
        sampling=sampling,
        stopping=dataclasses.replace(stopping, stop_token_ids=(*stopping.stop_token_ids, *ends)),
        prediction_ids=await read_prediction(body, frontend),
        grammar=read_format(body),
        **read_common(call, body),
    )
    validate([request], call.face.info, body.seen)
    return GenerateAsk(model, None if fields.is_empty else request, stream, not fields.is_raw)
