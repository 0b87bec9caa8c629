"""Ollama's dialect: /api/generate, /api/chat, /api/embed, and what its clients ask about models."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.errors import UnknownModelError
from server.http.answer_parser import Part, Thought, ToolCall, as_object
from server.http.answering import Answer, Sample, answering
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.embeddings import DIMENSIONS, embeddings
from server.http.errors import LLAMA_TOO_LONG, Refusal
from server.http.fields import (
    COMMON,
    CONTINUES,
    MODEL,
    SAMPLING,
    STOPPING,
    TEMPLATE_VARIABLES,
    read_conversation,
    read_limit,
    template_variables,
)
from server.http.openai_format import extras, finish_fields, logprob_entries, set_logprobs
from server.http.tool_use import TOOLS, AnswerForm, answer_form, read_tools
from server.json_body import Body, RequestFields, write_line
from server.request_fields import (
    FLAG,
    IDS,
    INTEGER,
    NO_PROMPT,
    OBJECT,
    PREDICTION,
    TEXT,
    TEXTS,
    Field,
    Schema,
    Table,
    either,
    flag_field,
    listed,
    object_field,
    param_field,
    read_grammar,
    text_field,
    with_fields,
)
from server.served_model import ServedModel, Task
from specdec.core.fields import INT31
from specdec.core.types import (
    Delta,
    Finished,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    TokenLogprobs,
)
from specdec.errors import InvalidRequestError
from specdec.models.fim import TEMPLATES
from specdec.models.tokenizer import Tokenizer

MEDIA_TYPE = b"application/x-ndjson"


def ndjson(value: Any) -> bytes:
    """``value`` as one line."""
    return write_line(value) + b"\n"


def _error_body(refusal: Refusal) -> dict[str, str]:
    # Clients search for these words to distinguish a missing model from an unknown path.
    prefix = "model not found: " if refusal.reason == UnknownModelError.reason else ""
    return {"error": prefix + refusal.worded(LLAMA_TOO_LONG)}


OLLAMA_ERRORS = ErrorStyle(_error_body, ndjson)  # a line in the place of the one that says done


def logprob_fields(rows: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """``logprobs``, one entry per token, unless there are none."""
    return {"logprobs": logprob_entries(tokenizer, rows)} if rows else {}


def _read_format(body: Body, name: str) -> GrammarParams | None:
    """``"json"``, or a JSON schema. An empty text is neither."""
    value = body.value(name)
    if value is None or value == "":
        return None
    if value == "json":
        return GrammarParams(GrammarKind.JSON_OBJECT)
    if isinstance(value, dict):
        return read_grammar(body, name, GrammarKind.JSON_SCHEMA)
    body.refuse(name, 'must be "json" or a JSON schema')
    return None


def _refuse_images(body: Body) -> None:
    if body.raw("images"):
        body.refuse("images", "the model reads text only; leave them out")


DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's own
# Options that concern another engine (threads, memory, num_ctx) are ignored.
OPTION_FIELDS: Table = (
    *(
        param_field(SamplingParams, each.sets.partition(".")[2], default=DEFAULTS.get(each.name))
        for each in SAMPLING
    ),
    param_field(SamplingParams, "repetition_penalty", "repeat_penalty"),
    Field("repeat_last_n", {**INTEGER, "minimum": -1, "description": "0 turns repeat_penalty off."},
          partial(Body.integer, low=-1, high=INT31)),
    *STOPPING,
    Field("num_predict", {
        **INTEGER, "minimum": -2, "default": -1,
        "description": "Negative: up to the context. 0: only compute the prompt into the prefix cache.",
    }, partial(read_limit, low=-2), "stopping.max_tokens"),
)  # fmt: skip
_EFFORTS = ("low", "medium", "high")


def _read_think(body: Body, name: str) -> bool | None:
    return body.raw(name) in _EFFORTS or body.flag(name)


_NAMES: Table = (MODEL, text_field("name", "The same, as older clients send it."))
_SHARED: Table = (
    *_NAMES,
    flag_field("stream", default=True),
    Field("format", either({"enum": ["json", ""]}, {**OBJECT, "description": "A JSON schema."}), _read_format,
          "grammar"),
    object_field("options", OPTION_FIELDS),
    flag_field("logprobs"),
    param_field(OutputParams, "logprobs", "top_logprobs"),
    Field("think", {
        **either(FLAG, {"enum": [*_EFFORTS]}), "description": "False asks the template for an answer without thoughts.",
    }, _read_think),
    TEMPLATE_VARIABLES,
    PREDICTION,
    *COMMON,
)  # fmt: skip
_IMAGES: Schema = {"type": "array", "maxItems": 0}
GENERATE_FIELDS: Table = (
    *_SHARED,
    text_field("prompt", "None: nothing is generated."),
    text_field("suffix", "What follows the gap to be filled."),
    text_field("system"),
    text_field("template", "Ignored: the model's own counts."),
    Field("context", {**IDS, "description": "From an earlier answer."}, partial(Body.integers, low=0, high=INT31)),
    flag_field("raw", "Take the prompt as it is, special tokens included."),
    Field("images", _IMAGES),
)
_MESSAGE = with_fields({"role": {**TEXT, "minLength": 1}, "content": TEXT, "images": _IMAGES}, "role")
CHAT_FIELDS: Table = (
    *_SHARED,
    Field("messages", {**listed(_MESSAGE), "description": f"None: nothing is generated. {CONTINUES}"}),
    *TOOLS,
)


async def read_ollama_call(call: Call, table: Table) -> tuple[Body, RequestFields, str]:
    """The body, what it asks for, and the model's name in the answer: as the client calls it.

    Raises:
        RequestError: as `Call.read_request` raises.
    """
    body, fields = await call.read_request(table)
    model = fields.own.get("model") or fields.own.get("name") or call.model.name
    fields.engine["stopping.stop"] = tuple(filter(None, fields.engine["stopping.stop"]))
    if fields.own.get("repeat_last_n") == 0:
        fields.engine.pop("sampling.repetition_penalty", None)
    set_logprobs(body, fields, fields.own["logprobs"])
    if fields.own.get("think") and call.model.tokenizer.loaded.thought_marks is None:
        body.refuse("think", f"{model!r} does not support thinking; leave it out")
    return body, fields, model


_MARKS = tuple((before, behind) for template in TEMPLATES for before in template.prefix for behind in template.suffix)


def spells_template(text: str) -> bool:
    """Whether ``text`` spells out both marks of a model family's template: before and after the gap."""
    return any(before in text and behind in text for before, behind in _MARKS)


