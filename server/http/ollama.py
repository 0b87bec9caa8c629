"""Ollama's dialect: /api/generate, /api/chat, and what its clients ask about models."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from server.errors import UnknownModelError
from server.http.answering import Totals, stream_answer, whole_answer
from server.http.call import Call, Endpoint
from server.http.errors import Refusal
from server.http.fields import (
    COMMON,
    COUNT,
    FLAG,
    OBJECT,
    PREDICTION,
    RESPONSES,
    SAMPLING,
    STOPPING,
    TEXT,
    TOOLS,
    TOP_LOGPROBS,
    Schema,
    build_request,
    json_operation,
    read_conversation,
)
from server.http.openai_format import ChatLogprobs, extras, read_logprobs
from server.http.tool_calls import ToolCall
from server.http.tool_use import ToolUse, answer_grammar, read_tools
from server.interfaces import TokenizerLike
from server.json_body import Body, write_json
from server.request_fields import param_schemas, read_params, read_stopping
from server.served_model import ServedModel, Task
from specdec.core.fields import INT31, OPENAI
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from specdec.engine.validation import check_requests
from specdec.errors import InvalidRequestError
from specdec.models.fim import TEMPLATES

MEDIA_TYPE = b"application/x-ndjson"


def ndjson(value: Any) -> bytes:
    """``value`` as one line."""
    return write_json(value) + b"\n"


class OllamaErrors:
    """``{"error": message}``."""

    def body(self, refusal: Refusal) -> dict[str, str]:
        """The body of an answer that refuses."""
        # Clients look for these words to tell a missing model from a path that is not there.
        prefix = "model not found: " if refusal.reason == UnknownModelError.reason else ""
        return {"error": prefix + refusal.message}

    def event(self, refusal: Refusal) -> bytes:
        """A line with the same object, in the place of the one that says done."""
        return ndjson(self.body(refusal))


def asked_model(body: Body, model: ServedModel) -> str:
    """The name in ``model``, or as older clients have it in ``name``; where there is none, that of the model served.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    new, old = body.text("model"), body.text("name")
    name = new or old
    model.check_name(name)
    return name or model.name


def refuse_images(body: Body) -> None:
    """Note ``images`` that are there; an empty list is none."""
    if body.raw("images"):
        body.refuse("images", "the model reads text only; leave them out")


def refuse_thinking(body: Body, model: str) -> None:
    """Note a ``think`` that asks for it."""
    if body.raw("think") not in (None, False):
        body.refuse("think", f"{model!r} does not support thinking; leave it out")


def logprob_fields(rows: Sequence[TokenLogprobs], tokenizer: TokenizerLike) -> dict[str, Any]:
    """``logprobs``, one per token, where there are any."""
    return {"logprobs": ChatLogprobs(tokenizer).rows(rows)["content"]} if rows else {}


def read_format(body: Body) -> GrammarParams | None:
    """``"json"``, or a JSON schema; an empty text is none."""
    value = body.value("format")
    body.names["grammar"] = body.path("format")
    if value is None or value == "":
        return None
    if value == "json":
        return GrammarParams(GrammarKind.JSON_OBJECT)
    if isinstance(value, dict):
        return GrammarParams(GrammarKind.JSON_SCHEMA, write_json(value).decode())
    body.refuse("format", 'must be "json" or a JSON schema')
    return None


# What holds where a request says nothing, as Ollama has it.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_UNLIMITED = -2  # "as much as fits", and -1, "without end", come to the same: the context is the limit
_DIALECT = "ollama"


def read_options(body: Body, tokenizer: TokenizerLike) -> tuple[SamplingParams, StoppingParams]:
    """How to choose and when to stop. What only concerns another engine (threads, memory, num_ctx, ...) is ignored."""
    options = body.object("options") or Body({}, body.violations, body.names, f"{body.path('options')}.")
    return _sampling(options), _stopping(options, tokenizer)


def _sampling(options: Body) -> SamplingParams:
    left_out = {name: value for name, value in DEFAULTS.items() if not options.has(name)}
    given = options.has("repeat_penalty")  # else by the name that vLLM has for it
    sampling = read_params(options, SamplingParams, _DIALECT if given else OPENAI, n=1, **left_out)
    looks_at_none = options.integer("repeat_last_n", -1, INT31) == 0
    return dataclasses.replace(sampling, repetition_penalty=1.0) if looks_at_none else sampling


