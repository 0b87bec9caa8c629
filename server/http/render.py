"""vLLM's /render endpoints: what a request's prompt is in tokens, for routers that look for it in caches."""

from __future__ import annotations

from typing import Any

from server.http.call import Call, Endpoint
from server.http.fields import json_operation
from server.http.openai import CHAT_FIELDS, COMPLETION_FIELDS
from server.http.openai_chat import parse_chat
from server.http.openai_completions import parse_completion
from server.http.openai_format import OpenAIErrors
from server.served_models import Task
from specdec.types import Request


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
        "model": call.server.model,
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