def now() -> str:
    """The time in UTC, in the form of RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(milliseconds: float) -> int:
    return max(1, round(milliseconds * 1e6))


DEFAULT_ROOM = 512  # tokens reserved for what fills a gap, if the call has no limit


async def parse_generate(call: Call) -> OllamaAnswer:
    """What ``call`` asks for; raises as `Call.checked_request` and `_encode_prompt`."""
    body, fields, model = await read_ollama_call(call, GENERATE_FIELDS)
    own = fields.own
    prompt, context = own.get("prompt", ""), own.get("context", ())
    # Many clients fill in a FIM template themselves without setting raw.
    is_raw = own["raw"] or spells_template(prompt)
    is_empty = not prompt and (is_raw or not own.get("suffix"))
    if own["raw"] and (own.get("system") or own.get("template") or context):
        body.refuse("raw", "takes the prompt as it is; leave out system, template and context, or raw")
    _refuse_images(body)
    call.field_names["prompt.token_ids"] = "context" if context else "prompt"
    ids = NO_PROMPT if is_empty else await _encode_prompt(call, body, fields, is_raw)
    form = AnswerForm()
    if not is_raw and not own.get("suffix"):
        form = answer_form(body, fields, None, call.model.tokenizer.loaded, ids)
    request = call.checked_request(f"ollama-{call.request_id}", body, fields, (*context, *ids))
    requests = [] if is_empty else [request]
    return OllamaAnswer(call, model, requests, form, response, stream=own["stream"], has_context=not is_raw)


def _variables(fields: RequestFields) -> dict[str, Any]:
    """Variables of the chat template. Without thinking Qwen3 answers at once; other templates ignore the variable."""
    think = fields.own.get("think")
    return {} if think is None else {"enable_thinking": think}


async def _encode_prompt(call: Call, body: Body, fields: RequestFields, is_raw: bool) -> Sequence[int]:
    """Token ids of the prompt, which leave room for the answer. ``fields`` get those that end what fills a gap.

    Special tokens spelled out in text are read as such in a raw prompt only.

    Raises:
        FimNotSupportedError: there is a suffix, and the model cannot fill in.
    """
    model, own = call.model, fields.own
    prompt, suffix, system = (own.get(name, "") for name in ("prompt", "suffix", "system"))
    if is_raw:
        return await model.tokenizer.encode(prompt, parse_special=True)
    if suffix:
        room = fields.engine.get("stopping.max_tokens", 0) or DEFAULT_ROOM
        packed = await model.maker.pack_between(prompt, suffix, room, salt=fields.engine.get("cache_salt", ""))
        fields.stop_at(packed.ends)
        return packed.ids
    if model.tokenizer.loaded.has_chat_template:
        messages = [{"role": role, "content": text} for role, text in (("system", system), ("user", prompt)) if text]
        try:
            variables = _variables(fields) | template_variables(body)
            return await model.tokenizer.encode_chat(messages, variables=variables)
        except InvalidRequestError as error:
            body.refuse("prompt", error.violations[0].description)
            return ()
    return await model.tokenizer.encode("\n\n".join(filter(None, (system, prompt))))


async def parse_chat(call: Call) -> OllamaAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields, model = await read_ollama_call(call, CHAT_FIELDS)
    call.field_names["prompt"] = "messages"
    tokenizer = call.model.tokenizer.loaded
    tools = read_tools(body, tokenizer)
    empty = body.raw("messages") in (None, [])
    for each in body.objects("messages"):
        _refuse_images(each)
    ids: tuple[int, ...] = NO_PROMPT
    if not empty and not body.violations.found:
        own, variables = fields.own, _variables(fields)
        ids = await read_conversation(body, own, call.model, tools, variables=variables, continues=True)
    form = answer_form(body, fields, tools, tokenizer, ids)
    request = call.checked_request(f"ollama-{call.request_id}", body, fields, ids)
    return OllamaAnswer(call, model, [] if empty else [request], form, message, stream=fields.own["stream"])


Content = Callable[[Sequence[Part]], dict[str, Any]]


def message(parts: Sequence[Part]) -> dict[str, Any]:
    """The content of an answer of /api/chat."""
    text = "".join(part for part in parts if isinstance(part, str))
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if calls := [_call(part) for part in parts if isinstance(part, ToolCall)]:
        found["tool_calls"] = calls
    return {"message": found | _thoughts(parts)}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": as_object(call.arguments)}
    return {"id": call.call_id, "function": function}


def response(parts: Sequence[Part]) -> dict[str, Any]:
    """The content of an answer of /api/generate."""
    return {"response": "".join(part for part in parts if isinstance(part, str)), **_thoughts(parts)}


def _thoughts(parts: Sequence[Part]) -> dict[str, str]:
    text = "".join(part.text for part in parts if isinstance(part, Thought))
    return {"thinking": text} if text else {}


class OllamaAnswer(Answer):
    """A stream has a line per Delta with content, and a last one with the figures."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        call: Call,
        model: str,
        requests: Sequence[Request],
        form: AnswerForm,
        content: Content,
        *,
        stream: bool,
        has_context: bool = False,
    ) -> None:
        """model: as the client calls it. requests: none if nothing is to be generated. content: makes text and calls
        the content of a line. has_context: the answer returns all token ids, for the next call."""
        super().__init__(call, requests, stream=stream and bool(requests))
        self._model, self._notes, self._content = model, call.notes(), content
        self.form, self._parser = form, form.parser(whole=True)
        self._context = [*requests[0].prompt_ids] if has_context and requests else None

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta):
            if self._context is not None:
                self._context += event.token_ids
            return self._part(self._parser.push(event.text), logprob_fields(event.logprobs, self._tokenizer))
        if isinstance(event, Finished):
            return self._part(self._parser.flush(), {}) + ndjson(self._end([], {}, event))
        return b""

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        if not samples:  # clients send a request without a prompt to have the model loaded
            return self._line([], {"done": True, "done_reason": "load"})
        (sample,) = samples
        if self._context is not None:
            self._context += sample.token_ids
        parts, _ = self.form.parse(sample.text)
        return self._end(parts, logprob_fields(sample.logprobs, self._tokenizer), sample.end)

    def _part(self, parts: Sequence[Part], beside: dict[str, Any]) -> bytes:
        """A line that others follow."""
        return ndjson(self._line(parts, {**beside, "done": False})) if parts or beside else b""

    def _end(self, parts: Sequence[Part], beside: dict[str, Any], end: Finished) -> dict[str, Any]:
        """The last line. Durations are in nanoseconds and never 0, because clients divide by them."""
        spent, context = end.timings, {} if self._context is None else {"context": self._context}
        figures = {
            "done": True,
            "done_reason": finish_fields(end)["finish_reason"],
            "total_duration": _nanoseconds(spent.queue_ms + spent.prefill_ms + spent.decode_ms),
            "load_duration": _nanoseconds(spent.queue_ms),
            "prompt_eval_count": self.totals.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(spent.prefill_ms),
            "eval_count": self.totals.output_tokens,
            "eval_duration": _nanoseconds(spent.decode_ms),
        }
        return self._line(parts, {**beside, **context, **figures, **extras(self.totals), **self._notes})

    def _line(self, parts: Sequence[Part], rest: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **self._content(parts), **rest}


