"""llama.cpp's dialect: /infill, /completion, /props, /slots, /apply-template, /tokenize, /detokenize, /health."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import specdec
from server.errors import DrainingError
from server.http.answering import Answer, Sample, answer, omitted_lines, sse
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.errors import LLAMA_TOO_LONG, Refusal
from server.http.fields import CONVERSATION, MODEL, read_conversation
from server.http.llamacpp_request import (
    COMPLETION_FIELDS,
    INFILL_FIELDS,
    LlamaRequest,
    parse_completion,
    parse_infill,
    probabilities,
)
from server.http.openai_format import ERROR_TYPES
from server.http.tool_use import read_tools
from server.request_fields import IDS, TEXT, Field, Table, flag_field, text_field
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent
from specdec.errors import EngineDeadError
from specdec.models.tokenizer import Tokenizer

_TYPES = ERROR_TYPES | {404: "not_found_error", 503: "unavailable_error"}


def _error_body(refusal: Refusal) -> dict[str, Any]:
    """``code`` is the status. ``reason`` and ``field`` are additions. Clients shorten a prompt by ``n_ctx``."""
    kind = _TYPES.get(refusal.status, "invalid_request_error")
    error: dict[str, Any] = {"code": refusal.status, "message": refusal.worded(LLAMA_TOO_LONG), "type": kind}
    if refusal.too_long is not None:
        limit, got = refusal.too_long
        error |= {"type": "exceed_context_size_error", "n_prompt_tokens": got, "n_ctx": limit + 1}
    return {"error": error | {"reason": refusal.reason.lower(), "field": refusal.field}}


_WORDS = (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)
_LIMITS = (FinishReason.LENGTH, FinishReason.TIME_LIMIT, FinishReason.INDENT)


def picked(found: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The values at ``paths`` that exist, each under its whole path."""
    chosen: dict[str, Any] = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen


def timings(end: Finished) -> dict[str, Any]:
    """Milliseconds and tokens per second, 0 without tokens. Drafts are counted as in llama.cpp."""
    computed, made = end.usage.prompt_tokens - end.usage.cached_tokens, end.usage.output_tokens
    return {
        "cache_n": end.usage.cached_tokens,
        **_rates("prompt", computed, end.timings.prefill_ms),
        **_rates("predicted", made, end.timings.decode_ms),
        "draft_n": end.stats.num_draft_tokens,
        "draft_n_accepted": end.stats.num_accepted_draft_tokens,
    }


def _rates(name: str, tokens: int, ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / tokens if tokens else 0.0,
        f"{name}_per_second": tokens * 1e3 / ms if ms > 0 else 0.0,
    }


class LlamaAnswer(Answer):
    """A stream has an event per Delta with text and one per sample's end, all with ``content`` and ``stop``, because
    Tabby's server expects no other. Deltas without text have one if token ids or probabilities were requested."""

    def __init__(self, call: Call, parsed: LlamaRequest) -> None:
        super().__init__(call, [parsed.request], stream=parsed.stream)
        self._parsed, self._model, self._notes = parsed, call.model.name, call.notes()
        self._made = [0] * parsed.request.sampling.n
        self._with_new_line: set[int] = set()  # samples

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Finished):
            return sse(self._result("", [], event, has_new_line=event.index in self._with_new_line))
        if not isinstance(event, Delta):
            return b""
        self._made[event.index] += len(event.token_ids)
        if "\n" in event.text:
            self._with_new_line.add(event.index)
        if not event.text and not self._parsed.return_tokens and not event.logprobs:
            return b""
        found: dict[str, Any] = {
            "index": event.index,
            "content": event.text,
            "tokens": event.token_ids if self._parsed.return_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._made[event.index],
            "tokens_evaluated": len(self.request.prompt_ids),
        }
        if event.logprobs:
            found["completion_probabilities"] = probabilities(event.logprobs, self._tokenizer)
        return sse(found)

    def whole(self, samples: Sequence[Sample]) -> Any:
        """Several samples are a list, one is not."""
        found, wanted = [], self.request.output.logprobs is not None
        for each in samples:
            rows = probabilities(each.logprobs, self._tokenizer) if wanted else None
            found.append(self._result(each.text, each.token_ids, each.end, rows))
        return found if len(found) > 1 else found[0]

    def _result(
        self,
        text: str,
        token_ids: list[int],
        end: Finished,
        rows: list[dict[str, Any]] | None = None,
        *,
        has_new_line: bool = False,
    ) -> dict[str, Any]:
        """All fields of a sample's end, or the requested ones.

        ``tokens_cached`` counts cached tokens after the request; ``timings/cache_n`` those before it. rows: of
        probabilities; None: they were not requested, or already sent. has_new_line: whether text already sent has one.
        """
        usage, reason = end.usage, end.reason
        stopped = str(end.matched_stop) if reason is FinishReason.STOP_STRING else ""
        kind = "limit" if reason in _LIMITS else "word" if reason in _WORDS else "eos"
        sampling, paths = self.request.sampling, self._parsed.response_fields
        found = {
            "index": end.index,
            "content": text,
            "tokens": token_ids if self._parsed.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.output_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": {
                "seed": self.totals.seed,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "n_predict": self._parsed.n_predict,
                "stop": self.request.stopping.stop,
                "speculation": self.request.speculation.mode,
            },
            "has_new_line": has_new_line or "\n" in text,
            "truncated": False,
            "stop_type": "none" if reason is FinishReason.ABORTED else kind,
            "stopping_word": stopped,
            "tokens_cached": usage.prompt_tokens + usage.output_tokens,
            "timings": timings(end),
            **omitted_lines(usage),
            **self._notes,
        }
        if rows is not None:
            found["completion_probabilities"] = rows
        return found if paths is None else picked(found, paths)


