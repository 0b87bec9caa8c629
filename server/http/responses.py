"""OpenAI's /v1/responses: a conversation of items, and its answer as a stream or in one piece. Nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import time
from typing import Any

from server.http.answering import Answer, Sample, Totals, answering, named_event
from server.http.call import Call, Endpoint
from server.http.conversation import Block, Blocks, Conversation, Step, Steps, read_text
from server.http.errors import Refusal
from server.http.fields import (
    COMMON,
    EFFORT,
    MODEL,
    SAMPLING,
    STOPPING,
    STREAM,
    TEMPLATE_VARIABLES,
    effort_variables,
    encode_messages,
)
from server.http.openai_format import OPENAI_ERRORS, TOO_LONG, extras, logprob_entries, set_logprobs
from server.http.tool_use import PARALLEL, AnswerForm, FlatTools, answer_form, read_tools
from server.json_body import Body, RequestFields
from server.request_fields import (
    FLAG,
    FORMAT,
    NOT_KEPT,
    OBJECT,
    PREDICTION,
    TEXT,
    TEXTS,
    Field,
    Table,
    either,
    flag_field,
    listed,
    object_field,
    param_field,
    text_field,
    with_fields,
)
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, OutputParams, Request, RequestEvent, StoppingParams
from specdec.errors import InvalidRequestError

LOGPROBS = "message.output_text.logprobs"
_ITEM = with_fields(
    {
        "type": {"enum": ["message", "function_call", "function_call_output"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": either(TEXT, listed(with_fields({"type": {"enum": ["input_text", "output_text"]}, "text": TEXT}))),
        "call_id": TEXT,
        "name": TEXT,
        "arguments": TEXT,
        "output": TEXT,
    }
)
_FUNCTION = {"enum": ["function"]}
_TOOL = with_fields(
    {"type": _FUNCTION, "name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}, "type", "name"
)
_CHOICE = {**with_fields({"type": _FUNCTION, "name": TEXT}, "name"), "description": "The one to call."}
_ALLOWED = {
    **with_fields(
        {"type": {"enum": ["allowed_tools"]}, "mode": {"enum": ["auto", "required"]}, "tools": listed(OBJECT)}, "tools"
    ),
    "description": "The only ones that may be called.",
}
_STATE = ("previous_response_id", "conversation", "prompt")
RESPONSES_FIELDS: Table = (
    MODEL,
    Field("input", either(TEXT, listed(_ITEM, minItems=1))),
    text_field("instructions"),
    param_field(StoppingParams, "max_tokens", "max_output_tokens"),
    object_field("text", (FORMAT,)),
    object_field("reasoning", (replace(EFFORT, name="effort"),)),
    Field("tools", listed(_TOOL)),
    Field("tool_choice", either({"enum": ["auto", "none", "required"]}, _CHOICE, _ALLOWED)),
    TEMPLATE_VARIABLES,
    PARALLEL,
    STREAM,
    Field("include", {**TEXTS, "description": f"{LOGPROBS}; other values are ignored."}, Body.texts, default=()),
    param_field(OutputParams, "logprobs", "top_logprobs"),
    Field("metadata", {**OBJECT, "description": "The answer repeats it."}),
    text_field("user"),
    Field("truncation", {"enum": ["auto", "disabled"]}, Body.text),
    flag_field("store", "Ignored: the answer is never kept, and says so."),
    Field("background", {"enum": [False]}, Body.flag, default=False),
    *(Field(name, NOT_KEPT) for name in _STATE),
    *SAMPLING,
    *STOPPING,
    PREDICTION,
    *COMMON,
)
# The model's roles by those of the messages.
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_TOOLS = FlatTools(("function",), "parameters")


async def parse_responses(call: Call) -> ResponseAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields = await call.read_request(RESPONSES_FIELDS)
    _refuse_state(body, fields)
    call.field_names |= dict.fromkeys(("prompt", "messages"), "input")
    ids: tuple[int, ...] = ()
    tokenizer = call.model.tokenizer.loaded
    tools = read_tools(body, tokenizer, _TOOLS)
    conversation = _read_input(body, fields)
    if not body.violations.found:
        variables = effort_variables(body, "reasoning.effort", fields.own.get("effort"), tokenizer)
        ids = await encode_messages(body, call.model, conversation.messages, tools, variables=variables)
    wanted = LOGPROBS in fields.own["include"]
    set_logprobs(body, fields, wanted, f'"{LOGPROBS}" in include')
    if wanted and tools is not None:
        body.refuse("include", f'"{LOGPROBS}" goes without tools')
    form = answer_form(body, fields, tools, tokenizer, ids)
    echo = _echo(body, fields)
    request = call.checked_request(f"resp_{call.request_id}", body, fields, ids)
    return ResponseAnswer(call, request, form, echo, stream=fields.own["stream"])


def _refuse_state(body: Body, fields: RequestFields) -> None:
    for field in _STATE:
        if body.has(field):
            rule = "nothing is kept on this server; send the whole conversation in instructions and input"
            raise InvalidRequestError.of(field, rule)  # at once: later on `prompt` is the engine's name of the input
    if fields.own["background"]:
        body.refuse("background", "this server answers at once and keeps nothing; leave it out")
    if fields.own.get("truncation", "disabled") != "disabled":
        body.warn("truncation", "nothing is left out: a conversation that exceeds the context is refused")


def _read_input(body: Body, fields: RequestFields) -> Conversation:
    conversation = Conversation()
    if instructions := fields.own.get("instructions"):
        conversation.say("system", instructions)
    given = body.raw("input")
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
            call_id, name, arguments = (item.needed_text(field) for field in ("call_id", "name", "arguments"))
            conversation.call(call_id, name, arguments)
        case "function_call_output":
            conversation.answer(item.needed_text("call_id"), read_text(item, "output", _TEXTS))
        case "reasoning":
            parts = item.objects("content") if isinstance(item.raw("content"), list) else []
            for part in parts:
                if part.raw("type") == "reasoning_text":  # others are another model's
                    conversation.think(part.text("text") or "")
        case "item_reference":
            item.refuse("type", "nothing is kept on this server; send the item itself, as clients do with store: false")
        case _:
            item.refuse("type", "must be message, function_call or function_call_output")


def _echo(body: Body, fields: RequestFields) -> dict[str, Any]:
    """What the answer repeats of the body."""
    return {
        "instructions": fields.own.get("instructions"),
        "metadata": body.value("metadata") if body.object("metadata") else {},
        "parallel_tool_calls": body.flag("parallel_tool_calls", default=True),
        "reasoning": {"effort": fields.own.get("effort"), "summary": None},
        "text": body.value("text") or {"format": {"type": "text"}},
        "tool_choice": body.value("tool_choice") or "auto",
        "tools": body.raw("tools") or [],
        "user": fields.own.get("user"),
    }


_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORTED: "abort"}


def usage(totals: Totals) -> dict[str, Any]:
    """Token counts."""
    return {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": totals.output_tokens,
        "output_tokens_details": {"reasoning_tokens": totals.thought_tokens},
        "total_tokens": totals.prompt_tokens + totals.output_tokens,
    }


def end_fields(event: Finished) -> dict[str, Any]:
    """``status``, and why the answer is incomplete, if it is."""
    cut = _CUT.get(event.reason)
    return {
        "status": "completed" if cut is None else "incomplete",
        "completed_at": int(time()) if cut is None else None,
        "incomplete_details": None if cut is None else {"reason": cut},
    }


def text_part(block: Block, logprobs: list[Any]) -> dict[str, Any]:
    """The one part of a message or of thoughts, as far as it is generated."""
    if block.is_thought:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": block.text}


class ResponseAnswer(Answer):
    """A stream has the answer without output, its items in turn, and the whole answer."""

    def __init__(self, call: Call, request: Request, form: AnswerForm, echo: dict[str, Any], *, stream: bool) -> None:
        """echo: fields that the answer repeats."""
        super().__init__(call, [request], stream=stream)
        self._request_id = call.request_id
        call.broken = self.failed
        # Typed clients need all these fields of the standard, also those that are null here.
        self._answer: dict[str, Any] = {
            "id": f"resp_{call.request_id}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": request.sampling.frequency_penalty,
            "incomplete_details": None,
            "max_output_tokens": request.stopping.max_tokens,
            "max_tool_calls": None,
            "model": call.model.name,
            "output": [],
            "presence_penalty": request.sampling.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": request.sampling.temperature,
            "top_logprobs": request.output.logprobs or 0,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **echo,
            **call.notes(),
        }
        self.form, self._blocks, self._sent = form, Blocks(form), 0
        self._rows: list[Any] = []  # of the tokens so far
        self._n_rows_sent = 0
        self._last_status = "completed"

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta):
            self._rows += logprob_entries(self._tokenizer, event.logprobs)
            return self._steps(self._blocks.push(event.text, event.token_ids))
        if isinstance(event, Finished):
            end = end_fields(event)
            self._last_status = end["status"]
            rest = self._steps(self._blocks.end())
            self.totals.thought_tokens = self._blocks.parser.thought_tokens
            self._answer |= {**end, "usage": usage(self.totals), **extras(self.totals)}
            return rest
        return b"".join(self._event(f"response.{kind}", response=self._answer) for kind in ("created", "in_progress"))

    def last(self) -> bytes:
        return self._event(f"response.{self._answer['status']}", response=self._answer)

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        (sample,) = samples
        end, read = end_fields(sample.end), Blocks.of(self.form, sample.text, sample.token_ids)
        blocks, self.totals.thought_tokens = read.found, read.parser.thought_tokens
        rows = logprob_entries(self._tokenizer, sample.logprobs)[self.totals.thought_tokens :]
        output = [self._item(block, "completed", rows) for block in blocks]
        if blocks and blocks[-1].call is None:  # a call is complete, as an incomplete one remains text
            output[-1]["status"] = end["status"]
        return {**self._answer, **end, "output": output, "usage": usage(self.totals), **extras(self.totals)}

    def failed(self, refusal: Refusal) -> bytes:
        """The end of a stream that breaks off."""
        error = {"code": refusal.reason.lower(), "message": refusal.worded(TOO_LONG)}
        return self._event("response.failed", response={**self._answer, "status": "failed", "error": error})

    def _steps(self, steps: Steps) -> bytes:
        return b"".join(self._step(*step) for step in steps)

    def _step(self, step: Step, block: Block, text: str) -> bytes:
        at = {"item_id": self._item_id(block), "output_index": block.index}
        if block.call is None:
            at["content_index"] = 0
        if step is Step.OPEN:
            return self._open(block, at)
        if step is Step.CLOSE:
            return self._close(block, at)
        if block.call is not None:
            return self._event("response.function_call_arguments.delta", **at, delta=text)
        if block.is_thought:
            return self._event("response.reasoning_text.delta", **at, delta=text)
        first = max(self._n_rows_sent, self._blocks.parser.thought_tokens)
        rows, self._n_rows_sent = self._rows[first:], len(self._rows)
        return self._event("response.output_text.delta", **at, delta=text, logprobs=rows)

    def _open(self, block: Block, at: dict[str, Any]) -> bytes:
        item = self._item(block, "in_progress", [])
        opened = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.call is not None:
            return opened
        return opened + self._event("response.content_part.added", **at, part=text_part(block, []))

    def _close(self, block: Block, at: dict[str, Any]) -> bytes:
        rows = self._rows[self._blocks.parser.thought_tokens :]  # those of the text
        item = self._item(block, self._last_status, rows)
        self._answer["output"] = [*self._answer["output"], item]
        if block.call is not None:
            done = self._event(
                "response.function_call_arguments.done", **at, name=block.call.name, arguments=block.text
            )
        else:
            if block.is_thought:
                done = self._event("response.reasoning_text.done", **at, text=block.text)
            else:
                done = self._event("response.output_text.done", **at, text=block.text, logprobs=rows)
            done += self._event("response.content_part.done", **at, part=text_part(block, rows))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str, logprobs: list[Any]) -> dict[str, Any]:
        """A message, thoughts or a function call, as far as it is generated."""
        item = {"id": self._item_id(block), "status": status}
        if block.call is not None:
            called = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        content = [text_part(block, logprobs)] if block.text else []
        if block.is_thought:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        kind = "rs" if block.is_thought else "msg" if block.call is None else "fc"
        return f"{kind}_{self._request_id}_{block.index}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return named_event({"type": kind, "sequence_number": number, **fields})


OPENAI_RESPONSES = (
    Endpoint("POST", "/v1/responses", answering(parse_responses), OPENAI_ERRORS, "Answer in a conversation of items",
             RESPONSES_FIELDS, ("input",), task=Task.CHAT, gated=True),
)  # fmt: skip