_EMBED: Table = (
    *_NAMES,
    flag_field("truncate", "Cut texts to the context; false refuses longer ones.", default=True),
    object_field("options", OPTION_FIELDS),
)
_INPUT = Field("input", {**TEXTS, "description": "None: nothing is embedded."}, Body.texts)
EMBED_FIELDS: Table = (*_EMBED, _INPUT, DIMENSIONS)
OLD_EMBED_FIELDS: Table = (*_EMBED, text_field("prompt", "None: nothing is embedded."))


async def _embedded(call: Call, table: Table, name: str) -> tuple[list[NDArray[np.float32]], int]:
    """The embeddings of the field ``name`` of a call, and the number of their tokens.

    Raises:
        RequestError: it cannot be served; the error names every bad field.
    """
    body, fields = await call.read_request(table)
    own, given = fields.own, fields.own.get(name) or ()
    texts = [given] if isinstance(given, str) else [*given] if given != ("",) else []
    longest = call.model.info.max_context - 1 if own["truncate"] else None
    dimensions = own.get("dimensions")
    return await embeddings(call, body, name, texts, "ollama", {}, dimensions=dimensions, longest=longest)


async def embed(call: Call) -> None:
    """Embeddings of texts."""
    began_s = time.perf_counter()
    rows, tokens = await _embedded(call, EMBED_FIELDS, "input")
    spent = _nanoseconds((time.perf_counter() - began_s) * 1e3)
    durations = {"total_duration": spent, "load_duration": 1, "prompt_eval_count": tokens}
    name = call.data.get("model") or call.data.get("name") or call.model.name
    await call.reply(200, {"model": name, "embeddings": rows, **durations, **call.notes()})


