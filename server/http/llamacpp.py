"""llama.cpp's dialect: /infill and /completion, /props, /slots, /apply-template, /tokenize, /detokenize, /health."""

from __future__ import annotations

from typing import Any

import specdec
from server.errors import DrainingError
from server.http.answering import answering, sse
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.errors import LLAMA_TOO_LONG, Refusal
from server.http.fields import CONVERSATION, MODEL, MODEL_QUERY, read_conversation
from server.http.llamacpp_completions import COMPLETION_FIELDS, INFILL_FIELDS, parse_completion, parse_infill
from server.http.openai_format import ERROR_TYPES
from server.http.tool_use import read_tools
from server.request_fields import IDS, TEXT, Field, Table, flag_field, text_field
from server.served_model import Task
from specdec.errors import EngineDeadError
from specdec.models.tokenizer import Tokenizer

_TYPES = ERROR_TYPES | {404: "not_found_error", 503: "unavailable_error"}


def _error_body(refusal: Refusal) -> dict[str, Any]:
    """``code`` is the status. ``reason`` and ``field`` are additions. Clients shorten a prompt by ``n_ctx``."""
    kind = _TYPES.get(refusal.status, "invalid_request_error")
    error: dict[str, Any] = {"code": refusal.status, "message": refusal.worded(LLAMA_TOO_LONG), "type": kind}
    if refusal.too_long is not None:
        limit, got = refusal.too_long
        error |= {"type": "exceed_context_size_error", "n_prompt_tokens": got, "n_ctx": limit + 1}
    return {"error": error | {"reason": refusal.reason.lower(), "field": refusal.field}}


async def tokenize(call: Call) -> None:
    """Text to ids."""
    body, fields = await call.read_request(TOKENIZE_FIELDS)
    own, model = fields.own, call.model
    if "content" not in own:
        body.refuse("content", "must be a string")
    body.violations.raise_if_any()
    ids = await model.tokenizer.encode(
        own["content"], add_special=own["add_special"], parse_special=own["parse_special"]
    )
    shown = [_piece(model.tokenizer.loaded, token) for token in ids] if own["with_pieces"] else ids
    await call.reply(200, {"tokens": shown})


async def detokenize(call: Call) -> None:
    """Ids to text, special tokens by name. vLLM has the same body, and its clients read ``prompt``."""
    body, _ = await call.read_request(DETOKENIZE_FIELDS)
    ids = body.integers("tokens", 0, call.model.info.vocab_size - 1)
    body.violations.raise_if_any()
    text = await call.model.tokenizer.decode(ids, skip_special=False)
    await call.reply(200, {"content": text, "prompt": text})


async def apply_template(call: Call) -> None:
    """A conversation as text, without the begin token, which /completion adds itself."""
    body, fields = await call.read_request(TEMPLATE_FIELDS)
    model = call.model
    ids = await read_conversation(body, fields.own, model, read_tools(body, model.tokenizer.loaded))
    body.violations.raise_if_any()
    begin = tuple(await model.tokenizer.encode(""))
    shown = ids[len(begin) :] if ids[: len(begin)] == begin else ids
    await call.reply(200, {"prompt": await model.tokenizer.decode(shown, skip_special=False)})


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A piece that is not valid text is returned as bytes."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


async def health(call: Call) -> None:
    """Whether a request would be accepted now."""
    state = call.server.models.state
    if not call.server.models.take_requests:  # of a ready engine, the tokenizer is still loading
        if call.model.gate.is_closed:
            raise DrainingError
        raise EngineDeadError("Loading model" if state in ("loading", "ready") else f"not ready: {state}")
    await call.reply(200, {"status": "ok"})


async def slots(call: Call) -> None:
    """The slots of the batch, as many of them busy as requests run."""
    info, load = call.model.info, call.model.client.engine.load
    if call.query.get("fail_on_no_slot") and load.running_requests >= info.max_batch:
        raise EngineDeadError("no slot available")
    known = {"n_ctx": info.max_context, "speculative": bool(info.drafters)}
    busy = (number < load.running_requests for number in range(info.max_batch))
    await call.reply(200, [{"id": i, **known, "is_processing": working} for i, working in enumerate(busy)])


async def props(call: Call) -> None:
    """The model and the server."""
    info = call.model.info
    await call.reply(
        200,
        {
            "default_generation_settings": {"n_ctx": info.max_context, "params": {"n_predict": -1}},
            "total_slots": info.max_batch,
            "model_alias": call.model.name,
            "model_path": info.target,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "",
            "build_info": f"specdec-{specdec.__version__}",
            "is_sleeping": False,
        },
    )


TOKENIZE_FIELDS: Table = (
    MODEL,
    text_field("content"),
    flag_field("add_special"),
    flag_field("parse_special", default=True),
    flag_field("with_pieces"),
)
DETOKENIZE_FIELDS: Table = (MODEL, Field("tokens", IDS))
TEMPLATE_FIELDS: Table = (MODEL, *CONVERSATION)
_ERRORS = ErrorStyle(_error_body, sse)
_FREE = {"name": "fail_on_no_slot", "in": "query", "schema": TEXT, "description": "503 if no slot is free."}
LLAMACPP = (
    Endpoint("POST", "/infill", answering(parse_infill), _ERRORS, "llama.cpp: fill a gap", INFILL_FIELDS,
             ("input_prefix", "input_suffix"), task=Task.FILL, gated=True),
    *(
        Endpoint("POST", path, answering(parse_completion), _ERRORS, "llama.cpp: continue a text", COMPLETION_FIELDS,
                 ("prompt",), gated=True)
        for path in ("/completion", "/completions")
    ),
    Endpoint("POST", "/tokenize", tokenize, _ERRORS, "llama.cpp: ids of a text", TOKENIZE_FIELDS, ("content",)),
    Endpoint("POST", "/detokenize", detokenize, _ERRORS, "llama.cpp, vLLM: text of ids", DETOKENIZE_FIELDS,
             ("tokens",)),
    Endpoint("POST", "/apply-template", apply_template, _ERRORS, "llama.cpp: the text of a conversation",
             TEMPLATE_FIELDS, ("messages",), task=Task.CHAT),
    Endpoint("GET", "/slots", slots, _ERRORS, "llama.cpp: which slots are free", parameters=(_FREE,)),
    Endpoint("GET", "/props", props, _ERRORS, "llama.cpp: the model and the server", parameters=(MODEL_QUERY,)),
    Endpoint("GET", "/health", health, _ERRORS, "llama.cpp: requests are taken"),
)  # fmt: skip
