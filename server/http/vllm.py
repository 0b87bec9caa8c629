"""vLLM's /tokenize, for a text and for a conversation, and /tokenizer_info; its /detokenize is that of
llama.cpp. And its /render endpoints: what a request's prompt is in tokens, for routers that look for it in caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.http.call import Call, Endpoint
from server.http.fields import CONVERSATION, MODEL, read_conversation
from server.http.openai_chat import CHAT_FIELDS, parse_chat
from server.http.openai_completions import COMPLETION_FIELDS, parse_completion
from server.http.openai_format import OPENAI_ERRORS
from server.http.tool_use import read_tools
from server.request_fields import Table, flag_field, text_field
from server.served_model import Task
from specdec.core.types import Request

TOKENIZE_FIELDS: Table = (
    MODEL,
    text_field("prompt"),
    flag_field("add_special_tokens", "Of a prompt; a conversation has its template's.", default=True),
    *CONVERSATION,
    flag_field("return_token_strs"),
)


async def tokenize(call: Call) -> None:
    """Ids of a text or of a conversation."""
    body, fields = await call.read_request(TOKENIZE_FIELDS)
    model, own = call.model, fields.own
    ids: Sequence[int] = ()
    if not body.has("messages"):
        if "prompt" not in own:
            body.refuse("prompt", "must be a string")
        # Special tokens spelled out in the prompt are read as such, as in /v1/completions.
        ids = await model.tokenizer.encode(
            own.get("prompt", ""), add_special=own["add_special_tokens"], parse_special=True
        )
    else:
        if body.has("prompt"):
            body.refuse("prompt", "messages are given too; give one of them")
        tools = read_tools(body, model.tokenizer.loaded)
        ids = await read_conversation(body, own, model, tools)
    body.violations.raise_if_any()
    pieces = map(model.tokenizer.loaded.token_bytes, ids)
    texts = [piece.decode("utf-8", "replace") for piece in pieces] if own["return_token_strs"] else None
    max_context = model.info.max_context
    await call.reply(200, {"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": texts})


async def tokenizer_info(call: Call) -> None:
    """The names of special tokens, with which lm-eval finds out that it may leave tokenising to the server."""
    model, ends = call.model, call.model.info.eos_ids
    begin = await model.tokenizer.encode("")
    names = [
        model.tokenizer.loaded.token_bytes(ids[0]).decode("utf-8", "replace") if ids else None for ids in (begin, ends)
    ]
    await call.reply(200, {"bos_token": names[0], "eos_token": names[1], "pad_token": names[1]})


VLLM = (
    Endpoint("POST", "/tokenize", tokenize, OPENAI_ERRORS, "vLLM: ids of a text or of a conversation", TOKENIZE_FIELDS,
             claims=lambda body: "prompt" in body or "messages" in body),  # llama.cpp's has "content" instead
    Endpoint("GET", "/tokenizer_info", tokenizer_info, OPENAI_ERRORS, "vLLM: the names of special tokens"),
)  # fmt: skip


async def render_completion(call: Call) -> None:
    """The prompts of a body of /v1/completions, which is checked and not run."""
    parsed = await parse_completion(call)
    name, count = f"cmpl-{call.request_id}", len(parsed.requests)
    names = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
    await call.reply(200, [_rendered(call, *each) for each in zip(parsed.requests, names, strict=True)])


async def render_chat(call: Call) -> None:
    """The prompt of a body of /v1/chat/completions, which is checked and not run."""
    parsed = await parse_chat(call)
    await call.reply(200, _rendered(call, parsed.request, parsed.request.request_id))


def _rendered(call: Call, request: Request, name: str) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "request_id": name,
        "model": call.model.name,
        "token_ids": request.prompt_ids,
        "sampling_params": {
            "n": sampling.n, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "seed": sampling.seed, "max_tokens": request.stopping.max_tokens,
        },
    }  # fmt: skip


RENDER = (
    Endpoint("POST", "/v1/completions/render", render_completion, OPENAI_ERRORS,
             "vLLM: the prompts of a completion in tokens", COMPLETION_FIELDS, ("prompt",)),
    Endpoint("POST", "/v1/chat/completions/render", render_chat, OPENAI_ERRORS,
             "vLLM: the prompt of a conversation in tokens", CHAT_FIELDS, ("messages",), task=Task.CHAT),
)  # fmt: skip