async def embed_one(call: Call) -> None:
    """The embedding of one text, as older clients ask for it."""
    rows, _ = await _embedded(call, OLD_EMBED_FIELDS, "prompt")
    await call.reply(200, {"embedding": rows[0] if rows else [], **call.notes()})


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
    """The entries of a list of models: the served model's own name, then its aliases. ``digest`` differs between models
    and changes with everything that can change tokens."""
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
    """The models there are, each by all its names."""
    await call.reply(200, {"models": [card for model in call.server.models for card in cards(model)]})


async def running(call: Call) -> None:
    """The models, which stay loaded, by their own names."""
    found = [
        cards(model)[0] | {"expires_at": _FOREVER, "size_vram": 0, "context_length": model.info.max_context}
        for model in call.server.models
    ]
    await call.reply(200, {"models": found})


async def show(call: Call) -> None:
    """What a model can do."""
    body, _ = await call.read_request(_NAMES)
    body.violations.raise_if_any()
    model = call.model
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


PULL_FIELDS: Table = (*_NAMES, flag_field("stream", default=True))


async def pull(call: Call) -> None:
    """Says that a model is there: clients ask for it before they use one. Another model is refused as anywhere."""
    body, fields = await call.read_request(PULL_FIELDS)
    body.violations.raise_if_any()
    done = {"status": "success"}
    if fields.own["stream"]:
        await call.reply_data(200, ndjson(done), MEDIA_TYPE)
    else:
        await call.reply(200, done)


def _capabilities(model: ServedModel) -> list[str]:
    if model.can(Task.EMBED):
        return ["embedding"]
    if not model.can(Task.ANY):
        return []
    tokenizer = model.tokenizer.loaded
    can: dict[str, Any] = {"insert": model.fills_in, "tools": tokenizer.has_tool_template}
    can["thinking"] = tokenizer.thought_marks is not None
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


OLLAMA = (
    Endpoint("POST", "/api/generate", answering(parse_generate), OLLAMA_ERRORS, "Ollama: continue a text",
             GENERATE_FIELDS, gated=True),
    Endpoint("POST", "/api/chat", answering(parse_chat), OLLAMA_ERRORS, "Ollama: answer in a conversation", CHAT_FIELDS,
             task=Task.CHAT, gated=True),
    Endpoint("POST", "/api/embed", embed, OLLAMA_ERRORS, "Ollama: embeddings of texts", EMBED_FIELDS, task=Task.EMBED,
             gated=True),
    Endpoint("POST", "/api/embeddings", embed_one, OLLAMA_ERRORS, "Ollama: the embedding of a text", OLD_EMBED_FIELDS,
             task=Task.EMBED, gated=True),
    Endpoint("POST", "/api/pull", pull, OLLAMA_ERRORS, "Ollama: whether a model is served", PULL_FIELDS),
    Endpoint("POST", "/api/show", show, OLLAMA_ERRORS, "Ollama: what the model can do", _NAMES),
    Endpoint("GET", "/api/tags", tags, OLLAMA_ERRORS, "Ollama: the models served"),
    Endpoint("GET", "/api/ps", running, OLLAMA_ERRORS, "Ollama: the models loaded"),
    Endpoint("GET", "/api/version", version, OLLAMA_ERRORS, "Ollama: the API's level"),
    Endpoint("GET", "/", alive, OLLAMA_ERRORS, "Ollama: a server is there"),
)  # fmt: skip
