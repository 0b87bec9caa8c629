"""Which of several models an HTTP call means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.http.call import Call, Endpoint
from server.served_model import ServedModel, Task
from specdec.errors import InvalidRequestError

_OLLAMA = "/api/"


def model_of(call: Call, endpoint: Endpoint) -> ServedModel:
    """The model that a call names: the name is in the path, in the body, or in the query. Where
    there is none, the first model that can do what is asked for.

    Raises:
        UnknownModelError: the query names another; names elsewhere are left to who answers.
        EngineDeadError: it is not known yet whether it does.
    """
    body = _body(call)
    old = body.get("name") if endpoint.path.startswith(_OLLAMA) else None
    named = (call.path_params.get("model"), body.get("model"), old, call.query.get("model"))
    asked = next((name for name in named if name and isinstance(name, str)), "")
    task = Task.FILL if body.get("suffix") else endpoint.task
    found = call.server.models.find(asked, task)
    if queried := call.query.get("model"):
        found.check_name(queried)
    return found


def _body(call: Call) -> Mapping[str, Any]:
    """The body's fields; none where it is no JSON object, which its endpoint refuses if it needs one."""
    try:
        return call.data if call.content else {}
    except InvalidRequestError:
        return {}
