"""POST /api/show, GET /api/tags, GET /api/ps."""

from __future__ import annotations

from typing import Any

from server.http.abilities import fills_in
from server.http.call import Call
from server.http.face import Face
from server.http.ollama.asked_model import asked_model
from server.http.ollama.model_card import FAMILY, card, details, started

_FOREVER = "2999-12-31T23:59:59Z"


async def tags(call: Call) -> None:
    """The one model there is.

    Raises:
        EngineDeadError: it is not known yet.
    """
    await call.reply(200, {"models": [card(call.face)]})


async def running(call: Call) -> None:
    """The one model, which stays loaded.

    Raises:
        EngineDeadError: it is not known yet.
    """
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": call.face.info.max_context}
    await call.reply(200, {"models": [card(call.face) | more]})


async def show(call: Call) -> None:
    """What a model can do.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    body, face = call.body(), call.face
    asked_model(body, face)
    body.seen.raise_if_any()
    capabilities = await _capabilities(face)
    await call.reply(
        200,
        {
            "modelfile": "",
            # One setting a line and no line break at the end: clients take every line apart.
            "parameters": f"num_ctx {face.info.max_context}",
            "template": _template(capabilities),
            "details": details(face),
            "model_info": {
                "general.architecture": FAMILY,
                "general.basename": face.info.target,
                f"{FAMILY}.context_length": face.info.max_context,
                f"{FAMILY}.vocab_size": face.info.vocab_size,
            },
            "capabilities": capabilities,
            "modified_at": started(face),
        },
    )


async def _capabilities(face: Face) -> list[str]:
    tokenizer = face.frontend.loaded_tokenizer
    can: dict[str, Any] = {"insert": await fills_in(face), "tools": tokenizer.has_tool_template}
    return ["completion", *(name for name, able in can.items() if able)]


def _template(capabilities: list[str]) -> str:
    """A stand-in for the model's own: clients look into it for what it mentions."""
    prompt = "{{ .Prompt }}"
    if "tools" in capabilities:
        prompt = "{{ if .Tools }}{{ .Tools }}{{ end }}" + prompt
    if "insert" in capabilities:
        prompt = "{{ if .Suffix }}{{ .Prompt }}{{ .Suffix }}{{ else }}" + prompt + "{{ end }}"
    return prompt
