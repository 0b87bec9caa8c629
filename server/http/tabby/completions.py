"""Tabby's POST /v1/completions."""

from __future__ import annotations

from typing import Any

from server.auth.caller import current_caller
from server.completion.completion_service import CompletionService
from server.http.call import Call
from server.http.openai.figures import extras
from server.http.tabby.completion_ask import STANDARD, CompletionAsk, read_completion
from server.http.totals import Totals
from server.request_errors import DeadlinePassedError
from specdec.types import Finished, FinishReason


async def complete(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    with call.face.frontend.gate.enter():
        service = call.face.completion
        ask = await read_completion(call, service)
        text, totals = await _fill_in(service, ask, call.supersedes_key)
        body = {
            "id": ask.request.request_id,
            "choices": [{"index": 0, "text": ask.ends.own(text)}],
            "mode": STANDARD,
            **extras(totals),
        }
        if ask.debug is not None:
            body["debug_data"] = await _debug_data(call, ask)
        await call.reply(200, body)


async def _fill_in(service: CompletionService, ask: CompletionAsk, supersedes_key: str) -> tuple[str, Totals]:
    """The text, which others who ask for the same at the same time get too; remembered until its fate is told."""
    principal, request, totals = current_caller(), ask.request, Totals()
    run, _ = await service.runs.start(principal, request, supersedes_key)
    try:
        async for event in run.read():
            if isinstance(event, Finished) and event.reason is FinishReason.DEADLINE:
                raise DeadlinePassedError
            totals.add(event)
    finally:
        run.leave()
    owner = service.owner(principal, request.cache_salt)
    service.outcomes.suggested(owner, request.request_id, request.session, len(run.text))
    return run.text, totals


async def _debug_data(call: Call, ask: CompletionAsk) -> dict[str, Any]:
    assert ask.debug is not None
    data: dict[str, Any] = {}
    if ask.debug.return_snippets:
        data["snippets"] = ask.snippets
    if ask.debug.return_prompt:
        data["prompt"] = await call.face.frontend.decode(ask.request.prompt_ids, skip_special=False)
    return data
