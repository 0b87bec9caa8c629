"""Tabby's dialect: /v1/completions with segments, /v1/health, /v1beta/server_setting, /v1/events."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import specdec
from server.auth.principal import current_caller
from server.completion.documents import ContextFile, Gap
from server.completion.requests import DEFAULT_MAX_TOKENS, CompletionOptions
from server.completion.service import CompletionService, Outcome
from server.http.answering import Totals
from server.http.call import Call, Endpoint
from server.http.fields import (
    COMMON,
    COUNT,
    FLAG,
    NUMBER,
    RESPONSES,
    TEXT,
    Schema,
    json_operation,
    read_common,
)
from server.http.openai_format import OpenAIErrors, extras
from server.json_body import Body
from server.request_fields import read_seed
from server.served_model import ServedModel, Task
from specdec.core.types import Request, SamplingParams, StoppingParams, TextRules
from specdec.engine.validation import check_requests

_CRLF, _ALONE = "\r\n", re.compile(r"(?<!\r)\n")


class LineEnds:
    """Models are shown, and write, single line feeds; a document that has CR LF somewhere gets those back."""

    def __init__(self, *texts: str) -> None:
        self._crlf = any(_CRLF in text for text in texts)

    def plain(self, text: str) -> str:
        """``text`` for the model."""
        return text.replace(_CRLF, "\n") if self._crlf else text

    def own(self, text: str) -> str:
        """What the model wrote, for the document."""
        return _ALONE.sub(_CRLF, text) if self._crlf else text


# Lists of texts, the most relevant kind first, and whether the client ranks the texts in them.
_KINDS = (
    ("declarations", False),
    ("relevant_snippets_from_changed_files", True),
    ("relevant_snippets_from_recently_opened_files", True),
)
CLIPBOARD = "clipboard"


@dataclass(frozen=True, slots=True)
class Segments:
    """``gap`` has plain line feeds; ``snippets``: the texts beside it, as Tabby tells them."""

    gap: Gap
    ends: LineEnds
    snippets: tuple[dict[str, Any], ...]


def read_segments(given: Body, language: str) -> Segments:
    """Tabby's own fields; a text without a body says nothing, and is left out."""
    prefix, suffix = given.text("prefix"), given.text("suffix") or ""
    if prefix is None:
        given.refuse("prefix", "must be a string")
    ends = LineEnds(prefix or "", suffix)
    files = tuple(_files(given, ends))
    gap = Gap(
        prefix=ends.plain(prefix or ""),
        suffix=ends.plain(suffix),
        files=files,
        repo=_repository(given.text("git_url") or ""),
        path=given.text("filepath") or "",
        language=language,
    )
    return Segments(gap, ends, tuple({"filepath": f.name, "body": f.text, "score": f.score} for f in files))


def _files(given: Body, ends: LineEnds) -> Iterator[ContextFile]:
    """Scores put kinds apart: each has a whole number of its own, to which the client's score adds at most a half."""
    for base, (kind, ranked) in enumerate(reversed(_KINDS), start=1):
        for item in given.objects(kind):
            name, text = item.text("filepath") or "", item.text("body") or ""
            score = (item.number("score") or 0.0) if ranked else 0.0
            if text.strip():
                yield ContextFile(name, ends.plain(text), base + 0.5 * max(0.0, score) / (1 + abs(score)))
    clipboard = given.text(CLIPBOARD) or ""
    if clipboard.strip():
        yield ContextFile(CLIPBOARD, ends.plain(clipboard))


def _repository(url: str) -> str:
    """The project's name, without where it is kept."""
    return url.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]


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


STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``ends``: what to make of the answer's line breaks. ``debug`` None: nothing is to be told beside the answer."""

    request: Request
    ends: LineEnds
    snippets: tuple[dict[str, Any], ...]
    debug: DebugOptions | None


def is_tabbys(body: Mapping[str, Any]) -> bool:
    """Whether a body of /v1/completions is Tabby's rather than OpenAI's, which has a prompt."""
    named = any(name in body for name in ("segments", "debug_options", "language"))
    return named and body.get("prompt") is None


