"""Pictures, which the models served here do not look at."""

from __future__ import annotations

from server.http.body import Body


def refuse_images(body: Body) -> None:
    """Note ``images`` that are there; an empty list is none."""
    if body.raw("images"):
        body.refuse("images", "the model reads text only; leave them out")
