"""What the model served can do, as several dialects tell it."""

from __future__ import annotations

from server.http.face import Face
from server.http.fim_encoder import FimNotSupportedError


async def fills_in(face: Face) -> bool:
    """Whether the model can fill in the middle of a text.

    Raises:
        EngineDeadError: it is not loaded yet.
    """
    try:
        await face.frontend.encode_fim("a", "b")
    except FimNotSupportedError:
        return False
    return True