async def parse_completion(call: Call, service: CompletionService) -> CompletionRequest:
    """What ``call`` asks for.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    options, debug, segments = _options(call, body), read_debug_options(body), _segments(body)
    request_id = f"cmpl-{call.request_id}"
    if debug is not None and debug.raw_prompt is not None:
        call.field_names["prompt"] = "debug_options.raw_prompt"
        request = Request(
            request_id=request_id,
            prompt_ids=tuple(await model.tokenizer.encode(debug.raw_prompt, parse_special=True)),
            sampling=options.sampling,
            stopping=dataclasses.replace(options.stopping, rules=None),
            speculation=options.speculation,
            priority=options.priority,
            cache_salt=options.cache_salt,
            session=options.session,
            target_tpot_ms=options.target_tpot_ms,
        )
        segments = None
    else:
        if segments is None:
            body.refuse("segments", "must be an object with a prefix")
        body.violations.raise_if_any()
        assert segments is not None
        request = await service.maker.make(segments.gap, options, current_caller(), request_id)
    check_requests([request], call.model.info, body.violations)
    if segments is None:
        return CompletionRequest(request, LineEnds(), (), debug)
    return CompletionRequest(request, segments.ends, segments.snippets, debug)


def _segments(body: Body) -> Segments | None:
    given, language = body.object("segments"), body.text("language") or ""
    return None if given is None else read_segments(given, language)


def _options(call: Call, body: Body) -> CompletionOptions:
    """Ends before a blank line, beside where its place in the text ends it. Greedy where nothing is said."""
    if body.text("mode") not in (None, STANDARD):
        body.refuse("mode", f'only "{STANDARD}" is served')
    temperature, user = body.number("temperature"), body.text("user")
    common = read_common(call, body)
    return CompletionOptions(
        sampling=SamplingParams(temperature=0.0 if temperature is None else temperature, seed=read_seed(body)),
        stopping=StoppingParams(max_tokens=DEFAULT_MAX_TOKENS, rules=TextRules(blank_line=True)),
        **common | {"session": common["session"] or user or ""},
    )


async def complete(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.model.gate.enter():
        service = call.model.completion
        parsed = await parse_completion(call, service)
        text, totals = await _fill_in(service, parsed, call.supersedes_key)
        body = {
            "id": parsed.request.request_id,
            "choices": [{"index": 0, "text": parsed.ends.own(text)}],
            "mode": STANDARD,
            **extras(totals),
        }
        if parsed.debug is not None:
            body["debug_data"] = await _debug_data(call, parsed)
        await call.reply(200, body)


async def _fill_in(service: CompletionService, parsed: CompletionRequest, supersedes_key: str) -> tuple[str, Totals]:
    """The text, which others who ask for the same at the same time get too; remembered until its fate is told."""
    principal, request, totals = current_caller(), parsed.request, Totals()
    run, _ = await service.runs.start(principal, request, supersedes_key)
    try:
        async for event in run.read():
            totals.add(event)
    finally:
        run.leave()
    owner = service.owner(principal, request.cache_salt)
    service.outcomes.suggested(owner, request.request_id, request.session, len(run.text))
    return run.text, totals


async def _debug_data(call: Call, parsed: CompletionRequest) -> dict[str, Any]:
    assert parsed.debug is not None
    data: dict[str, Any] = {}
    if parsed.debug.return_snippets:
        data["snippets"] = parsed.snippets
    if parsed.debug.return_prompt:
        data["prompt"] = await call.model.tokenizer.decode(parsed.request.prompt_ids, skip_special=False)
    return data


_OUTCOMES = {"view": Outcome.SHOWN, "select": Outcome.ACCEPTED, "dismiss": Outcome.REJECTED}
_INT31 = (1 << 31) - 1


async def log_event(call: Call) -> None:
    """Count it. One of a suggestion that is not remembered says nothing; clients can do nothing about that.

    Raises:
        InvalidRequestError: fields that make no sense, each one named.
    """
    body = call.body()
    kind, completion = body.text("type"), body.text("completion_id")
    select, salt = body.text("select_kind") or call.query.get("select_kind"), body.text("cache_salt") or ""
    shown_ms = body.number("elapsed")
    body.integer("choice_index", 0, _INT31)
    outcome = _OUTCOMES.get(kind or "")
    if outcome is None:
        body.refuse("type", f"must be one of {', '.join(_OUTCOMES)}")
    if not completion:
        body.refuse("completion_id", "must be the id of a completion")
    if shown_ms is not None and not 0 <= shown_ms < math.inf:
        body.refuse("elapsed", "must be a number of milliseconds, not negative")
    body.violations.raise_if_any()
    assert outcome is not None
    assert completion is not None
    if outcome is Outcome.ACCEPTED and select:
        outcome = Outcome.PARTIALLY_ACCEPTED  # of how many characters is not told
    service = call.model.completion
    owner = service.owner(current_caller(), salt)
    service.outcomes.report(owner, completion, outcome, 0, shown_ms or 0.0)
    await call.reply_data(200, b"", b"text/plain; charset=utf-8")


# The release of Tabby whose API is answered here: clients leave out what an older one does not know.
LEVEL = "v0.30.0"


async def health(call: Call) -> None:
    """The model, by what it can do, and the machine.

    Raises:
        EngineDeadError: it is not known yet.
    """
    models: dict[str, Any] = {}
    filling, talking = (call.server.models.find("", task) for task in (Task.FILL, Task.CHAT))
    if filling.fills_in:
        models["completion"] = _local(filling)
    if talking.tokenizer.loaded.has_chat_template:
        models["chat"] = _local(talking)
    body: dict[str, Any] = {
        "device": _device(call.model),
        "models": models,
        "arch": platform.machine(),
        "cpu_info": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count() or 1,
        "cuda_devices": [],
        "version": {"build_date": "", "build_timestamp": "", "git_sha": specdec.__version__, "git_describe": LEVEL},
        "webserver": None,
    }
    # A client offers completion and chat as far as these two are there.
    named = {"model": ("completion", filling.name), "chat_model": ("chat", talking.name)}
    await call.reply(200, {field: name for field, (kind, name) in named.items() if kind in models} | body)


async def server_setting(call: Call) -> None:
    """Clients are asked to report to nobody but this server."""
    await call.reply(200, {"disable_client_side_telemetry": True})


def _local(model: ServedModel) -> dict[str, Any]:
    return {"local": {"model_id": model.name, "device": _device(model)}}


def _device(model: ServedModel) -> str:
    """Where the model runs; only a GPU is served by Triton's kernels."""
    return "cuda" if model.info.kernels == "triton" else "cpu"


