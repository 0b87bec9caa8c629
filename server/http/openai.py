"""Endpoints of OpenAI's dialect, their bodies' schemas, /v1/models, /v1/embeddings refused in words, and DeepSeek's
/beta/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.http.call import Call, Endpoint
from server.http.fields import (
    COMMON,
    CONVERSATION,
    COUNT,
    FLAG,
    GRAMMAR,
    IDS,
    PREDICTION,
    RESPONSES,
    SAMPLING,
    STOPPING,
    STREAM_OPTIONS,
    TEXT,
    TEXTS,
    TOP_LOGPROBS,
    Schema,
    json_operation,
)
from server.http.openai_chat import chat
from server.http.openai_completions import complete
from server.http.openai_format import OpenAIErrors
from server.request_fields import param_schemas
from server.served_model import ServedModel, Task
from specdec.core.fields import MAX_N
from specdec.core.types import OutputParams, ResumeParams
from specdec.errors import RequestError


async def list_models(call: Call) -> None:
    """The models, each with its aliases behind it.

    Raises:
        EngineDeadError: it is not known yet.
    """
    await call.reply(200, {"object": "list", "data": [card for model in call.server.models for card in _cards(model)]})


async def show_model(call: Call) -> None:
    """The model of a name.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    asked = call.path_params["model"]
    call.model.check_name(asked)
    cards = _cards(call.model)
    await call.reply(200, next((card for card in cards if card["id"] == asked), cards[0]))


def _cards(model: ServedModel) -> list[dict[str, Any]]:
    """The model's card, then one per alias."""
    card, aliases = _card(model), model.names.aliases
    return [card | {"aliases": aliases}, *(card | {"id": alias, "parent": card["id"]} for alias in aliases)]


def _card(model: ServedModel) -> dict[str, Any]:
    """``numeric_fingerprint`` as in `EngineInfo`; ``max_model_len`` as vLLM has it, ``meta`` as llama.cpp; ``type``
    and the rest as Mistral."""
    info, tokenizer = model.info, model.tokenizer.loaded
    return {
        "id": model.name,
        "object": "model",
        "created": model.started_s,
        "owned_by": "specdec",
        "root": info.target,
        "parent": None,
        "max_model_len": info.max_context,
        "numeric_fingerprint": info.numeric_fingerprint,
        "meta": {"n_ctx_train": info.max_context, "n_vocab": info.vocab_size},
        "type": "base",
        "max_context_length": info.max_context,
        "capabilities": {
            "completion_chat": tokenizer.has_chat_template,
            "completion_fim": model.fills_in,
            "function_calling": tokenizer.has_tool_template,
            "fine_tuning": False,
            "vision": False,
            "classification": False,
        },
        "aliases": (),
    }


_SHARED: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_N, "default": 1},
    "best_of": {"type": "integer", "description": "Equal to n, where given."},
    "max_tokens": {**COUNT, "description": "0: only compute the prompt into the prefix cache."},
    "stream": FLAG,
    "stream_options": STREAM_OPTIONS,
    "return_token_ids": FLAG,
    **param_schemas(OutputParams),
    **SAMPLING,
    **STOPPING,
    **GRAMMAR,
    **PREDICTION,
    "resume": {
        "type": "object",
        "description": "Where a stream broke off that goes on: the same body with the tokens that came and their seed.",
        "properties": param_schemas(ResumeParams),
    },
    **COMMON,
}
COMPLETION_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "prompt": {"oneOf": [TEXTS, IDS, {"type": "array", "items": IDS}]},
    "suffix": {**TEXT, "description": "What follows the gap that is to be filled."},
    "echo": FLAG,
    "add_special_tokens": {**FLAG, "default": True},
    "parse_special": {**FLAG, "default": True, "description": "Read special tokens spelled out in the prompt as such."},
}
CHAT_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    **CONVERSATION,
    "max_completion_tokens": COUNT,
    "logprobs": FLAG,
    "top_logprobs": TOP_LOGPROBS,
}

_ERRORS = OpenAIErrors()
_MODEL = {"name": "model", "in": "path", "required": True, "schema": TEXT}
OPENAI = (
    Endpoint(
        "POST", "/v1/completions", complete, _ERRORS, json_operation("Continue a text", COMPLETION_FIELDS, ("prompt",))
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat,
        _ERRORS,
        json_operation("Answer in a conversation", CHAT_FIELDS, ("messages",)),
        task=Task.CHAT,
    ),
    Endpoint("GET", "/v1/models", list_models, _ERRORS, {"summary": "The models served", "responses": RESPONSES}),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        show_model,
        _ERRORS,
        {"summary": "The model of a name", "parameters": [_MODEL], "responses": RESPONSES},
    ),
)


class NoEmbeddingsError(RequestError):
    """The server can not tell vectors. SDKs do not try again after this status."""

    reason = "EMBEDDINGS_NOT_SUPPORTED"
    http_status = 422

    def __init__(self) -> None:
        super().__init__(
            "this server runs a model that generates text, and makes no embeddings; point the client's embedding model "
            "at a server of an embedding model"
        )


async def embed(call: Call) -> None:
    """Refuse ``call``.

    Raises:
        NoEmbeddingsError: always.
    """
    raise NoEmbeddingsError


_EMBEDDING_FIELDS = {"model": TEXT, "input": TEXTS}
EMBEDDINGS = (
    Endpoint("POST", "/v1/embeddings", embed, _ERRORS,
             json_operation("Refused: the model makes no embeddings", _EMBEDDING_FIELDS)),
)  # fmt: skip


DEEPSEEK = (
    Endpoint(
        "POST",
        "/beta/completions",
        complete,
        OpenAIErrors(),
        json_operation("DeepSeek: fill a gap", COMPLETION_FIELDS, ("prompt",)),
    ),
)
