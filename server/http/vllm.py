"""vLLM's /tokenize, for a text and for a conversation, and /tokenizer_info; its /detokenize is that of
llama.cpp. And its /render endpoints: what a request's prompt is in tokens, for routers that look for it in caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.http.call import Call, Endpoint
from server.http.fields import (
    CONVERSATION,
    FLAG,
    RESPONSES,
    TEXT,
    Schema,
    json_operation,
    read_conversation,
)
from server.http.openai import CHAT_FIELDS, COMPLETION_FIELDS
from server.http.openai_chat import parse_chat
from server.http.openai_completions import parse_completion
from server.http.openai_format import OpenAIErrors
from server.http.tool_use import read_tools
from server.json_body import Body
from server.served_model import Task
from specdec.core.types import Request


def _is_vllms(body: Mapping[str, Any]) -> bool:
    """llama.cpp's has ``content`` instead."""
    return "prompt" in body or "messages" in body


async def tokenize(call: Call) -> None:
    """Ids of a text or of a conversation.

    Raises:
        RequestError: it can not be read, or the model has no chat template.
    """
    body, model, info = call.body(), call.model, call.model.info
    call.model.check_name(body.text("model"))
    ids = await (_conversation(call, body) if body.has("messages") else _prompt(call, body))
    told = body.flag("return_token_strs")
    body.violations.raise_if_any()
    pieces = map(model.tokenizer.loaded.token_bytes, ids)
    texts = [piece.decode("utf-8", "replace") for piece in pieces] if told else None
    answer = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids, "token_strs": texts}
    await call.reply(200, answer)


async def _prompt(call: Call, body: Body) -> tuple[int, ...]:
    """Special tokens spelled out in it are read as such, as /v1/completions reads them."""
    text, special = body.text("prompt"), body.flag("add_special_tokens", True)
    if text is None:
        if not body.violations.found:
            body.refuse("prompt", "must be a string")
        return ()
    return tuple(await call.model.tokenizer.encode(text, add_special=special, parse_special=True))


async def _conversation(call: Call, body: Body) -> tuple[int, ...]:
    if body.has("prompt"):
        body.refuse("prompt", "messages are given too; give one of them")
    generation = body.flag("add_generation_prompt", True)
    tools = read_tools(body, call.model.tokenizer.loaded)
    return await read_conversation(body, call.model, tools, add_generation_prompt=generation)


async def tokenizer_info(call: Call) -> None:
    """The names of special tokens, with which lm-eval finds out that it may leave tokenising to the server.

    Raises:
        EngineDeadError: it is not loaded yet.
    """
    model, ends = call.model, call.model.info.eos_ids
    begin = await model.tokenizer.encode("")
    names = [
        model.tokenizer.loaded.token_bytes(ids[0]).decode("utf-8", "replace") if ids else None for ids in (begin, ends)
    ]
    await call.reply(200, {"bos_token": names[0], "eos_token": names[1], "pad_token": names[1]})


TOKENIZE_FIELDS: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "prompt": TEXT,
    "add_special_tokens": {**FLAG, "default": True, "description": "Of a prompt; a conversation has its template's."},
    **CONVERSATION,
    "add_generation_prompt": {**FLAG, "default": True},
    "return_token_strs": FLAG,
}
VLLM = (
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        OpenAIErrors(),
        json_operation("vLLM: ids of a text or of a conversation", TOKENIZE_FIELDS),
        claims=_is_vllms,
    ),
    Endpoint(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        OpenAIErrors(),
        {"summary": "vLLM: the names of special tokens", "responses": RESPONSES},
    ),
)


async def render_completion(call: Call) -> None:
    """One entry per prompt of a body of /v1/completions, which is checked as there and not begun.

    Raises:
        RequestError: it could not be served.
    """
    parsed = await parse_completion(call)
    await call.reply(200, [_rendered(call, request) for request in parsed.requests])


async def render_chat(call: Call) -> None:
    """The one entry of a body of /v1/chat/completions; raises as `render_completion`."""
    parsed = await parse_chat(call)
    await call.reply(200, _rendered(call, parsed.request))


def _rendered(call: Call, request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "request_id": request.request_id,
        "model": call.model.name,
        "token_ids": request.prompt_ids,
        "sampling_params": {
            "n": sampling.n, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "seed": sampling.seed, "max_tokens": request.stopping.max_tokens,
        },
    }  # fmt: skip


RENDER = (
    Endpoint(
        "POST", "/v1/completions/render", render_completion, OpenAIErrors(),
        json_operation("vLLM: the prompts of a completion in tokens", COMPLETION_FIELDS, ("prompt",)),
    ),
    Endpoint(
        "POST", "/v1/chat/completions/render", render_chat, OpenAIErrors(),
        json_operation("vLLM: the prompt of a conversation in tokens", CHAT_FIELDS, ("messages",)), task=Task.CHAT,
    ),
)  # fmt: skip
