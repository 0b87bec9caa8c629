"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from server.http.call import Call
from server.http.face import Face


async def list_models(call: Call) -> None:
    """The one model that requests may name.

    Raises:
        EngineDeadError: it is not known yet.
    """
    await call.reply(200, {"object": "list", "data": [_card(call.face)]})


async def show_model(call: Call) -> None:
    """The model of a name.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    call.face.check_model(call.path_params["model"])
    await call.reply(200, _card(call.face))


def _card(face: Face) -> dict[str, Any]:
    """``max_model_len`` as vLLM has it, ``meta`` as llama.cpp."""
    info = face.info
    return {
        "id": info.target,
        "object": "model",
        "created": face.started_s,
        "owned_by": "specdec",
        "root": info.target,
        "parent": None,
        "max_model_len": info.max_context,
        "meta": {"n_ctx_train": info.max_context, "n_vocab": info.vocab_size},
    }
