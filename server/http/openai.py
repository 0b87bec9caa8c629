"""Endpoints of OpenAI's dialect, their bodies' schemas, /v1/models, and DeepSeek's /beta."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from server.http.answering import answering
from server.http.call import Call, Endpoint
from server.http.openai_chat import CHAT_FIELDS, parse_chat
from server.http.openai_completions import COMPLETION_FIELDS, complete
from server.http.openai_format import OPENAI_ERRORS
from server.request_fields import TEXT
from server.served_model import ServedModel, Task


async def list_models(call: Call) -> None:
    """The models, each followed by its aliases."""
    shown = [_shown(call, card) for model in call.server.models for card in _cards(model)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}  # Anthropic's
    await call.reply(200, {"object": "list", "data": shown, "has_more": False, **ends})


async def show_model(call: Call) -> None:
    """The model of the path's name."""
    asked = call.path_params["model"]
    call.model.check_name(asked)
    cards = _cards(call.model)
    await call.reply(200, _shown(call, next((card for card in cards if card["id"] == asked), cards[0])))


def _shown(call: Call, card: dict[str, Any]) -> dict[str, Any]:
    """``card``, or Anthropic's form of it for its clients."""
    if not call.header("anthropic-version"):
        return card
    created = datetime.fromtimestamp(card["created"], UTC).isoformat()
    names = {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created}
    return names | {"lifecycle": "active", "max_input_tokens": card["max_model_len"]}


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
            "completion_chat": model.can(Task.CHAT),
            "completion_fim": model.can(Task.FILL),
            "function_calling": tokenizer.has_tool_template,
            "fine_tuning": False,
            "vision": False,
            "classification": False,
        },
        "aliases": (),
    }


_MODEL = {"name": "model", "in": "path", "required": True, "schema": TEXT}
_BASES = ("/v1", "/beta")  # the latter is DeepSeek's, for filling gaps and continuing messages
OPENAI = (
    *(Endpoint("POST", f"{base}/completions", complete, OPENAI_ERRORS, "Continue a text, or fill a gap",
               COMPLETION_FIELDS, ("prompt",), gated=True) for base in _BASES),
    *(Endpoint("POST", f"{base}/chat/completions", answering(parse_chat), OPENAI_ERRORS, "Answer in a conversation",
               CHAT_FIELDS, ("messages",), task=Task.CHAT, gated=True) for base in _BASES),
    Endpoint("GET", "/v1/models", list_models, OPENAI_ERRORS, "The models served"),
    Endpoint("GET", "/v1/models/{model:path}", show_model, OPENAI_ERRORS, "The model of a name", parameters=(_MODEL,)),
)  # fmt: skip
