"""The field ``debug_options``: what to tell beside the answer."""

from __future__ import annotations

from dataclasses import dataclass

from server.http.body import Body


@dataclass(frozen=True, slots=True)
class DebugOptions:
    """``raw_prompt``: goes to the model as it is, in the place of the segments."""

    raw_prompt: str | None
    return_snippets: bool
    return_prompt: bool


def read_debug_options(body: Body) -> DebugOptions | None:
    """None where there are none. That the server should look for no further texts is heard gladly: it never does."""
    given = body.object("debug_options")
    if given is None:
        return None
    return DebugOptions(given.text("raw_prompt"), given.flag("return_snippets"), given.flag("return_prompt"))
