"""The conversation of a chat request."""

from __future__ import annotations

from typing import Any

from server.frontend import Frontend
from server.http.body import Body
from specdec.errors import InvalidRequestError


async def read_conversation(body: Body, frontend: Frontend, tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
    """Token ids of ``messages`` up to the answer's beginning; empty when they are bad, which is noted.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    messages, given = body.value("messages"), body.objects("messages")
    if not given:
        if isinstance(messages, list) or messages is None:
            body.refuse("messages", "must hold at least one message")
        return ()
    n_known = len(body.seen.violations)
    for message in given:
        if not message.text("role"):
            message.refuse("role", "must be a string that is not empty")
    if len(body.seen.violations) > n_known or not isinstance(messages, list):
        return ()
    try:
        return tuple(await frontend.encode_chat(messages, tools))
    except InvalidRequestError as error:
        body.seen.violations += error.violations
        return ()
