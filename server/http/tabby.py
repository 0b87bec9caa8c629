"""Tabby's dialect: /v1/completions with segments, /v1/health, /v1beta/server_setting, /v1/events."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import specdec
from server.auth.principal import current_caller
from server.completion.documents import ContextFile, Gap
from server.completion.outcomes import Outcome
from server.completion.requests import DEFAULT_MAX_TOKENS, CompletionOptions
from server.http.answering import whole_answer
from server.http.call import Call, Endpoint
from server.http.fields import COMMON, MODEL
from server.http.openai_format import OPENAI_ERRORS, extras
from server.json_body import Body
from server.request_fields import (
    NUMBER,
    TEXT,
    Field,
    Table,
    integer_field,
    listed,
    object_field,
    param_field,
    text_field,
    with_fields,
)
from server.served_model import ServedModel, Task
from specdec.core.types import Request, SamplingParams, TextRules
from specdec.engine.validation import check_requests

_CRLF = "\r\n"


def _plain(text: str) -> str:
    """``text`` with line feeds, which the model reads and writes."""
    return text.replace(_CRLF, "\n")


def with_line_ends(text: str, *, crlf: bool) -> str:
    """The model's ``text`` for a document whose lines end in CRLF, or not."""
    return _plain(text).replace("\n", _CRLF) if crlf else text


# Lists of texts, the most relevant kind first.
_KINDS = (
    "declarations",
    "relevant_snippets_from_changed_files",
    "relevant_snippets_from_recently_opened_files",
)
CLIPBOARD = "clipboard"
STANDARD = "standard"


_SNIPPETS = listed(with_fields({"filepath": TEXT, "body": TEXT, "score": NUMBER}))
SEGMENT_FIELDS: Table = (
    *(text_field(name) for name in ("prefix", "suffix", "filepath", "git_url", CLIPBOARD)),
    *(Field(kind, _SNIPPETS) for kind in _KINDS),
)
COMPLETION_FIELDS: Table = (
    MODEL,
    text_field("language", "As VS Code names it."),
    object_field("segments", SEGMENT_FIELDS, "prefix"),
    text_field("user", "Also the session, if none is named."),
    param_field(SamplingParams, "temperature", default=0.0),
    param_field(SamplingParams, "seed"),
    Field("mode", {"enum": [STANDARD]}, Body.text),
    *COMMON,
)


def read_segments(body: Body, own: Mapping[str, Any]) -> tuple[Gap, bool]:
    """The fields of ``segments``: the document around the cursor with line feeds, and whether its lines end in CRLF."""
    given: Body | None = own["segments"]
    if given is None:
        body.refuse("segments", "must be an object with a prefix")
    elif "prefix" not in own:
        given.refuse("prefix", "must be a string")
    prefix, suffix = own.get("prefix", ""), own.get("suffix", "")
    gap = Gap(
        prefix=_plain(prefix),
        suffix=_plain(suffix),
        files=() if given is None else tuple(_files(given)),
        repo=_repository(own.get("git_url", "")),
        path=own.get("filepath", ""),
        language=own.get("language", ""),
    )
    return gap, _CRLF in prefix or _CRLF in suffix


def _files(given: Body) -> Iterator[ContextFile]:
    """Scores order the kinds: each has a whole number, to which the client's score adds less than a half."""
    for base, kind in enumerate(reversed(_KINDS), start=1):
        for item in given.objects(kind):
            name, text = item.text("filepath") or "", item.text("body") or ""
            score = item.number("score") or 0.0
            if text.strip():
                yield ContextFile(name, _plain(text), base + 0.5 * max(0.0, score) / (1 + abs(score)))
    clipboard = given.text(CLIPBOARD) or ""
    if clipboard.strip():
        yield ContextFile(CLIPBOARD, _plain(clipboard))


def _repository(url: str) -> str:
    """The project's name from its URL."""
    return url.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]


def is_tabbys(body: Mapping[str, Any]) -> bool:
    """Whether a body of /v1/completions is Tabby's rather than OpenAI's, which has a prompt."""
    return ("segments" in body or "language" in body) and body.get("prompt") is None


