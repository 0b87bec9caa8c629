"""/v1/predict_edit: the edits that a user is likely to make next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from server.auth.principal import current_caller
from server.completion.documents import ContextFile, OffsetUnit
from server.completion.next_edit import EditPlace, EditPrompt, EditReader, RecentEdit
from server.completion.prompt_packer import SMALLEST_BUDGET
from server.http.answering import DONE, MEDIA_TYPE, Sample, Totals, answer, sse
from server.http.call import Call, Endpoint
from server.http.fields import COMMON, MODEL, STOPPING, STREAM, TTFT
from server.http.openai_format import OpenAIErrors, answer_head, extras, finish_fields, usage
from server.json_body import Body
from server.request_fields import (
    COUNT,
    NUMBER,
    TEXT,
    Field,
    Table,
    integer_field,
    listed,
    param_field,
    param_fields,
    text_field,
    with_fields,
)
from specdec.core.fields import INT31
from specdec.core.types import Finished, Request, RequestEvent, SamplingParams, StoppingParams
from specdec.engine.validation import check_requests

_UNITS = tuple(unit.value for unit in OffsetUnit)
_RECENT_FIELDS = ("path", "before", "after", "diff")
_RECENT = with_fields(dict.fromkeys(_RECENT_FIELDS, TEXT))
_FILE = with_fields({"filename": TEXT, "text": TEXT, "score": NUMBER, "time_ms": COUNT})
FIELDS: Table = (
    MODEL,
    text_field("path", "The file's name relative to the project."),
    text_field("text", "The whole file."),
    integer_field("cursor", 0, INT31, "An offset in the text."),
    Field("unit", {"enum": [*_UNITS], "description": "Of offsets; default code_point."}, Body.text),
    Field("recent", {**listed(_RECENT), "description": "Edits, oldest first: before and after, or a unified diff."}),
    Field("extra", {**listed(_FILE), "description": "Other texts of the project."}),
    Field("diagnostics", listed(with_fields({"line": COUNT, "message": TEXT}))),
    integer_field("max_prompt_tokens", SMALLEST_BUDGET, INT31),
    TTFT,
    STREAM,
    *param_fields(SamplingParams, "n", "temperature"),
    param_field(SamplingParams, "temperature", default=0.0),
    *STOPPING,
    param_field(StoppingParams, "max_tokens"),
    *COMMON,
)


def read_place(body: Body, own: dict[str, Any]) -> EditPlace:
    """The place at which edits are to be predicted; ``body`` notes what is wrong."""
    text, unit = own.get("text"), own.get("unit", OffsetUnit.CODE_POINT)
    if text is None:
        body.refuse("text", "must be a string")
        text = ""
    if unit not in _UNITS:
        body.refuse("unit", f"must be one of {', '.join(_UNITS)}")
        unit = OffsetUnit.CODE_POINT
    problems = body.objects("diagnostics")
    return EditPlace.at(
        text,
        own.get("cursor", -1),
        OffsetUnit(unit),
        body.violations,
        path=own.get("path", ""),
        recent=tuple(map(_recent, body.objects("recent"))),
        files=tuple(map(_file, body.objects("extra"))),
        diagnostics=tuple((each.integer("line", 0, INT31) or 0, each.text("message") or "") for each in problems),
    )


def _recent(each: Body) -> RecentEdit:
    return RecentEdit.of(*(each.text(name) or "" for name in _RECENT_FIELDS))


def _file(each: Body) -> ContextFile:
    name, text = each.text("filename") or "", each.text("text") or ""
    return ContextFile(name, text, each.number("score") or 0.0, each.integer("time_ms", 0, 1 << 53) or 0)


async def parse_edit(call: Call) -> tuple[Request, EditReader, bool]:
    """The request of a call, what finds the edits in its answer, and whether a stream is wanted.

    Raises:
        RequestError: it cannot be served; the error names every bad field.
    """
    body, fields = await call.read_request(FIELDS)
    place, model = read_place(body, fields.own), call.model
    body.violations.raise_if_any()
    prompt = EditPrompt(place, model.info.target, model.tokenizer.loaded, model.completion.maker.packer)
    base = fields.request(f"edit-{call.request_id}", ())
    owner, budget = current_caller().scoped(base.cache_salt), fields.own.get("max_prompt_tokens")
    ttft = model.completion.maker.time.objective(owner, fields.own.get("ttft_ms"))
    request = await asyncio.to_thread(prompt.request, base, owner, budget, ttft)
    check_requests([request], model.info, body.violations)
    return request, EditReader(prompt), fields.own["stream"]


class EditAnswer:
    """A stream has an event with the edits that are complete, as often as there are any, and one at the end."""

    media_type = MEDIA_TYPE

    def __init__(self, head: dict[str, Any], reader: EditReader) -> None:
        self._head, self._reader, self._totals = head, reader, Totals()

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        self._totals.add(event)
        edits = [asdict(edit) for edit in self._reader.take(event)]
        data = sse({**self._head, "edits": edits}) if edits else b""
        return data + sse(self._end([], event)) if isinstance(event, Finished) else data

    def last(self) -> bytes:
        return DONE

    def whole(self, samples: Sequence[Sample], totals: Totals) -> dict[str, Any]:
        (sample,), self._totals = samples, totals
        edits = [*self._reader.feed(sample.text), *self._reader.take(sample.end)]
        return self._end([asdict(edit) for edit in edits], sample.end)

    def _end(self, edits: list[dict[str, Any]], event: Finished) -> dict[str, Any]:
        figures = {"usage": usage(self._totals), **extras(self._totals)}
        return {**self._head, "edits": edits, **finish_fields(event), **figures}


async def predict_edit(call: Call) -> None:
    """Answer a call."""
    with call.model.gate.enter():
        request, reader, stream = await parse_edit(call)
        form = EditAnswer(answer_head(call, "edit", "edit_prediction"), reader)
        await answer(call, [request], form, stream=stream, share=True)


NEXT_EDIT = (
    Endpoint(
        "POST", "/v1/predict_edit", predict_edit, OpenAIErrors(), "Predict the next edits of a file", FIELDS,
        ("text", "cursor"),
    ),
)  # fmt: skip