def _stopping(options: Body, tokenizer: TokenizerLike) -> StoppingParams:
    limit = options.integer("num_predict", _UNLIMITED, INT31)
    options.names["stopping.max_tokens"] = options.path("num_predict")
    stopping = read_stopping(options, tokenizer, None if limit is None or limit < 0 else limit)
    return dataclasses.replace(stopping, stop=tuple(filter(None, stopping.stop)))


_MARKS = tuple((before, behind) for template in TEMPLATES for before in template.prefix for behind in template.suffix)


class PromptFields:
    """The fields that the prompt is made of, as they were sent. ``is_raw``: the prompt goes to the model as it is: the
    body says so, or it is a FIM template that the client has filled in itself, which many do without saying so."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.prompt, self.suffix, self.system = (body.text(name) or "" for name in ("prompt", "suffix", "system"))
        self.context = body.integers("context", 0, INT31)
        said, template = body.flag("raw"), body.text("template")
        self.is_raw = said or spells_template(self.prompt)
        if said and (self.system or template or self.context):
            body.refuse("raw", "takes the prompt as it is; leave out system, template and context, or raw")
        refuse_images(body)
        body.names["prompt.token_ids"] = "context" if self.context else "prompt"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not self.prompt and (self.is_raw or not self.suffix)

    async def encode(self, model: ServedModel, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids, and those that end what fills a gap, of which as much is shown as leaves room for ``max_tokens``.
        Special tokens that are spelled out are read as such in a raw prompt only; what a template refuses is noted.

        Raises:
            FimNotSupportedError: there is a suffix, and the model can not fill in.
        """
        ends: tuple[int, ...] = ()
        if self.is_empty:
            ids = [0]  # a stand-in: the other fields are checked all the same
        elif self.is_raw:
            ids = await model.tokenizer.encode(self.prompt, parse_special=True)
        elif self.suffix:
            packed = await model.completion.maker.pack_between(self.prompt, self.suffix, max_tokens)
            ids, ends = list(packed.ids), packed.ends
        elif model.tokenizer.loaded.has_chat_template:
            ids = await self._encode_chat(model)
        else:
            ids = await model.tokenizer.encode("\n\n".join(filter(None, (self.system, self.prompt))))
        return (*self.context, *ids), ends

    async def _encode_chat(self, model: ServedModel) -> list[int]:
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            return await model.tokenizer.encode_chat(messages)
        except InvalidRequestError as error:
            self._body.refuse("prompt", error.violations[0].description)
            return [0]  # a stand-in: the other fields are checked all the same


def spells_template(text: str) -> bool:
    """Whether a family's marks of what stands before and after a gap are both written out in ``text``."""
    return any(before in text and behind in text for before, behind in _MARKS)


_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


