"""What bodies of llama.cpp's /infill and /completion ask for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.auth.principal import current_caller
from server.completion.documents import ContextFile, Gap
from server.completion.requests import CompletionOptions
from server.http.call import Call
from server.http.fields import read_common
from server.interfaces import TokenizerLike
from server.json_body import Body, write_json
from server.request_fields import is_token_id, read_params, read_stopping
from server.served_model import ServedModel
from specdec.core.fields import INT31, MAX_BIAS, MAX_LOGPROBS, MAX_N
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    StoppingParams,
    TextRules,
    TokenLogprobs,
)
from specdec.engine.validation import check_requests


@dataclass(frozen=True, slots=True)
class LlamaRequest:
    """``response_fields`` None: the whole answer; else the paths (``timings/prompt_n``) that are wanted of it, which
    are its keys then. ``n_predict`` as it was asked for; -1: no limit. ``notes`` are told beside the answer."""

    request: Request
    stream: bool
    return_tokens: bool
    response_fields: tuple[str, ...] | None
    n_predict: int
    notes: Mapping[str, Any]


MAX_TEXTS = 256  # each is tokenised
_BIAS_RULE = "must be a list of pairs, or an object, of a token id or a text and a number or false"


async def read_logit_bias(body: Body, model: ServedModel) -> tuple[tuple[int, float], ...]:
    """``logit_bias``: what is added to the logits of a token id, or of every token of a text; false: never to be said.

    Biases of one token add up.
    """
    pairs = _pairs(body.raw("logit_bias"))
    if pairs is None or not all(_good(*pair) for pair in pairs):
        body.refuse("logit_bias", _BIAS_RULE)
        return ()
    if sum(isinstance(what, str) for what, _ in pairs) > MAX_TEXTS:
        body.refuse("logit_bias", f"at most {MAX_TEXTS} texts; give token ids instead, which /tokenize tells")
        return ()
    biases: dict[int, float] = {}
    never: set[int] = set()
    for what, bias in pairs:
        for token in [what] if isinstance(what, int) else await model.tokenizer.encode(what, add_special=False):
            biases[token] = biases.get(token, 0.0) + bias
            if bias is False:
                never.add(token)
    return tuple((token, -MAX_BIAS if token in never else bias) for token, bias in sorted(biases.items()))


def _pairs(given: Any) -> list[tuple[Any, Any]] | None:
    """None where it has another form. An object's keys are ids where they are numbers in decimal."""
    if isinstance(given, dict):
        return [(int(name) if is_token_id(name) else name, bias) for name, bias in given.items()]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        return None
    return [(what, bias) for what, bias in given]


def _good(what: Any, bias: Any) -> bool:
    number = isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias)
    return (type(what) is int or isinstance(what, str)) and (number or bias is False)


_FLOOR = -9999.0  # stands for minus infinity, which JSON can not say


def read_output(body: Body) -> OutputParams:
    """``n_probs``: so many of the likeliest tokens beside each; 0: no probabilities. They are the model's own; the
    engine tells none after sampling (``post_sampling_probs``)."""
    wanted = body.integer("n_probs", 0, MAX_LOGPROBS)
    if body.flag("post_sampling_probs") and wanted:
        body.refuse("post_sampling_probs", "is not told; leave it out, and n_probs gives the model's own probabilities")
    body.names["output.logprobs"] = body.path("n_probs")
    return OutputParams(logprobs=wanted or None)


