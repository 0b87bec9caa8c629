"""The tools of a chat request."""

from __future__ import annotations

from typing import Any

from server.http.body import Body


def read_tools(body: Body) -> list[dict[str, Any]] | None:
    """``tools`` as the chat template takes them; None: the model is told of none. Of ``tool_choice``, "auto" and "none"
    are served."""
    n_known = len(body.seen.violations)
    tools: list[dict[str, Any]] = body.value("tools")
    given = body.objects("tools")
    for tool in given:
        function = tool.object("function")
        if function is None or not function.text("name"):
            tool.refuse("function", "must be an object with a name")
    choice = body.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        rule = 'only "auto" and "none" are served; to force a form on the answer use response_format with a JSON schema'
        body.refuse("tool_choice", rule)
    usable = bool(given) and choice != "none" and len(body.seen.violations) == n_known
    return tools if usable else None