@dataclass(frozen=True, slots=True)
class Frame:
    """``model``: by the name that the client asked for. ``notes`` are told with the last one."""

    model: str
    notes: Mapping[str, Any] = field(default_factory=dict)

    def part(self, content: dict[str, Any]) -> dict[str, Any]:
        """One that brings more."""
        return {"model": self.model, "created_at": now(), **content, "done": False}

    def loaded(self, content: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that asks for nothing: clients send one to have the model loaded."""
        return {"model": self.model, "created_at": now(), **content, "done": True, "done_reason": "load"}

    def end(self, content: dict[str, Any], totals: Totals, end: Finished) -> dict[str, Any]:
        """The last one. Durations are in nanoseconds, and never 0: clients divide by them."""
        spent = end.timings
        return {
            "model": self.model,
            "created_at": now(),
            **content,
            "done": True,
            "done_reason": _REASONS.get(end.reason, "stop"),
            "total_duration": _nanoseconds(spent.queue_ms + spent.prefill_ms + spent.decode_ms),
            "load_duration": _nanoseconds(spent.queue_ms),
            "prompt_eval_count": totals.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(spent.prefill_ms),
            "eval_count": totals.output_tokens,
            "eval_duration": _nanoseconds(spent.decode_ms),
            **extras(totals),
            **self.notes,
        }


def now() -> str:
    """The time as RFC 3339 has it, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(milliseconds: float) -> int:
    return max(1, round(milliseconds * 1e6))


DEFAULT_ROOM = 512  # tokens kept free for what fills a gap, where no limit is given


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``request`` None: nothing is to be generated. ``context``: tell the ids that go on from here."""

    model: str
    request: Request | None
    stream: bool
    context: bool
    notes: Mapping[str, Any]


async def parse_generate(call: Call) -> GenerateRequest:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    name = asked_model(body, model)
    fields, stream = PromptFields(body), body.flag("stream", default=True)
    sampling, stopping = read_options(body, model.tokenizer.loaded)
    ids, ends = await fields.encode(model, stopping.max_tokens or DEFAULT_ROOM)
    stopping = dataclasses.replace(stopping, stop_token_ids=(*stopping.stop_token_ids, *ends))
    refuse_thinking(body, name)
    output = OutputParams(logprobs=read_logprobs(body))
    options = {"sampling": sampling, "stopping": stopping, "grammar": read_format(body), "output": output}
    request = await build_request(call, body, "ollama-", ids, **options)
    check_requests([request], call.model.info, body.violations)
    return GenerateRequest(name, None if fields.is_empty else request, stream, not fields.is_raw, call.notes())


class GenerateStream:
    """A line per Delta with text in it, and a last one with the figures."""

    media_type = MEDIA_TYPE

    def __init__(self, parsed: GenerateRequest, request: Request, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._frame, self._totals = Frame(parsed.model, parsed.notes), Totals()
        self._context = list(request.prompt_ids) if parsed.context else None

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The line that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            if self._context is not None:
                self._context += event.token_ids
            beside = logprob_fields(event.logprobs, self._tokenizer)
            return ndjson(self._frame.part({"response": event.text, **beside})) if event.text or beside else b""
        if isinstance(event, Finished):
            content = {"response": ""} | ({} if self._context is None else {"context": self._context})
            return ndjson(self._frame.end(content, self._totals, event))
        return b""

    def last(self) -> bytes:
        """Nothing more."""
        return b""


async def generate(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.model.gate.enter():
        parsed = await parse_generate(call)
        frame, request = Frame(parsed.model, parsed.notes), parsed.request
        tokenizer = call.model.tokenizer.loaded
        if request is None:
            await call.reply(200, frame.loaded({"response": ""}))
        elif parsed.stream:
            await stream_answer(call, [request], GenerateStream(parsed, request, tokenizer))
        else:
            (sample,), totals = await whole_answer(call, [request])
            assert sample.end is not None  # an answer in one piece is made of finished samples
            content = {"response": sample.text, **logprob_fields(sample.logprobs, tokenizer)}
            if parsed.context:
                content["context"] = [*request.prompt_ids, *sample.token_ids]
            await call.reply(200, frame.end(content, totals, sample.end))


def message(parts: Sequence[str | ToolCall]) -> dict[str, Any]:
    """One message of all ``parts``."""
    text = "".join(part for part in parts if isinstance(part, str))
    found: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [part for part in parts if isinstance(part, ToolCall)]
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    """Here arguments are an object, which they may fail to be."""
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = call.arguments
    named = arguments if isinstance(arguments, dict) else {"value": arguments}
    return {"id": call.call_id, "function": {"index": call.index, "name": call.name, "arguments": named}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``request`` None: nothing is to be generated. ``tools``: those that the model was told of, so its text may hold
    calls of them."""

    model: str
    request: Request | None
    stream: bool
    tools: ToolUse | None
    notes: Mapping[str, Any]


async def parse_chat(call: Call) -> ChatRequest:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    name, stream = asked_model(body, model), body.flag("stream", default=True)
    call.field_names["prompt"] = "messages"
    tokenizer = model.tokenizer.loaded
    tools = read_tools(body, tokenizer)
    empty = body.raw("messages") in (None, [])
    ids = () if empty else await _read_messages(body, call, tools)
    sampling, stopping = read_options(body, tokenizer)
    options = {"sampling": sampling, "stopping": stopping}
    options["grammar"] = answer_grammar(body, read_format(body), tools, tokenizer)
    output = OutputParams(logprobs=read_logprobs(body))
    options["output"] = output if tools is None else tools.output(output, tokenizer)
    refuse_thinking(body, name)
    request = await build_request(call, body, "ollama-", ids, **options)
    body.violations.check(
        empty or bool(ids) or bool(body.violations.found), "messages", "must amount to at least one token"
    )
    check_requests([request], call.model.info, body.violations)
    return ChatRequest(name, None if empty else request, stream, tools, call.notes())


async def _read_messages(body: Body, call: Call, tools: ToolUse | None) -> tuple[int, ...]:
    for message in body.objects("messages"):
        refuse_images(message)
    return () if body.violations.found else await read_conversation(body, call.model, tools)


class ChatStream:
    """A line per Delta with text in it or with calls, and a last one with the figures."""

    media_type = MEDIA_TYPE

    def __init__(self, parsed: ChatRequest, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._frame, self._totals = Frame(parsed.model, parsed.notes), Totals()
        self._parser = None if parsed.tools is None else parsed.tools.whole_parser()

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The lines that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            parts = [event.text] if self._parser is None else self._parser.push(event.text)
            return self._line(parts, logprob_fields(event.logprobs, self._tokenizer))
        if isinstance(event, Finished):
            rest = b"" if self._parser is None else self._line(self._parser.flush(), {})
            return rest + ndjson(self._frame.end({"message": message([])}, self._totals, event))
        return b""

    def last(self) -> bytes:
        """Nothing more."""
        return b""

    def _line(self, parts: Sequence[str | ToolCall], beside: dict[str, Any]) -> bytes:
        if not any(parts) and not beside:
            return b""
        return ndjson(self._frame.part({"message": message(parts), **beside}))


async def chat(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.model.gate.enter():
        parsed = await parse_chat(call)
        frame, tokenizer = Frame(parsed.model, parsed.notes), call.model.tokenizer.loaded
        if parsed.request is None:
            await call.reply(200, frame.loaded({"message": message([])}))
        elif parsed.stream:
            await stream_answer(call, [parsed.request], ChatStream(parsed, tokenizer))
        else:
            (sample,), totals = await whole_answer(call, [parsed.request])
            assert sample.end is not None  # an answer in one piece is made of finished samples
            content = {"message": message([sample.text] if parsed.tools is None else parsed.tools.parse(sample.text))}
            beside = logprob_fields(sample.logprobs, tokenizer)
            await call.reply(200, frame.end(content | beside, totals, sample.end))


FAMILY = "specdec"


def details(model: ServedModel) -> dict[str, Any]:
    """What it is made of, as far as that is known here."""
    return {
        "parent_model": "",
        "format": FAMILY,
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": "",
        "quantization_level": model.info.dtype,
    }


def cards(model: ServedModel) -> list[dict[str, Any]]:
    """The entries of a list of models: the one served by its own name, then by its aliases. ``digest`` tells models
    apart, and changes with what decides about tokens."""
    card = {
        "modified_at": started(model),
        "size": model.info.weight_bytes,
        "digest": hashlib.sha256(f"{model.name}\n{model.fingerprint}".encode()).hexdigest(),
        "details": details(model),
    }
    return [{"name": name, "model": name, **card} for name in (model.name, *model.names.aliases)]


def started(model: ServedModel) -> str:
    """When the server began to serve it."""
    return datetime.fromtimestamp(model.started_s, UTC).isoformat().replace("+00:00", "Z")


_FOREVER = "2999-12-31T23:59:59Z"


async def tags(call: Call) -> None:
    """The models there are, each by all its names.

    Raises:
        EngineDeadError: it is not known yet.
    """
    await call.reply(200, {"models": [card for model in call.server.models for card in cards(model)]})


async def running(call: Call) -> None:
    """The models, which stay loaded, by their own names.

    Raises:
        EngineDeadError: it is not known yet.
    """
    found = [
        cards(model)[0] | {"expires_at": _FOREVER, "size_vram": 0, "context_length": model.info.max_context}
        for model in call.server.models
    ]
    await call.reply(200, {"models": found})


async def show(call: Call) -> None:
    """What a model can do.

    Raises:
        UnknownModelError: it is not served here.
        EngineDeadError: it is not known yet which is.
    """
    body, model = call.body(), call.model
    asked_model(body, model)
    body.violations.raise_if_any()
    capabilities = _capabilities(model)
    await call.reply(
        200,
        {
            "modelfile": "",
            # One setting a line and no line break at the end: clients take every line apart.
            "parameters": f"num_ctx {model.info.max_context}",
            "template": _template(capabilities),
            "details": details(model),
            "model_info": {
                "general.architecture": FAMILY,
                "general.basename": model.name,
                f"{FAMILY}.context_length": model.info.max_context,
                f"{FAMILY}.vocab_size": model.info.vocab_size,
            },
            "capabilities": capabilities,
            "modified_at": started(model),
        },
    )


def _capabilities(model: ServedModel) -> list[str]:
    tokenizer = model.tokenizer.loaded
    can: dict[str, Any] = {"insert": model.fills_in, "tools": tokenizer.has_tool_template}
    return ["completion", *(name for name, able in can.items() if able)]


def _template(capabilities: list[str]) -> str:
    """A stand-in for the model's own: clients look into it for what it mentions."""
    prompt = "{{ .Prompt }}"
    if "tools" in capabilities:
        prompt = "{{ if .Tools }}{{ .Tools }}{{ end }}" + prompt
    if "insert" in capabilities:
        prompt = "{{ if .Suffix }}{{ .Prompt }}{{ .Suffix }}{{ else }}" + prompt + "{{ end }}"
    return prompt


# The release of Ollama whose API is answered here: clients refuse to talk to one that is too old.
LEVEL = "0.12.6"


async def alive(call: Call) -> None:
    """The server runs."""
    await call.reply_data(200, b"Ollama is running", b"text/plain; charset=utf-8")


async def version(call: Call) -> None:
    """Which API this is."""
    await call.reply(200, {"version": LEVEL})


OPTION_FIELDS: Mapping[str, Schema] = {
    **SAMPLING,
    **param_schemas(SamplingParams, _DIALECT, **DEFAULTS),
    **STOPPING,
    "num_predict": {
        "type": "integer", "minimum": -2, "default": -1,
        "description": "Negative: up to the context. 0: only compute the prompt into the prefix cache.",
    },
    "repeat_last_n": {"type": "integer", "minimum": -1, "description": "0 turns repeat_penalty off."},
}  # fmt: skip
_MODEL: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "name": {**TEXT, "description": "The same, as older clients have it."},
}
_SHARED: Mapping[str, Schema] = {
    **_MODEL,
    "stream": {**FLAG, "default": True},
    "format": {"oneOf": [{"enum": ["json", ""]}, {**OBJECT, "description": "A JSON schema."}]},
    "options": {"type": "object", "properties": dict(OPTION_FIELDS)},
    "logprobs": FLAG,
    "top_logprobs": TOP_LOGPROBS,
    "think": {"enum": [False], "description": "Nothing that thinks is told apart from its answer."},
    **PREDICTION,
    **COMMON,
}
_IMAGES: Schema = {"type": "array", "maxItems": 0}
GENERATE_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "prompt": {**TEXT, "description": "None: nothing is generated."},
    "suffix": {**TEXT, "description": "What follows the gap that is to be filled."},
    "system": TEXT,
    "template": {**TEXT, "description": "Ignored: the model's own counts."},
    "context": {"type": "array", "items": COUNT, "description": "What an earlier answer told."},
    "raw": {**FLAG, "description": "Take the prompt as it is, special tokens included."},
    "images": _IMAGES,
}
CHAT_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "messages": {
        "type": "array",
        "description": "None: nothing is generated.",
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {**TEXT, "minLength": 1}, "content": TEXT, "images": _IMAGES},
        },
    },
    **TOOLS,
}

_ERRORS = OllamaErrors()
OLLAMA = (
    Endpoint("POST", "/api/generate", generate, _ERRORS, json_operation("Ollama: continue a text", GENERATE_FIELDS)),
    Endpoint(
        "POST",
        "/api/chat",
        chat,
        _ERRORS,
        json_operation("Ollama: answer in a conversation", CHAT_FIELDS),
        task=Task.CHAT,
    ),
    Endpoint("POST", "/api/show", show, _ERRORS, json_operation("Ollama: what the model can do", _MODEL)),
    Endpoint("GET", "/api/tags", tags, _ERRORS, {"summary": "Ollama: the models served", "responses": RESPONSES}),
    Endpoint("GET", "/api/ps", running, _ERRORS, {"summary": "Ollama: the models loaded", "responses": RESPONSES}),
    Endpoint("GET", "/api/version", version, _ERRORS, {"summary": "Ollama: the API's level", "responses": RESPONSES}),
    Endpoint("GET", "/", alive, _ERRORS, {"summary": "Ollama: a server is there", "responses": RESPONSES}),
)