def probabilities(rows: Sequence[TokenLogprobs], tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    """What ``completion_probabilities`` holds: natural logarithms, one entry per token."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(data), "logprob": max(logprob, _FLOOR)}

    return [
        named(row.token_id, row.logprob) | {"top_logprobs": [named(token, logprob) for token, logprob in row.top]}
        for row in rows
    ]


DIALECT = "llamacpp"
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's own


def read_samples(body: Body) -> int:
    """``n_cmpl``, how many samples; llama.vscode looks for these very words where it is out of range."""
    value = body.raw("n_cmpl")
    if value is None:
        return 1
    if type(value) is int and 1 <= value <= MAX_N:
        return value
    got = str(value)[:20]
    body.refuse("n_cmpl", f"Field 'n_cmpl': Value must be between 1 <= value <= {MAX_N}, but got {got}")
    return 1


async def read_llama_sampling(body: Body, model: ServedModel) -> SamplingParams:
    """The fields of llama.cpp and its defaults. With a list ``samplers``, only what it names is on; where that is
    ``infill`` without a temperature, one sample is greedy: that sampler, too, takes what is likeliest to be meant."""
    n, asked = read_samples(body), _samplers(body)
    left_out = {name: value for name, value in DEFAULTS.items() if not body.has(name)}
    off: dict[str, Any] = {}
    if asked is not None:
        off = {name: getattr(SamplingParams(), name) for name in ("top_k", "top_p", "min_p") if name not in asked}
        if "temperature" in left_out and "temperature" not in asked:
            left_out["temperature"] = 0.0 if "infill" in asked and n == 1 else 1.0
    bias = await read_logit_bias(body, model)
    sampling = read_params(body, SamplingParams, DIALECT, n=n, logit_bias=bias, **left_out)
    return dataclasses.replace(sampling, **{"temperature": max(0.0, sampling.temperature), **off})


def _samplers(body: Body) -> tuple[str, ...] | None:
    """None where no list is given; the former form, a text of one letter each, is not looked at."""
    return body.texts("samplers") if isinstance(body.raw("samplers"), list) else None


def read_llama_stopping(body: Body, tokenizer: TokenizerLike) -> StoppingParams:
    """``n_predict`` (negative: up to the context limit), ``stop``, ``n_indent`` (before a line indented less) and
    ``t_max_predict_ms``, which counts from the first token and lets the line be ended. A limit to the prompt's time
    (``t_max_prompt_ms``) is none to llama.cpp either: a warm-up that gives 1 ms wants its prompt computed."""
    limit = body.integer("n_predict", -INT31, INT31)
    body.names["stopping.max_tokens"] = body.path("n_predict")
    stopping = read_stopping(body, tokenizer, None if limit is None or limit < 0 else limit)
    indent = body.integer("n_indent", 0, INT31)
    if indent:
        stopping = dataclasses.replace(stopping, rules=TextRules(min_indent=indent))
    most_ms = body.number("t_max_predict_ms")
    if most_ms is None or most_ms <= 0:
        return stopping
    return dataclasses.replace(stopping, decode_limit_s=most_ms / 1e3, finish_line=True)


def read_llama_grammar(body: Body) -> GrammarParams | None:
    """``grammar`` as GBNF, or ``json_schema``."""
    text, schema = body.text("grammar"), body.value("json_schema")
    if not text and schema is None:
        return None
    if text and schema is not None:
        body.refuse("json_schema", "grammar is given too; give one of them")
    if text:
        return GrammarParams(GrammarKind.EBNF, text)
    body.names["grammar"] = body.path("json_schema")
    if not isinstance(schema, dict):
        body.refuse("json_schema", "must be a JSON schema")
        return None
    return GrammarParams(GrammarKind.JSON_SCHEMA, write_json(schema).decode())


def _with_answer_options(call: Call, body: Body, request: Request, n_predict: int | None) -> LlamaRequest:
    """``request`` and how it is to be answered."""
    fields = body.texts("response_fields")
    return LlamaRequest(
        request,
        stream=body.flag("stream"),
        return_tokens=body.flag("return_tokens"),
        response_fields=fields if body.has("response_fields") else None,
        n_predict=-1 if n_predict is None else n_predict,
        notes=call.notes(),
    )


async def _options(call: Call, body: Body) -> dict[str, Any]:
    """What both calls ask for beside the prompt, as fields of `Request`."""
    model = call.model
    return {
        "stopping": read_llama_stopping(body, model.tokenizer.loaded),
        "sampling": await read_llama_sampling(body, model),
        "output": read_output(body),
        "grammar": read_llama_grammar(body),
        **read_common(call, body),
    }


_PROMPT_RULE = "must be text, a list of token ids, or a list of both"


async def parse_completion(call: Call) -> LlamaRequest:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, model = call.body(), call.model
    call.model.check_name(body.text("model"))
    call.field_names["prompt.token_ids"] = "prompt"
    ids = await _prompt(body, model)
    options = await _options(call, body)
    # A stand-in where the prompt is bad: the other fields are checked all the same.
    request = Request(request_id=f"cmpl-{call.request_id}", prompt_ids=ids or (0,), **options)
    parsed = _with_answer_options(call, body, request, request.stopping.max_tokens)
    body.violations.check(bool(ids) or bool(body.violations.found), "prompt", "must amount to at least one token")
    check_requests([request], call.model.info, body.violations)
    return parsed


async def _prompt(body: Body, model: ServedModel) -> tuple[int, ...]:
    """Special tokens spelled out in a text are read as such, and only its first piece begins as a text does."""
    given: Any = body.raw("prompt")
    pieces = [given] if isinstance(given, str) else given
    good = isinstance(pieces, list) and all(isinstance(p, str) or type(p) is int for p in pieces)
    if not good:
        body.refuse("prompt", _PROMPT_RULE)
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


async def parse_infill(call: Call) -> LlamaRequest:
    """What ``call`` asks for.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    body = call.body()
    call.model.check_name(body.text("model"))
    gap = _gap(body)
    # No end where the text leaves its block: clients say what they want in n_indent.
    options = CompletionOptions(dedent=False, **await _options(call, body))
    body.violations.raise_if_any()
    maker = call.model.completion.maker
    request = await maker.make(gap, options, current_caller(), f"infill-{call.request_id}")
    parsed = _with_answer_options(call, body, request, options.stopping.max_tokens)
    check_requests([request], call.model.info, body.violations)
    return parsed


def _time(given: Any) -> int:
    """llama.cpp never looks at ``time``, so clients send what they like: milliseconds, or Vim's reltime(), a list."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    return int(given) if is_number else 0


def _gap(body: Body) -> Gap:
    """``prompt`` is the cursor's line in front of it. The newest of the other texts is the last, and goes in first."""
    for name in ("input_prefix", "input_suffix"):
        if not body.has(name):
            body.refuse(name, f'"{name}" is required')
    files = []
    for i, extra in enumerate(body.objects("input_extra")):
        text, filename = extra.text("text"), extra.text("filename")
        if text is None:
            extra.refuse("text", "must be a string")
            continue
        files.append(ContextFile(filename or f"snippet{i}", text, time_ms=_time(extra.raw("time"))))
    shown = bool(files)
    return Gap(
        prefix=(body.text("input_prefix") or "") + (body.text("prompt") or ""),
        suffix=body.text("input_suffix") or "",
        files=tuple(files),
        repo=REPOSITORY if shown else "",
        path=OWN_NAME if shown else "",
    )
