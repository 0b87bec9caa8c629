"""GET /props and GET /health."""

from __future__ import annotations

import specdec
from server.http.call import Call
from specdec.errors import EngineDeadError


async def health(call: Call) -> None:
    """Whether a request would be taken now.

    Raises:
        EngineDeadError: it would not.
    """
    state, is_ready = call.face.state()
    if not is_ready:
        raise EngineDeadError("Loading model" if state == "loading" else f"not ready: {state}")
    await call.reply(200, {"status": "ok"})


async def props(call: Call) -> None:
    """What the server is.

    Raises:
        UnknownModelError: another model is asked for by the query.
        EngineDeadError: it is not known yet.
    """
    face = call.face
    face.check_model(call.query.get("model"))
    info = face.info
    await call.reply(
        200,
        {
            "default_generation_settings": {"n_ctx": info.max_context, "params": {"n_predict": -1}},
            "total_slots": info.max_batch,
            "model_alias": info.target,
            "model_path": info.target,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "",
            "build_info": f"specdec-{specdec.__version__}",
            "is_sleeping": False,
        },
    )
