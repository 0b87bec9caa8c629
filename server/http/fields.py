"""Body fields that several dialects share, and the readers of a call's body and conversation."""

from __future__ import annotations

from typing import Any

from server.http.tool_use import TOOLS, ToolUse
from server.json_body import Body
from server.request_fields import (
    SPECULATION,
    TEXT,
    Field,
    Table,
    either,
    flag_field,
    listed,
    param_fields,
    text_field,
    with_fields,
)
from server.served_model import ServedModel
from specdec.core.fields import MAX_NAME
from specdec.core.types import Request, SamplingParams, StoppingParams
from specdec.errors import InvalidRequestError


async def read_conversation(
    body: Body, model: ServedModel, tools: ToolUse | None, *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Token ids of ``messages``, with the answer's beginning if ``add_generation_prompt``. Empty: ``messages`` are
    wrong, and ``body`` notes why.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    given = body.objects("messages")
    messages = body.value("messages") if given else body.raw("messages")
    if not given:
        if messages is None or messages == []:
            body.refuse("messages", "must hold at least one message")
        return ()
    n_known = len(body.violations.found)
    for message in given:
        if not message.text("role"):
            message.refuse("role", "must be a string that is not empty")
    if len(body.violations.found) > n_known or not isinstance(messages, list):
        return ()
    return await encode_messages(body, model, messages, tools, add_generation_prompt=add_generation_prompt)


async def encode_messages(
    body: Body,
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: ToolUse | None,
    *,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Token ids of ``messages``, as `read_conversation` returns them.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    try:
        known = None if tools is None else tools.tools
        ids = tuple(await model.tokenizer.encode_chat(messages, known, add_generation_prompt=add_generation_prompt))
    except InvalidRequestError as error:
        body.violations.found += error.violations
        return ()
    return ids


MODEL = text_field("model", "None, or the one served.")
STREAM = flag_field("stream")
SAMPLING = param_fields(SamplingParams, "n")
STOPPING = param_fields(StoppingParams, "max_tokens")
COMMON: Table = (
    SPECULATION,
    *param_fields(Request),
    text_field(
        "supersedes_key",
        "Ends the running request with the same key of the same tenant, which gets 409, SUPERSEDED.",
        maxLength=MAX_NAME,
    ),
)
_MESSAGE = with_fields({"role": {**TEXT, "minLength": 1}, "content": either(TEXT, {"type": "array"})}, "role")
CONVERSATION: Table = (Field("messages", listed(_MESSAGE, minItems=1)), *TOOLS)