async def parse_completion(call: Call) -> tuple[Request, bool]:
    """What ``call`` asks for, and whether the document's lines end in CRLF. The text ends before a blank line, among
    the ends that follow from its place.

    Raises:
        FimNotSupportedError: the model cannot fill in the middle of a text.
        RequestError: it cannot be served; the error names every bad field.
    """
    body, fields = await call.read_request(COMPLETION_FIELDS)
    own, engine = fields.own, fields.engine
    if own.get("mode", STANDARD) != STANDARD:
        body.refuse("mode", f'only "{STANDARD}" is served')
    engine["session"] = engine["session"] or own.get("user", "")
    engine["stopping.max_tokens"] = DEFAULT_MAX_TOKENS
    engine["stopping.rules"] = TextRules(blank_line=True)
    gap, crlf = read_segments(body, own)
    body.violations.raise_if_any()
    maker, options = call.model.maker, CompletionOptions(fields.request("", ()))
    request = await maker.make(gap, options, f"cmpl-{call.request_id}")
    check_requests([request], call.model.info, body.violations)
    return request, crlf


async def complete(call: Call) -> None:
    """Answer ``call``."""
    request, crlf = await parse_completion(call)
    (sample,), totals = await whole_answer(call, [request])
    if sample.text:  # it is remembered until the client reports its outcome
        owner = current_caller().scoped(request.cache_salt)
        call.model.outcomes.suggested(owner, request.request_id)
    body = {
        "id": request.request_id,
        "choices": [{"index": 0, "text": with_line_ends(sample.text, crlf=crlf)}],
        "mode": STANDARD,
        **extras(totals),
    }
    await call.reply(200, body)


EVENT_FIELDS: Table = (
    MODEL,
    Field("type", {"enum": ["view", "select", "dismiss"]}, Body.text),
    text_field("completion_id", minLength=1),
    integer_field("choice_index", 0),
    text_field("select_kind", "A part was taken over, such as a line; also as a query field."),
    text_field("cache_salt", "That of the completion, if it had one."),
)
_OUTCOMES = {"view": Outcome.SHOWN, "select": Outcome.ACCEPTED, "dismiss": Outcome.REJECTED}


async def log_event(call: Call) -> None:
    """Count it. One of a suggestion that is not remembered says nothing; clients can do nothing about that."""
    body, fields = await call.read_request(EVENT_FIELDS)
    own = fields.own
    outcome = _OUTCOMES.get(own.get("type", ""))
    completion = own.get("completion_id", "")
    if outcome is None:
        body.refuse("type", f"must be one of {', '.join(_OUTCOMES)}")
    if not completion:
        body.refuse("completion_id", "must be the id of a completion")
    body.violations.raise_if_any()
    assert outcome is not None
    if outcome is Outcome.ACCEPTED and (own.get("select_kind") or call.query.get("select_kind")):
        outcome = Outcome.PARTIALLY_ACCEPTED
    owner = current_caller().scoped(own.get("cache_salt", ""))
    call.model.outcomes.report(owner, completion, outcome)
    await call.reply_data(200, b"", b"text/plain; charset=utf-8")


# The release of Tabby whose API is answered here: clients leave out what an older one does not know.
LEVEL = "v0.30.0"


async def health(call: Call) -> None:
    """The model, by what it can do, and the machine."""
    models: dict[str, Any] = {}
    filling, talking = (call.server.models.find("", task) for task in (Task.FILL, Task.CHAT))
    if filling.can(Task.ANY) and filling.fills_in:
        models["completion"] = _local(filling)
    if talking.can(Task.ANY) and talking.tokenizer.loaded.has_chat_template:
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
    """Clients are asked to send no telemetry elsewhere."""
    await call.reply(200, {"disable_client_side_telemetry": True})


def _local(model: ServedModel) -> dict[str, Any]:
    return {"local": {"model_id": model.name, "device": _device(model)}}


def _device(model: ServedModel) -> str:
    """Where the model runs; only a GPU is served by Triton's kernels."""
    return "cuda" if model.info.kernels == "triton" else "cpu"


_SELECT = {"name": "select_kind", "in": "query", "schema": TEXT}
TABBY = (
    Endpoint("POST", "/v1/completions", complete, OPENAI_ERRORS, "Tabby: fill in the middle of a text",
             COMPLETION_FIELDS, claims=is_tabbys, task=Task.FILL, gated=True),
    Endpoint("POST", "/v1/events", log_event, OPENAI_ERRORS, "Tabby: what became of a suggestion", EVENT_FIELDS,
             ("type", "completion_id"), parameters=(_SELECT,)),
    Endpoint("GET", "/v1/health", health, OPENAI_ERRORS, "Tabby: the model and the machine"),
    Endpoint("POST", "/v1/health", health, OPENAI_ERRORS, "Tabby: the model and the machine"),
    Endpoint("GET", "/v1beta/server_setting", server_setting, OPENAI_ERRORS, "Tabby: what clients are asked to do"),
)  # fmt: skip
