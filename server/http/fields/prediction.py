"""What the output is expected to look like."""

from __future__ import annotations

from server.frontend import Frontend
from server.http.body import Body


async def read_prediction(body: Body, frontend: Frontend) -> tuple[int, ...]:
    """Token ids of OpenAI's ``prediction``: ``{"type": "content", "content": text or text parts}``."""
    given = body.object("prediction")
    if given is None:
        return ()
    if given.text("type") not in (None, "content"):
        given.refuse("type", 'must be "content"')
    return tuple(await frontend.encode(_content(given), add_special=False))


def _content(given: Body) -> str:
    value = given.raw("content")
    if isinstance(value, str):
        return value
    texts = [part.text("text") for part in given.objects("content")] if isinstance(value, list) else [None]
    if None in texts:
        given.refuse("content", 'must be a string or a list of {"type": "text", "text": "..."}')
    return "".join(text for text in texts if text is not None)
