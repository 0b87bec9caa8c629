"""OpenAI's /v1/chat/completions: its body, its streamed answer, its whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.http.answer_parser import CallArguments, Part, Thought, ToolCall
from server.http.answering import Sample
from server.http.call import Call
from server.http.fields import CONVERSATION, EFFORT, THOUGHTS, effort_variables, read_conversation
from server.http.openai_format import SHARED, ChoicesAnswer, check_shared, finish_fields, logprob_entries, set_logprobs
from server.http.tool_use import AnswerForm, answer_form, read_tools
from server.request_fields import RANDOM_SEED, Table, flag_field, param_field, param_fields
from specdec.core.types import Delta, Finished, OutputParams, Request, RequestEvent, StoppingParams, TokenLogprobs

CHAT_FIELDS: Table = (
    *SHARED,
    *param_fields(OutputParams, "logprobs"),
    *CONVERSATION,
    EFFORT,
    *THOUGHTS,
    param_field(StoppingParams, "max_tokens"),
    param_field(StoppingParams, "max_tokens", "max_completion_tokens"),
    flag_field("logprobs"),
    param_field(OutputParams, "logprobs", "top_logprobs"),
    flag_field("separate_reasoning", "False: the model's thoughts stay in the text.", default=True),
    RANDOM_SEED,
)


async def parse_chat(call: Call) -> ChatAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields = await call.read_request(CHAT_FIELDS)
    call.field_names["prompt"] = "messages"
    tokenizer = call.model.tokenizer.loaded
    tools = read_tools(body, tokenizer)
    variables = effort_variables(body, "reasoning_effort", fields.own.get("reasoning_effort"), tokenizer)
    ids = await read_conversation(body, fields.own, call.model, tools, variables=variables)
    check_shared(body, fields)
    set_logprobs(body, fields, fields.own["logprobs"])
    form = answer_form(body, fields, tools, tokenizer, ids)
    if "resume" in fields.engine and form != AnswerForm():
        problem = "does not go with tools, nor with thoughts that are separated: they are read from the whole text"
        body.refuse("resume", f"{problem}; leave it out, or tools, and set separate_reasoning to false")
    request = call.checked_request(f"chatcmpl-{call.request_id}", body, fields, ids)
    return ChatAnswer(call, request, fields.own, form)


class ChatAnswer(ChoicesAnswer):
    """A stream has a chunk with the role, one per Delta with text, one where a tool call begins, one per piece of its
    arguments, and one per sample's end."""

    id_prefix = "chatcmpl"

    def __init__(self, call: Call, request: Request, own: Mapping[str, Any], form: AnswerForm) -> None:
        super().__init__(call, [request], own)
        self.form = form
        # Mistral's clients take a piece of a call for an error, and expect the usage without asking for it.
        self.is_mistral = "mistral" in call.header("user-agent")
        self._parsers = [form.parser(whole=self.is_mistral) for _ in range(request.sampling.n)]

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            return self._finished(event)
        # As in vLLM, the very first chunk has the prompt.
        more = self._ids(prompt_token_ids=self.request.prompt_ids)
        role = {"role": "assistant", "content": ""}
        return self._piece(0, role, {}, **more) + b"".join(self._piece(i, role, {}) for i in range(1, self._samples))

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return super().whole(samples) | self._ids(prompt_token_ids=self.request.prompt_ids)

    def _choice(self, sample: Sample) -> dict[str, Any]:
        parts, thought_tokens = self.form.parse(sample.text, sample.token_ids)
        self.totals.thought_tokens += thought_tokens
        message = message_of(parts)
        return {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample.logprobs),
            **finish_fields(sample.end, "tool_calls" in message),
            **self._ids(token_ids=sample.token_ids),
        }

    def _delta(self, event: Delta) -> bytes:
        parts = self._parsers[event.index].push(event.text, event.token_ids)
        beside = self._beside(event)
        if (logprobs := self._logprobs(event.logprobs)) is not None:
            beside["logprobs"] = logprobs
        return self._parts(event.index, parts, beside)

    def _logprobs(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """None: they were not requested."""
        if self.request.output.logprobs is None:
            return None
        return {"content": logprob_entries(self._tokenizer, rows), "refusal": None}

    def _finished(self, event: Finished) -> bytes:
        parser = self._parsers[event.index]
        rest = self._parts(event.index, parser.flush(), {})
        self.totals.thought_tokens += parser.thought_tokens
        end = finish_fields(event, parser.whole_calls > 0)
        choice = {"index": event.index, "delta": {}, "logprobs": None, **end}
        return rest + self._last_chunk(choice)

    def _parts(self, index: int, parts: Sequence[Part], beside: dict[str, Any]) -> bytes:
        """A chunk per part with content; the first has the fields ``beside``."""
        chunks, deltas = [], list(filter(None, map(_delta, parts)))
        if beside and not deltas:  # these fields belong to the tokens, whose text may be held back
            deltas = [{}]
        for delta in deltas:
            chunks.append(self._piece(index, delta, beside))
            beside = {}
        return b"".join(chunks)

    def _piece(self, index: int, delta: dict[str, Any], beside: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **beside}
        return self._chunk(choice, **more)


def _delta(part: Part) -> dict[str, Any] | None:
    """A chunk's ``delta`` for ``part``; None: it has no chunk."""
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, Thought):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolCall):
        return {"tool_calls": [{"index": part.index, **call_value(part)}]}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    return None


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The message of an answer in one piece."""
    calls = [call_value(part) for part in parts if isinstance(part, ToolCall)]
    text = "".join(part for part in parts if isinstance(part, str))
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if thoughts := "".join(part.text for part in parts if isinstance(part, Thought)):
        message["reasoning_content"] = thoughts
    return message | {"tool_calls": calls} if calls else message


def call_value(call: ToolCall) -> dict[str, Any]:
    """A call as messages and chunks have it."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
