"""Bodies of OpenAI's /v1/responses: a conversation of items, and the fields around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.http.call import Call
from server.http.conversation import Conversation, needed_text, read_flat_tools, read_named_tool, read_text
from server.http.fields import build_request, encode_messages
from server.http.tool_use import ToolUse, answer_grammar, read_tools
from server.interfaces import TokenizerLike
from server.json_body import Body
from server.request_fields import read_count, read_format, read_params, read_stopping
from specdec.core.types import GrammarParams, OutputParams, Request, SamplingParams, StoppingParams
from specdec.engine.validation import check_requests

# The model's roles by those of the messages.
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_CHOICES = ("auto", "none", "required")
LOGPROBS = "message.output_text.logprobs"
_STATE = "nothing is kept on this server; send the whole conversation in input"
_NOT_SERVED = {
    "previous_response_id": _STATE,
    "conversation": _STATE,
    "prompt": "no prompts are kept on this server; send instructions and input",
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """``tools``: those that the model was told of, so its text may hold calls of them. ``echo``: what an answer repeats
    of the body."""

    request: Request
    stream: bool
    tools: ToolUse | None
    echo: dict[str, Any]


async def parse_responses(call: Call) -> ResponsesRequest:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    call.model.check_name(body.text("model"))
    for field in ("prompt", "messages"):
        call.field_names[field] = "input"
    _refuse_state(body)
    ids: tuple[int, ...] = ()
    tokenizer = model.tokenizer.loaded
    tools = _tools(call, body, tokenizer)
    conversation = _read_input(body)
    if not body.violations.found:
        ids = await encode_messages(body, model, conversation.messages, tools)
        body.violations.check(bool(ids) or bool(body.violations.found), "input", "must amount to at least one token")
    max_tokens = read_count(body, StoppingParams, "max_tokens", "max_output_tokens")
    body.names["stopping.max_tokens"] = "max_output_tokens"
    output = OutputParams(logprobs=_logprobs(body, tools is not None))
    request = await build_request(
        call, body, "resp_", ids,
        sampling=read_params(body, SamplingParams, n=1),
        stopping=read_stopping(body, tokenizer, max_tokens),
        output=output if tools is None else tools.output(output, tokenizer),
        grammar=answer_grammar(body, _grammar(body), tools, tokenizer),
    )  # fmt: skip
    stream, echo = body.flag("stream"), _echo(body, request)
    check_requests([request], call.model.info, body.violations)
    return ResponsesRequest(request, stream, tools, echo)


def _refuse_state(body: Body) -> None:
    for field, rule in _NOT_SERVED.items():
        if body.has(field):
            body.refuse(field, rule)
    if body.flag("background"):
        body.refuse("background", "an answer goes to who asks for it, at once; leave it out")
    if body.text("truncation") not in (None, "disabled"):
        body.refuse("truncation", 'only "disabled" is served: leave out yourself what the context can not hold')
    body.flag("store")  # what it asks for is not done, which the answer says


def _read_input(body: Body) -> Conversation:
    conversation = Conversation()
    if instructions := body.text("instructions"):
        conversation.say("system", instructions)
    given = body.value("input")
    if isinstance(given, str):
        conversation.say("user", given)
    elif isinstance(given, list) and given:
        for item in body.objects("input"):
            _read_item(item, conversation)
    else:
        body.refuse("input", "must be text, or a list of at least one item")
    return conversation


def _read_item(item: Body, conversation: Conversation) -> None:
    match item.text("type") or "message":
        case "message":
            role = _ROLES.get(item.text("role") or "")
            if role is None:
                item.refuse("role", f"must be {', '.join(_ROLES)}")
            else:
                conversation.say(role, read_text(item, "content", _TEXTS))
        case "function_call":
            call_id, name, arguments = (needed_text(item, field) or "" for field in ("call_id", "name", "arguments"))
            conversation.call(call_id, name, arguments)
        case "function_call_output":
            conversation.answer(needed_text(item, "call_id") or "", read_text(item, "output", _TEXTS))
        case "reasoning":
            pass  # of another model, which this one can not read
        case "item_reference":
            item.refuse("type", "nothing is kept on this server; send the item itself")
        case _:
            item.refuse("type", "must be message, function_call or function_call_output")


def _tools(call: Call, body: Body, tokenizer: TokenizerLike) -> ToolUse | None:
    """``tools`` and ``tool_choice`` as the chat has them, and then as it reads them."""
    tools = read_flat_tools(call, body, ("function",), "parameters")
    choice = body.raw("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = read_named_tool(Body(choice, body.violations, body.names, "tool_choice."), tools)
    elif choice not in (None, *_CHOICES):
        body.refuse("tool_choice", f'must be {", ".join(_CHOICES)} or {{"type": "function", "name": "..."}}')
    parallel = body.flag("parallel_tool_calls", default=True)
    if body.violations.found:
        return None
    same = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    return read_tools(Body(same, body.violations, body.names), tokenizer)


def _logprobs(body: Body, tools: bool) -> int | None:
    """How many alternatives to each token; None: nothing of the kind is asked for."""
    top = read_count(body, OutputParams, "logprobs", "top_logprobs")
    body.names["output.logprobs"] = "top_logprobs"
    wanted = LOGPROBS in body.texts("include")
    if top and not wanted:
        body.refuse("top_logprobs", f'needs "{LOGPROBS}" in include')
    if wanted and tools:
        body.refuse("include", f'"{LOGPROBS}" goes without tools')
    return (top or 0) if wanted else None


def _grammar(body: Body) -> GrammarParams | None:
    config = body.object("text")
    form = None if config is None else config.object("format")
    body.names["grammar"] = "text.format"
    return None if form is None else read_format(form)


def _echo(body: Body, request: Request) -> dict[str, Any]:
    return {
        "instructions": body.text("instructions"),
        "max_output_tokens": request.stopping.max_tokens,
        "metadata": body.value("metadata") or {},
        "parallel_tool_calls": body.flag("parallel_tool_calls", default=True),
        "temperature": request.sampling.temperature,
        "text": body.value("text") or {"format": {"type": "text"}},
        "tool_choice": body.value("tool_choice") or "auto",
        "tools": body.raw("tools") or [],
        "top_logprobs": request.output.logprobs or 0,
        "top_p": request.sampling.top_p,
        "user": body.text("user"),
    }