_SNIPPETS: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"filepath": TEXT, "body": TEXT, "score": NUMBER}},
}
SEGMENT_FIELDS: Mapping[str, Schema] = {
    "prefix": TEXT,
    "suffix": TEXT,
    "filepath": TEXT,
    "git_url": TEXT,
    "declarations": _SNIPPETS,
    "relevant_snippets_from_changed_files": _SNIPPETS,
    "relevant_snippets_from_recently_opened_files": _SNIPPETS,
    "clipboard": TEXT,
}
COMPLETION_FIELDS: Mapping[str, Schema] = {
    "language": {**TEXT, "description": "As VS Code names it."},
    "segments": {"type": "object", "required": ["prefix"], "properties": dict(SEGMENT_FIELDS)},
    "user": {**TEXT, "description": "Also the session, where none is named."},
    "temperature": {"type": "number", "minimum": 0, "default": 0},
    "seed": {"type": "integer"},
    "mode": {"enum": [STANDARD]},
    "debug_options": {
        "type": "object",
        "properties": {
            "raw_prompt": {**TEXT, "description": "In the place of the segments."},
            "return_snippets": FLAG,
            "return_prompt": FLAG,
        },
    },
    **COMMON,
}
EVENT_FIELDS: Mapping[str, Schema] = {
    "type": {"enum": ["view", "select", "dismiss"]},
    "completion_id": {**TEXT, "minLength": 1},
    "choice_index": COUNT,
    "select_kind": {**TEXT, "description": "A part was taken over, such as a line; also as a query field."},
    "elapsed": {"type": "number", "minimum": 0, "description": "Milliseconds that it was shown for."},
    "cache_salt": {**TEXT, "description": "That of the completion, where it had one."},
}

_ERRORS = OpenAIErrors()
_HEALTH = {"summary": "Tabby: the model and the machine", "responses": RESPONSES}
_SELECT = {"name": "select_kind", "in": "query", "schema": TEXT}
TABBY = (
    Endpoint(
        "POST",
        "/v1/completions",
        complete,
        _ERRORS,
        json_operation("Tabby: fill in the middle of a text", COMPLETION_FIELDS),
        is_tabbys,
        Task.FILL,
    ),
    Endpoint(
        "POST",
        "/v1/events",
        log_event,
        _ERRORS,
        {
            **json_operation("Tabby: what became of a suggestion", EVENT_FIELDS, ("type", "completion_id")),
            "parameters": [_SELECT],
        },
    ),
    Endpoint("GET", "/v1/health", health, _ERRORS, _HEALTH),
    Endpoint("POST", "/v1/health", health, _ERRORS, _HEALTH),
    Endpoint(
        "GET",
        "/v1beta/server_setting",
        server_setting,
        _ERRORS,
        {"summary": "Tabby: what clients are asked to do", "responses": RESPONSES},
    ),
)
