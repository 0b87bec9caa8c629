"""llama.cpp's /infill and /completion: their bodies, prompts and answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from server.completion.documents import ContextFile, Gap
from server.completion.requests import CompletionOptions
from server.http.answering import Answer, Sample, omitted_lines, sse
from server.http.call import Call
from server.http.fields import COMMON, MODEL, STOPPING, STREAM, THOUGHTS, TTFT, read_limit
from server.http.openai_format import logprob_entries
from server.json_body import Body, RequestFields, is_number
from server.request_fields import (
    COUNT,
    IDS,
    INTEGER,
    NUMBER,
    OBJECT,
    TEXT,
    Field,
    Table,
    either,
    flag_field,
    is_token_id,
    listed,
    param_field,
    read_grammar,
    text_field,
    with_fields,
)
from server.served_model import ServedModel
from specdec.core.fields import INT31, MAX_BIAS, MAX_LOGPROBS, MAX_N
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    Request,
    RequestEvent,
    SamplingParams,
    TextRules,
)
from specdec.engine.validation import check_requests


def _read_indent(body: Body, name: str) -> TextRules | None:
    indent = body.integer(name, 0, INT31)
    return TextRules(min_indent=indent) if indent else None


def _read_temperature(body: Body, name: str) -> float | None:
    value = body.number(name)
    return None if value is None else max(0.0, value)


def _read_samples(body: Body, name: str) -> int:
    """llama.vscode looks for these very words if the number is out of range."""
    value = body.raw(name)
    if type(value) is int and 1 <= value <= MAX_N:
        return value
    got = str(value)[:20]
    body.refuse(name, f"Field '{name}': Value must be between 1 <= value <= {MAX_N}, but got {got}")
    return 1


def _read_gbnf(body: Body, name: str) -> GrammarParams | None:
    text = body.text(name)
    return GrammarParams(GrammarKind.EBNF, text) if text else None


_OFF = ("top_k", "top_p", "min_p")  # samplers that a list of ``samplers`` without them turns off
_TEXTS = listed(TEXT)
_SHARED: Table = (
    MODEL,
    Field("n_predict", {**INTEGER, "description": "Negative: no limit. 0: only compute the prompt."},
          partial(read_limit, low=-INT31), "stopping.max_tokens"),
    Field("n_indent", {**COUNT, "description": "End before a line that is indented less."}, _read_indent,
          "stopping.rules"),
    Field("t_max_predict_ms", {**NUMBER, "description": "From the first token on; the line is finished."}, Body.number),
    STREAM,
    Field("id_slot", {**INTEGER, "description": "Ignored: prompts share one cache."}, Body.raw),
    flag_field("return_tokens"),
    Field("response_fields", {**_TEXTS, "description": "Paths such as timings/prompt_n; the answer has only these."},
          Body.texts),
    Field("samplers", {**_TEXTS, "description": "The active samplers; infill without a temperature is greedy."},
          Body.raw),
    Field("temperature", param_field(SamplingParams, "temperature", default=0.8).schema, _read_temperature,
          "sampling.temperature", 0.8),
    param_field(SamplingParams, "top_k", default=40),
    param_field(SamplingParams, "top_p", default=0.95),
    param_field(SamplingParams, "min_p", default=0.05),
    param_field(SamplingParams, "repetition_penalty", "repeat_penalty"),
    param_field(SamplingParams, "presence_penalty"),
    param_field(SamplingParams, "frequency_penalty"),
    param_field(SamplingParams, "seed"),
    *THOUGHTS,
    Field("n_cmpl", {**param_field(SamplingParams, "n").schema, "description": "Above 1 the answer is a list."},
          _read_samples, "sampling.n"),
    Field("logit_bias", {
        **either(listed({"type": "array", "minItems": 2, "maxItems": 2}), OBJECT),
        "description": "Pairs, or an object, of a token id or a text and a number to add; false: never.",
    }),
    Field("n_probs", {**COUNT, "maximum": MAX_LOGPROBS, "description": "Likeliest tokens to return with each token."},
          lambda body, name: body.integer(name, 0, MAX_LOGPROBS) or None, "output.logprobs"),
    flag_field("post_sampling_probs", "Refused with n_probs, which returns the model's own probabilities."),
    Field("grammar", {**TEXT, "description": "GBNF."}, _read_gbnf, "grammar"),
    Field("json_schema", OBJECT, partial(read_grammar, kind=GrammarKind.JSON_SCHEMA), "grammar"),
    *STOPPING,
    *COMMON,
)  # fmt: skip
_EXTRA = with_fields({"text": TEXT, "filename": TEXT, "time": {"description": "A number orders the texts."}}, "text")
INFILL_FIELDS: Table = (
    *_SHARED,
    text_field("input_prefix"),
    text_field("input_suffix"),
    text_field("prompt", "The cursor's line in front of it."),
    Field("input_extra", {**listed(_EXTRA), "description": "Other texts of the project."}),
    TTFT,
)
COMPLETION_FIELDS: Table = (*_SHARED, Field("prompt", either(TEXT, IDS), Body.raw))


MAX_TEXTS = 256  # each is tokenised
_BIAS_RULE = "must be a list of pairs, or an object, of a token id or a text and a number or false"


async def _read_logit_bias(body: Body, model: ServedModel) -> tuple[tuple[int, float], ...]:
    """``logit_bias``: a number to add to the logit of a token id, or of every token of a text. False bans the token.

    Biases of one token add up.
    """
    pairs = _pairs(body.raw("logit_bias") if body.has("logit_bias") else [])
    if pairs is None:
        body.refuse("logit_bias", _BIAS_RULE)
        return ()
    if sum(isinstance(what, str) for what, _ in pairs) > MAX_TEXTS:
        body.refuse("logit_bias", f"at most {MAX_TEXTS} texts; give token ids instead, which /tokenize returns")
        return ()
    biases: dict[int, float] = {}
    for what, bias in pairs:
        added = -math.inf if bias is False else bias
        for token in [what] if isinstance(what, int) else await model.tokenizer.encode(what, add_special=False):
            biases[token] = biases.get(token, 0.0) + added
    return tuple((token, -MAX_BIAS if bias == -math.inf else bias) for token, bias in sorted(biases.items()))


def _pairs(given: Any) -> list[Any] | None:
    """None: it has another form. Keys of an object that are decimal numbers are token ids."""
    if isinstance(given, dict):
        given = [[int(name) if is_token_id(name) else name, bias] for name, bias in given.items()]
    sound = isinstance(given, list) and all(isinstance(p, list) and len(p) == 2 and _good(*p) for p in given)
    return given if sound else None


def _good(what: Any, bias: Any) -> bool:
    return (type(what) is int or isinstance(what, str)) and (is_number(bias) or bias is False)


async def _read_options(call: Call, table: Table) -> tuple[Body, RequestFields]:
    """The body, and its options as llama.cpp understands them."""
    body, fields = await call.read_request(table)
    engine, own = fields.engine, fields.own
    samplers = own.get("samplers")
    if isinstance(samplers, list):  # the older form, a text of one letter each, is ignored
        active = body.texts("samplers")
        for name in _OFF:
            if name not in active:
                engine.pop(f"sampling.{name}", None)
        if not body.has("temperature") and "temperature" not in active:
            # That sampler, too, prefers what is likeliest to be meant.
            greedy = "infill" in active and engine.get("sampling.n", 1) == 1
            engine["sampling.temperature"] = 0.0 if greedy else 1.0
    engine["sampling.logit_bias"] = await _read_logit_bias(body, call.model)
    # ``t_max_prompt_ms`` is ignored, as by llama.cpp: a warm-up that gives 1 ms wants its prompt computed.
    limit_ms = own.get("t_max_predict_ms", 0)
    if limit_ms > 0:
        engine |= {"stopping.decode_limit_s": limit_ms / 1e3, "stopping.finish_line": True}
    if own["post_sampling_probs"] and "output.logprobs" in engine:
        body.refuse("post_sampling_probs", "is not served; leave it out, and n_probs returns the model's probabilities")
    return body, fields


async def parse_completion(call: Call) -> LlamaAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields = await _read_options(call, COMPLETION_FIELDS)
    call.field_names["prompt.token_ids"] = "prompt"
    ids = await _prompt(body, call.model)
    return LlamaAnswer(call, call.checked_request(f"cmpl-{call.request_id}", body, fields, ids), fields)


async def _prompt(body: Body, model: ServedModel) -> tuple[int, ...]:
    """Special tokens spelled out in a text are read as such. Only the first piece gets the begin token."""
    given: Any = body.raw("prompt")
    pieces = [given] if isinstance(given, str) else given
    if not isinstance(pieces, list) or not all(isinstance(p, str) or type(p) is int for p in pieces):
        body.refuse("prompt", "must be text, a list of token ids, or a list of both")
        return ()
    if len(pieces) > 1 and all(isinstance(piece, str) for piece in pieces):
        body.refuse("prompt", "is several prompts; send each in a call of its own, or all to /v1/completions")
        return ()
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, str):
            ids += await model.tokenizer.encode(piece, add_special=i == 0, parse_special=True)
        else:
            ids.append(piece)
    return tuple(ids)


REPOSITORY, OWN_NAME = "myproject", "filename"  # what llama.cpp itself calls them


async def parse_infill(call: Call) -> LlamaAnswer:
    """What ``call`` asks for.

    Raises:
        FimNotSupportedError: the model cannot fill in the middle of a text.
        RequestError: it cannot be served; the error names every bad field.
    """
    body, fields = await _read_options(call, INFILL_FIELDS)
    gap = _gap(body, fields)
    # No end where the text leaves its block: clients say what they want in n_indent.
    options = CompletionOptions(fields.request("", ()), ttft_ms=fields.own.get("ttft_ms"), dedent=False)
    body.violations.raise_if_any()
    request = await call.model.maker.make(gap, options, f"infill-{call.request_id}")
    check_requests([request], call.model.info, body.violations)
    return LlamaAnswer(call, request, fields)


def _gap(body: Body, fields: RequestFields) -> Gap:
    """``prompt`` is the cursor's line in front of it. The last of the other texts is the newest, and is used first."""
    for name in ("input_prefix", "input_suffix"):
        if not body.has(name):
            body.refuse(name, f'"{name}" is required')
    files = []
    for i, extra in enumerate(body.objects("input_extra")):
        text, filename = extra.text("text"), extra.text("filename")
        if text is None:
            extra.refuse("text", "must be a string")
            continue
        # llama.cpp ignores it, so clients send anything: milliseconds, or a list, Vim's reltime().
        time_ms = int(given) if is_number(given := extra.raw("time")) else 0
        files.append(ContextFile(filename or f"snippet{i}", text, time_ms=time_ms))
    shown, own = bool(files), fields.own
    return Gap(
        prefix=own.get("input_prefix", "") + own.get("prompt", ""),
        suffix=own.get("input_suffix", ""),
        files=tuple(files),
        repo=REPOSITORY if shown else "",
        path=OWN_NAME if shown else "",
    )


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

    def __init__(self, call: Call, request: Request, fields: RequestFields) -> None:
        own = fields.own
        super().__init__(call, [request], stream=own["stream"])
        self._model, self._notes, self._returns_ids = call.model.name, call.notes(), own["return_tokens"]
        self._paths: tuple[str, ...] | None = own.get("response_fields")  # the only keys of the end; None: all of it
        # As the client gave it, without tokens that heal the prompt's end.
        self._n_predict = fields.engine.get("stopping.max_tokens", -1)
        self._made = [0] * request.sampling.n
        self._with_new_line: set[int] = set()  # samples

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Finished):
            return sse(self._result("", [], event, has_new_line=event.index in self._with_new_line))
        if not isinstance(event, Delta):
            return b""
        self._made[event.index] += len(event.token_ids)
        if "\n" in event.text:
            self._with_new_line.add(event.index)
        if not event.text and not self._returns_ids and not event.logprobs:
            return b""
        found: dict[str, Any] = {
            "index": event.index,
            "content": event.text,
            "tokens": event.token_ids if self._returns_ids else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._made[event.index],
            "tokens_evaluated": len(self.request.prompt_ids),
        }
        if event.logprobs:
            found["completion_probabilities"] = logprob_entries(self._tokenizer, event.logprobs, with_ids=True)
        return sse(found)

    def whole(self, samples: Sequence[Sample]) -> Any:
        """Several samples are a list, one is not."""
        found, wanted = [], self.request.output.logprobs is not None
        for each in samples:
            rows = logprob_entries(self._tokenizer, each.logprobs, with_ids=True) if wanted else None
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
        sampling, paths = self.request.sampling, self._paths
        found = {
            "index": end.index,
            "content": text,
            "tokens": token_ids if self._returns_ids else [],
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
                "n_predict": self._n_predict,
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
