"""What a body of Tabby's /v1/completions asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.auth.caller import current_caller
from server.completion.completion_options import DEFAULT_MAX_TOKENS, CompletionOptions
from server.completion.completion_service import CompletionService
from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.fields.sampling import read_seed
from server.http.tabby.debug_options import DebugOptions, read_debug_options
from server.http.tabby.line_ends import LineEnds
from server.http.tabby.segments import Segments, read_segments
from server.http.validation import validate
from specdec.types import Request, SamplingParams, StoppingParams, TextRules

STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """``ends``: what to make of the answer's line breaks. ``debug`` None: nothing is to be told beside the answer."""

    request: Request
    ends: LineEnds
    snippets: tuple[dict[str, Any], ...]
    debug: DebugOptions | None


def is_tabbys(body: Mapping[str, Any]) -> bool:
    """Whether a body of /v1/completions is Tabby's rather than OpenAI's, which has a prompt."""
    named = any(name in body for name in ("segments", "debug_options", "language"))
    return named and body.get("prompt") is None


async def read_completion(call: Call, service: CompletionService) -> CompletionAsk:
    """What ``call`` asks for.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    options, debug, segments = _options(call, body), read_debug_options(body), _segments(body)
    request_id = f"cmpl-{call.request_id}"
    if debug is not None and debug.raw_prompt is not None:
        call.field_names["prompt"] = "debug_options.raw_prompt"
        request = Request(
            request_id=request_id,
            prompt_ids=tuple(await frontend.encode(debug.raw_prompt, parse_special=True)),
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
        body.seen.raise_if_any()
        assert segments is not None
        request = await service.maker.make(segments.gap, options, current_caller(), request_id)
    validate([request], call.face.info, body.seen)
    if segments is None:
        return CompletionAsk(request, LineEnds(), (), debug)
    return CompletionAsk(request, segments.ends, segments.snippets, debug)


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
