"""Which model a body asks for."""

from __future__ import annotations

from server.http.body import Body
from server.http.face import Face


def asked_model(body: Body, face: Face) -> str:
    """The name in ``model``, or as older clients have it in ``name``; where there is none, that of the model served.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    new, old = body.text("model"), body.text("name")
    name = new or old
    face.check_model(name)
    return name or face.info.target
