"""GET and POST /v1/health, GET /v1beta/server_setting: what Tabby's clients ask before anything else."""

from __future__ import annotations

import os
import platform
from typing import Any

import specdec
from server.http.abilities import fills_in
from server.http.call import Call
from server.http.face import Face

# The release of Tabby whose API is answered here: clients leave out what an older one does not know.
LEVEL = "v0.30.0"


async def health(call: Call) -> None:
    """The model, by what it can do, and the machine.

    Raises:
        EngineDeadError: it is not known yet.
    """
    face = call.face
    name = face.info.target
    models: dict[str, Any] = {}
    if await fills_in(face):
        models["completion"] = _local(face)
    if face.frontend.loaded_tokenizer.has_chat_template:
        models["chat"] = _local(face)
    body: dict[str, Any] = {
        "device": _device(face),
        "models": models,
        "arch": platform.machine(),
        "cpu_info": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count() or 1,
        "cuda_devices": [],
        "version": {"build_date": "", "build_timestamp": "", "git_sha": specdec.__version__, "git_describe": LEVEL},
        "webserver": None,
    }
    # A client offers completion and chat as far as these two are there.
    named = {"model": "completion", "chat_model": "chat"}
    await call.reply(200, {field: name for field, kind in named.items() if kind in models} | body)


async def server_setting(call: Call) -> None:
    """Clients are asked to report to nobody but this server."""
    await call.reply(200, {"disable_client_side_telemetry": True})


def _local(face: Face) -> dict[str, Any]:
    return {"local": {"model_id": face.info.target, "device": _device(face)}}


def _device(face: Face) -> str:
    """Where the model runs; only a GPU is served by Triton's kernels."""
    return "cuda" if face.info.kernels == "triton" else "cpu"