async def infill(call: Call) -> None:
    """Fill a gap."""
    await answer(call, LlamaAnswer(call, await parse_infill(call)))


async def complete(call: Call) -> None:
    """Continue a text."""
    await answer(call, LlamaAnswer(call, await parse_completion(call)))


async def tokenize(call: Call) -> None:
    """Text to ids."""
    body, fields = await call.read_request(TOKENIZE_FIELDS)
    own, model = fields.own, call.model
    if "content" not in own:
        body.refuse("content", "must be a string")
    body.violations.raise_if_any()
    ids = await model.tokenizer.encode(
        own["content"], add_special=own["add_special"], parse_special=own["parse_special"]
    )
    shown = [_piece(model.tokenizer.loaded, token) for token in ids] if own["with_pieces"] else ids
    await call.reply(200, {"tokens": shown})


async def detokenize(call: Call) -> None:
    """Ids to text, special tokens by name. vLLM has the same body, and its clients read ``prompt``."""
    body, _ = await call.read_request(DETOKENIZE_FIELDS)
    ids = body.integers("tokens", 0, call.model.info.vocab_size - 1)
    body.violations.raise_if_any()
    text = await call.model.tokenizer.decode(ids, skip_special=False)
    await call.reply(200, {"content": text, "prompt": text})


async def apply_template(call: Call) -> None:
    """A conversation as text, without the begin token, which /completion adds itself."""
    body, fields = await call.read_request(TEMPLATE_FIELDS)
    model = call.model
    ids = await read_conversation(body, fields.own, model, read_tools(body, model.tokenizer.loaded))
    body.violations.raise_if_any()
    begin = tuple(await model.tokenizer.encode(""))
    shown = ids[len(begin) :] if ids[: len(begin)] == begin else ids
    await call.reply(200, {"prompt": await model.tokenizer.decode(shown, skip_special=False)})


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """A piece that is not valid text is returned as bytes."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


async def health(call: Call) -> None:
    """Whether a request would be accepted now."""
    state = call.server.models.state
    if not call.server.models.take_requests:  # of a ready engine, the tokenizer is still loading
        if call.model.gate.is_closed:
            raise DrainingError
        raise EngineDeadError("Loading model" if state in ("loading", "ready") else f"not ready: {state}")
    await call.reply(200, {"status": "ok"})


async def slots(call: Call) -> None:
    """The slots of the batch, as many of them busy as requests run."""
    info, load = call.model.info, call.model.client.engine.load
    if call.query.get("fail_on_no_slot") and load.running_requests >= info.max_batch:
        raise EngineDeadError("no slot available")
    known = {"n_ctx": info.max_context, "speculative": bool(info.drafters)}
    busy = (number < load.running_requests for number in range(info.max_batch))
    await call.reply(200, [{"id": i, **known, "is_processing": working} for i, working in enumerate(busy)])


async def props(call: Call) -> None:
    """The model and the server."""
    call.model.check_name(call.query.get("model"))
    info = call.model.info
    await call.reply(
        200,
        {
            "default_generation_settings": {"n_ctx": info.max_context, "params": {"n_predict": -1}},
            "total_slots": info.max_batch,
            "model_alias": call.model.name,
            "model_path": info.target,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "",
            "build_info": f"specdec-{specdec.__version__}",
            "is_sleeping": False,
        },
    )


TOKENIZE_FIELDS: Table = (
    MODEL,
    text_field("content"),
    flag_field("add_special"),
    flag_field("parse_special", default=True),
    flag_field("with_pieces"),
)
DETOKENIZE_FIELDS: Table = (MODEL, Field("tokens", IDS))
TEMPLATE_FIELDS: Table = (MODEL, *CONVERSATION)
_ERRORS = ErrorStyle(_error_body, sse)
_MODEL = {"name": "model", "in": "query", "schema": TEXT}
_FREE = {"name": "fail_on_no_slot", "in": "query", "schema": TEXT, "description": "503 if no slot is free."}
LLAMACPP = (
    Endpoint("POST", "/infill", infill, _ERRORS, "llama.cpp: fill a gap", INFILL_FIELDS,
             ("input_prefix", "input_suffix"), task=Task.FILL, gated=True),
    *(
        Endpoint("POST", path, complete, _ERRORS, "llama.cpp: continue a text", COMPLETION_FIELDS, ("prompt",),
                 gated=True)
        for path in ("/completion", "/completions")
    ),
    Endpoint("POST", "/tokenize", tokenize, _ERRORS, "llama.cpp: ids of a text", TOKENIZE_FIELDS, ("content",)),
    Endpoint("POST", "/detokenize", detokenize, _ERRORS, "llama.cpp, vLLM: text of ids", DETOKENIZE_FIELDS,
             ("tokens",)),
    Endpoint("POST", "/apply-template", apply_template, _ERRORS, "llama.cpp: the text of a conversation",
             TEMPLATE_FIELDS, ("messages",), task=Task.CHAT),
    Endpoint("GET", "/slots", slots, _ERRORS, "llama.cpp: which slots are free", parameters=(_FREE,)),
    Endpoint("GET", "/props", props, _ERRORS, "llama.cpp: the model and the server", parameters=(_MODEL,)),
    Endpoint("GET", "/health", health, _ERRORS, "llama.cpp: requests are taken"),
)  # fmt: skip
