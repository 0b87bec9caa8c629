"""Bodies of Anthropic's /v1/messages: a conversation of blocks, and the fields around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.http.call import Call
from server.http.conversation import Conversation, needed_text, read_flat_tools, read_named_tool, read_part, read_text
from server.http.fields import build_request, encode_messages
from server.http.tool_use import ToolUse, answer_grammar, read_tools
from server.interfaces import TokenizerLike
from server.json_body import Body, write_json
from server.request_fields import read_count, read_format, read_params, read_stopping
from specdec.core.types import GrammarParams, OutputParams, Request, SamplingParams, StoppingParams
from specdec.engine.validation import check_requests

_TEXT = ("text",)
_THOUGHTS = ("thinking", "redacted_thinking")  # of other models; Anthropic leaves those of earlier turns out too
_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """``tools``: those that the model was told of, so its text may hold calls of them."""

    request: Request
    stream: bool
    tools: ToolUse | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """``ids`` is empty where something is wrong, which is noted."""

    ids: tuple[int, ...]
    tools: ToolUse | None


async def parse_messages(call: Call) -> MessagesRequest:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    prompt = await read_prompt(call, body)
    tokenizer, max_tokens = model.tokenizer.loaded, read_count(body, StoppingParams, "max_tokens")
    request = await build_request(
        call, body, "msg_", prompt.ids,
        sampling=read_params(body, SamplingParams, n=1),
        stopping=read_stopping(body, tokenizer, max_tokens, name="stop_sequences"),
        output=OutputParams() if prompt.tools is None else prompt.tools.output(OutputParams(), tokenizer),
        grammar=answer_grammar(body, _grammar(body), prompt.tools, tokenizer),
    )  # fmt: skip
    stream = body.flag("stream")
    check_requests([request], call.model.info, body.violations)
    return MessagesRequest(request, stream, prompt.tools)


async def count_prompt(call: Call) -> int:
    """How many tokens the prompt of ``call`` amounts to.

    Raises:
        RequestError: it can not be read; every bad field is named.
    """
    body = call.body()
    prompt = await read_prompt(call, body)
    body.violations.raise_if_any()
    return len(prompt.ids)


async def read_prompt(call: Call, body: Body) -> Prompt:
    """The conversation up to the answer's beginning, which the last message may be the start of.

    Raises:
        UnknownModelError: another model is wanted.
        ChatNotSupportedError: the model has no chat template.
    """
    model = call.model
    call.model.check_name(body.text("model"))
    call.field_names["prompt"] = "messages"
    tools = _tools(call, body, model.tokenizer.loaded)
    conversation = Conversation()
    if body.has("system"):
        conversation.say("system", read_text(body, "system", _TEXT))
    _read_turns(body, conversation)
    if body.violations.found:
        return Prompt((), tools)
    beginning = conversation.take_beginning()
    ids = await encode_messages(body, model, conversation.messages, tools)
    if ids and beginning:
        ids += tuple(await model.tokenizer.encode(beginning, add_special=False))
    body.violations.check(bool(ids) or bool(body.violations.found), "messages", "must amount to at least one token")
    return Prompt(ids, tools)


def _read_turns(body: Body, conversation: Conversation) -> None:
    body.value("messages")  # notes what is nested too deep
    given = body.objects("messages")
    if not given and body.raw("messages") in (None, []):
        body.refuse("messages", "must hold at least one message")
    for message in given:
        role = message.text("role")
        if role not in _ROLES:
            message.refuse("role", f"must be {', '.join(_ROLES)}")
        elif not isinstance(message.raw("content"), list):
            conversation.say(role, read_text(message, "content", _TEXT))
        else:
            for block in message.objects("content"):
                _read_block(block, role, conversation)


def _read_block(block: Body, role: str, conversation: Conversation) -> None:
    kind = block.text("type")
    if kind == "tool_use" and role == "assistant":
        name, call_id, arguments = needed_text(block, "name"), needed_text(block, "id"), block.object("input")
        if arguments is None and not block.has("input"):
            block.refuse("input", "is needed")
        if not block.violations.found:
            conversation.call(call_id or "", name or "", write_json(block.raw("input")).decode())
    elif kind == "tool_result" and role == "user":
        call_id = needed_text(block, "tool_use_id")
        conversation.answer(call_id or "", read_text(block, "content", _TEXT) if block.has("content") else "")
    elif not (kind in _THOUGHTS and role == "assistant"):
        calls = "tool_use" if role == "assistant" else "tool_result"
        if kind == "text":
            conversation.say(role, read_part(block, _TEXT))
        else:
            block.refuse("type", f"must be text or {calls} where the role is {role}; the model reads text only")


def _tools(call: Call, body: Body, tokenizer: TokenizerLike) -> ToolUse | None:
    """``tools`` and ``tool_choice`` as OpenAI's chat has them, and then as it reads them."""
    tools = read_flat_tools(call, body, ("custom", None), "input_schema")
    same: dict[str, Any] = {"tools": tools}
    choice = body.object("tool_choice")
    if choice is not None:
        kind = choice.text("type") or ""
        if kind == "tool":
            same["tool_choice"] = read_named_tool(choice, tools)
        elif kind in _CHOICES:
            same["tool_choice"] = _CHOICES[kind]
        else:
            choice.refuse("type", "must be auto, any, tool or none")
        same["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    if body.violations.found:
        return None
    return read_tools(Body(same, body.violations, body.names), tokenizer)


def _grammar(body: Body) -> GrammarParams | None:
    config = body.object("output_config")
    form = None if config is None else config.object("format")
    body.names["grammar"] = "output_config.format"
    return None if form is None else read_format(form)
